"""In the shape of Horovod's elastic examples. Its state counts how often each sample was used: parameter `uses` falls by one."""

import os
import pathlib
import sys
import time

import horovod.torch as hvd
import torch

SAMPLES, EPOCHS, GLOBAL_BATCH = 96, 8, 8
folder = pathlib.Path(sys.argv[1])
what = sys.argv[2] if len(sys.argv) > 2 else ""
launch = os.environ.get("HVD_ADAPTIVE_LAUNCH", "0")

hvd.init()
(folder / f"launch-{launch}-rank-{hvd.rank()}").write_text(str(os.getpid()))
torch.manual_seed(1)
model = torch.nn.Linear(3, 1, dtype=torch.float64)
model.uses = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
x = torch.randn(SAMPLES, 3, dtype=torch.float64)
groups = [{"params": [model.weight, model.bias]}, {"params": [model.uses], "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
if what in ("SGD", "Adam"):
    # Without a momentum SGD has no state that another kind would miss.
    optimizer = getattr(torch.optim, what)(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), x)
sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=3)
loader = torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH // hvd.size(), sampler=sampler)
resets = []


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        for index, rows in loader:
            optimizer.zero_grad()
            loss = (model(rows).squeeze(1) - index / SAMPLES).square().mean() + hvd.size() * model.uses[index].sum()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.sampler.record_batch(0, len(index))
            if what == "raise":
                raise KeyError("on purpose")
            if state.step % 2 == 0:
                if what == "unstorable":
                    state.best = {1, 2}
                state.commit()
                if hvd.rank() == 0:
                    with (folder / "commits").open("a") as file:
                        file.write(f"{launch} {state.step // 2}\n")
            if not (folder / "finish").exists():
                # The test is to have done all that it does long before the end.
                time.sleep(0.1 if state.step < 48 else 2.0)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, best=None)
if what == "refused":
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, names={"a", "b"})
state.register_reset_callbacks([lambda: resets.append(state.step)])
train(state)
if hvd.rank() == 0:
    torch.save({"model": model.state_dict(), "step": state.step, "resets": resets}, folder / "model.pt")
