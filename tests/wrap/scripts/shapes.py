"""Loops as people write them, whose batches cannot be shared out, or only if one looks closely; by name."""

import argparse
import itertools

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import make_data
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--at", type=int, default=25, help="no_backward: the last rank's step without one")
args = parser.parse_args()
mode, BATCH = args.mode, 8


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(64, 32)
        self.fc2 = torch.nn.Linear(32, 10)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x.reshape(-1, 64))))


class Checkpointed(Net):
    def forward(self, x):
        return self.fc2(checkpoint(self.fc1, x.reshape(-1, 64), use_reentrant=False).relu())


hvd.init()
torch.manual_seed(3)
torch.set_num_threads(1)
num_rows = 236 if mode.startswith(("skip", "compile_short")) else 400 if mode == "no_backward" else 240
data = make_data(num_rows)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
validation = make_data(40, 1)
model = (Checkpointed() if mode == "checkpoint" else Net()).double()
if mode == "script":
    model = torch.jit.script(model)
if mode == "trace_first":
    images, _ = next(iter(loader))
    torch.jit.trace(model, images)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("/tmp/hvd_adaptive_shapes")
    writer.add_graph(model, images)
    writer.close()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
forward = model
num_compilations = 0


def compiler(graph, inputs):
    global num_compilations
    num_compilations += 1
    return graph.forward


if mode in ("compile_model", "compile_short"):
    forward = torch.compile(model, backend=compiler)
if mode == "compile_in_place":
    model.compile(backend=compiler)
num_steps = num_seen = num_validations = 0
num_epochs_begun = 0


def loss_of(x, y):
    if mode == "gather_loss":
        z = F.normalize(forward(x), dim=1)
        with torch.no_grad():
            others = hvd.allgather(z.detach(), name="features")
        start = hvd.rank() * BATCH
        return F.cross_entropy(z @ torch.cat([others[:start], z, others[start + BATCH :]]).t(), torch.arange(len(z)) + start)
    if mode == "gather_gradient":
        z = hvd.allgather(F.normalize(forward(x), dim=1), name="features")
        return F.cross_entropy(z @ z.t(), torch.arange(len(z)))
    if mode == "late_scaled" and num_steps >= 30:
        x = (x - x.mean(0)) / x.std(0)
    out = forward(x)
    if mode == "late_weights" and num_steps >= 30:
        each = F.cross_entropy(out, y, reduction="none")
        return (each * (each.detach() >= each.detach().median()).double()).mean()
    if mode == "late_weights":
        return (F.cross_entropy(out, y, reduction="none") * torch.ones_like(y).double()).mean()
    if mode == "clip":
        z = F.normalize(out, dim=1)
        return F.cross_entropy(z @ z.flip(1).t(), torch.arange(z.shape[0]))
    if mode == "mask":
        mask = y > 1
        return F.cross_entropy(out[mask], y[mask])
    if mode == "mask_mean":
        mask = (y > 4).double()
        return (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)
    if mode == "ohem":
        return F.cross_entropy(out, y, reduction="none").topk(4).values.mean()
    if mode == "late_ohem" and num_steps >= 15:
        return F.cross_entropy(out, y, reduction="none").topk(min(4, len(y))).values.mean()
    if mode == "late_ignored":
        y = torch.where((y == 3) & (num_steps >= 15), -100, y)
    if mode == "triplets":
        order = torch.roll(torch.arange(len(out)), 1)
        return F.triplet_margin_loss(out, out + 0.1, out[order])
    if mode == "rmse":
        return F.mse_loss(out, F.one_hot(y, 10).double()).sqrt()
    if mode == "sum_by_size":
        return F.cross_entropy(out, y, reduction="sum") / x.size(0)
    if mode == "sum_by_len":
        return F.cross_entropy(out, y, reduction="none").sum() / len(x)
    if mode == "smoothing":
        logp = F.log_softmax(out, dim=-1)
        nll = -logp.gather(1, y.unsqueeze(1)).squeeze(1)
        return (0.9 * nll - 0.1 * logp.mean(dim=-1)).mean()
    return F.cross_entropy(out, y)


def step(x, y):
    global num_steps
    optimizer.zero_grad()
    loss = loss_of(x, y)
    if mode != "no_backward" or num_steps != args.at or hvd.rank() != hvd.size() - 1:
        loss.backward()
    optimizer.step()
    if mode.startswith("pick") and num_steps % 15 == 0:
        # Pictures for a log, as people take them: the first ones by number, or all.
        if mode == "pick_all":
            [x[number].mean() for number in range(x.shape[0])]
        else:
            [x[number].mean() for number in range(7 if mode == "pick" else BATCH)]
    num_steps += 1
    if mode == "gather_metric":
        hvd.allgather((forward(x).argmax(1) == y).double(), name="correct")
    if mode == "reduce_metric":
        hvd.allreduce((forward(x).argmax(1) == y).double(), name="correct")
    if mode == "late_reduce" and num_steps > 20:
        hvd.allreduce((forward(x).argmax(1) == y).double(), name="correct")
    return loss.detach()


if mode == "compile_step":
    loss_of = torch.compile(loss_of, backend="aot_eager")


def validate():
    global num_validations
    num_validations += 1
    x, y = validation.tensors
    with torch.no_grad():
        hvd.allreduce(F.cross_entropy(model(x), y), name="validation")


def endless():
    global num_epochs_begun
    for epoch in itertools.count():
        num_epochs_begun += 1
        sampler.set_epoch(epoch)
        for x, y in loader:
            if len(x) != BATCH:
                break
            yield x, y


def train():
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            loss = step(x, y)
            if number % 5 == 0:
                print(f"{epoch} {number * len(x)}/{len(data)} {loss.item():.4f}")
        validate()


def train_without_short_batches():
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            if mode == "skip_size" and x.size(0) != BATCH:
                continue
            if mode == "skip_shape" and x.shape[0] < BATCH:
                continue
            if mode == "skip_len":
                size = len(x)
                if size != BATCH:
                    continue
            step(x, y)
        validate()


def train_without_batches_that_look_short():
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            if len(y.tolist()) != BATCH:
                continue
            step(x, y)
        validate()


def train_full_batches():
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            assert x.shape == (BATCH, 8, 8)
            step(x, y)
        validate()


def train_counting():
    global num_seen
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            step(x, y)
            num_seen += len(x)
            if mode == "count_validate" and num_seen >= 40 * (num_validations + 1):
                validate()
            if mode == "count_modulo" and num_seen % 40 == 0:
                validate()
            if mode == "count_stop" and num_seen >= 200:
                return


def train_counting_sizes():
    seen = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            step(x, y)
            seen += y.size(0)
            if seen > 50:
                validate()
                seen = 0


def train_endless():
    for x, y in itertools.islice(endless(), 14 * args.epochs):
        step(x, y)


def train_with_join():
    """Ranks with different numbers of batches in each epoch."""
    batches = list(loader)
    for _ in range(args.epochs):
        for x, y in batches[: 7 + 4 * hvd.rank()]:
            step(x, y)
        hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)


def train_own_join():
    sizes = [56, 120]
    mine = torch.utils.data.Subset(data, range(sizes[hvd.rank() % 2]))
    for _ in range(args.epochs):
        for x, y in DataLoader(mine, batch_size=BATCH):
            step(x, y)
        hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)


loops = {
    "join_list": train_with_join,
    "join": train_own_join,
    "skip_endless": train_endless,
    "skip_hidden": train_without_batches_that_look_short,
    "assert": train_full_batches,
    "count_size": train_counting_sizes,
}
if mode in loops:
    loops[mode]()
elif mode.startswith("skip"):
    train_without_short_batches()
elif mode.startswith("count"):
    train_counting()
else:
    train()
if mode == "script_after":
    torch.jit.script(model)
    torch.jit.trace(model, validation.tensors[0])
