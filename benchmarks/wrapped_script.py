"""A plain Horovod script for benchmarks/wrapped.py: trains in blocks of steps, each when it is told to on standard input."""

import json
import os
import sys
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

num_warmup_steps, num_steps, batch_size = map(int, sys.argv[1:])
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
x = torch.randn(8192, 3, 16, 16)
dataset = TensorDataset(x.double(), x.reshape(8192, -1)[:, :10].argmax(1))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, stride=2), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10),
).double()  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
test = x[:64].double(), dataset.tensors[1][:64]


def batches():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def say(**values):
    if hvd.rank() == 0:
        print(json.dumps(values), flush=True)


def told():
    """Waits for the next word on rank 0, and for that rank on the others."""
    word = sys.stdin.readline() if hvd.rank() == 0 else ""
    return hvd.broadcast(torch.tensor(len(word)), root_rank=0, name="told").item() > 0


say(pids=hvd.allgather_object(os.getpid()))
source = batches()
while told():
    # The first steps of a block warm the caches again.
    for step in range(-num_warmup_steps, num_steps):
        if step == 0:
            begin = time.perf_counter()
        data, target = next(source)
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        say(step_s=seconds / num_steps, loss=F.cross_entropy(model(test[0]), test[1]).item())
