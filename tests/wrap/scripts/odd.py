"""Loops whose batches cannot have other sizes on other ranks."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("mode")
args = parser.parse_args()


class Lines(IterableDataset):
    def __iter__(self):
        for index in range(hvd.rank(), len(dataset), hvd.size()):
            yield dataset[index]


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x, hidden):
        return self.inner(x) + hidden.sum(1, keepdim=True)


def ahead(batches):
    """Fetches the next batch before this one is computed on, as loaders for CUDA streams do."""
    iterator = iter(batches)
    following = next(iterator, None)
    while following is not None:
        current, following = following, next(iterator, None)
        yield current


def make_loader(seed=0):
    data = make_data(240, seed)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(data, batch_size=8, sampler=sampler)


def batches():
    if args.mode == "iterable":
        return DataLoader(Lines(), batch_size=8)
    if args.mode == "unsplit":
        generator = torch.Generator().manual_seed(hvd.rank())
        return DataLoader(dataset, batch_size=8, shuffle=True, generator=generator)
    if args.mode == "ahead":
        return ahead(loader)
    if args.mode == "pairs":
        return ((torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in zip(loader, other_loader, strict=True))
    return loader


def loss_of(data, target):
    if args.mode == "sum":
        return F.cross_entropy(model(data), target, reduction="sum")
    if args.mode == "own_mean":
        return F.cross_entropy(model(data), target, reduction="none").mean()
    if args.mode == "class_weights":
        return F.cross_entropy(model(data), target, weight=torch.linspace(0.5, 1.5, 10, dtype=torch.float64))
    if args.mode == "fixed":
        return F.mse_loss(model(data).sum(1), zeros)
    if args.mode == "hidden":
        return F.cross_entropy(model(data, hidden), target)
    if args.mode == "mixup":
        return F.cross_entropy(model(0.5 * data + 0.5 * data[torch.arange(len(data) - 1, -1, -1)]), target)
    return F.cross_entropy(model(data), target)


hvd.init()
torch.manual_seed(3)
dataset = make_data(240)
loader, other_loader = make_loader(), make_loader(1)
validation_loader = DataLoader(dataset, batch_size=60)
first_look = iter(loader)
next(first_look)
model = (Recurrent() if args.mode == "hidden" else Net()).double()
hidden = torch.zeros(8, 4, dtype=torch.float64)
zeros = torch.zeros(8, dtype=torch.float64)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    named_parameters=model.named_parameters(),
    op=hvd.Adasum if args.mode == "adasum" else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train(state=None):
    for epoch in range(2):
        for number, (data, target) in enumerate(batches()):
            if args.mode == "eval_inside" and number % 3 == 0:
                with torch.no_grad():
                    for more, _ in validation_loader:
                        model(more)
                    for more, _ in validation_loader:
                        model(more)
                        break
            if args.mode == "late_cut" and epoch == 1:
                data, target = data[:3], target[:3]
            optimizer.zero_grad()
            loss_of(data, target).backward()
            optimizer.step()


if args.mode == "elastic":
    hvd.elastic.run(train)(hvd.elastic.TorchState(model=model, optimizer=optimizer))
else:
    train()
if args.mode == "join":
    # One rank has more to do than the others.
    for data, target in list(make_loader(2))[: 3 + 4 * hvd.rank()]:
        optimizer.zero_grad()
        loss_of(data, target).backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
