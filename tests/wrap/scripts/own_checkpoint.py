"""A plain script that goes on from the checkpoint that it writes after each epoch, as Horovod's ImageNet example does."""

import os
import pathlib
import sys
import time

import horovod.torch as hvd
import torch

EPOCHS = 120
folder = pathlib.Path(sys.argv[1])
launch = os.environ["HVD_ADAPTIVE_LAUNCH"]

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
saved = sorted(folder.glob("checkpoint-*.pt")) if hvd.rank() == 0 else []
first = 0
if saved:
    first = int(saved[-1].stem[11:]) + 1
    model.load_state_dict(torch.load(saved[-1]))
first = hvd.broadcast_object(first)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
(folder / f"launch-{launch}-rank-{hvd.rank()}").write_text(f"{os.getpid()} {first}")
for epoch in range(first, EPOCHS):
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.0 if (folder / "finish").exists() else 0.1)
    if hvd.rank() == 0:
        part = folder / "part"
        torch.save(model.state_dict(), part)
        part.rename(folder / f"checkpoint-{epoch:03d}.pt")
