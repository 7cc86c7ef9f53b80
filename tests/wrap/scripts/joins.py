"""Ranks with different numbers of batches call hvd.join() in each epoch; rank 0 also validates beside those that have.

Before that comes an epoch of another model with its own optimizer, as of another fold.
"""

import hashlib
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader, Subset

# Batches of rank 0 and of the others in each epoch. With a merge at the first step and then at every second one, all have steps
# since the last merge when they join, or only those that have missed it, or only the first, or none.
EPOCHS = [(6, 5), (6, 4), (8, 3), (7, 0), (2, 2), (3, 3)]


def same_everywhere():
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return len(set(hvd.allgather_object(hashlib.sha256(state).hexdigest()))) == 1


def begin():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), Net()).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer


hvd.init()
torch.manual_seed(3)
dataset, same, alone_s = make_data(240, seed=hvd.rank()), [], 0.0
for epoch, numbers in enumerate([EPOCHS[1], *EPOCHS]):
    if epoch < 2:
        model, optimizer = begin()
    for number, (data, target) in enumerate(DataLoader(Subset(dataset, range(8 * numbers[min(hvd.rank(), 1)])), batch_size=8)):
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
        if number == 4 and hvd.rank() == 0:
            start = time.monotonic()
            model.eval()
            alone_s = max(alone_s, time.monotonic() - start)
            model.train()
    hvd.join()
    model.eval()
    same.append(same_everywhere())
    model.train()
print(f"rank {hvd.rank()}: {same}, stood alone {alone_s:.0f} s")
