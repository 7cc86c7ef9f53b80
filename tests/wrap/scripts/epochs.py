"""What scripts do with whole epochs: a mean of the loss once an epoch, a start in the middle of one, a loader made anew."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("mode")
mode = parser.parse_args().mode

hvd.init()
torch.manual_seed(3)
torch.set_num_threads(1)
data = make_data(240)
model = Net().double()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
counts = []


def make_loader(rows):
    return DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows, num_replicas=hvd.size(), rank=hvd.rank()))


def train(loader, epoch, start=0):
    loader.sampler.set_epoch(epoch)
    total = count = 0
    for number, (x, y) in enumerate(loader):
        count += 1
        if number < start:
            continue
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    counts.append(count)
    return torch.tensor(total / len(loader))


if mode == "metric":
    loader = make_loader(data)
    hvd.allreduce(torch.tensor(0.0), name="before")
    for epoch in range(2):
        loss = train(loader, epoch)
        hvd.allreduce(loss, name="train_loss")
        hvd.allreduce(loss, name="train_sum", op=hvd.Sum)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.barrier()
if mode == "resume":
    loader = make_loader(data)
    for epoch, start in ((0, 0), (1, 5), (2, 0)):
        train(loader, epoch, start)
if mode == "folds":
    # The last loader is too short to get unequal shares.
    for epoch, num_steps in enumerate((12, 11, 3)):
        train(make_loader(Subset(data, range(8 * hvd.size() * num_steps))), epoch)
