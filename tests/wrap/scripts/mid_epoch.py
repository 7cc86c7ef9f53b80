"""Validates on all ranks and saves on rank 0 alone in the middle of an epoch, which it leaves early; then a moving average."""

import zlib

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def same_everywhere():
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return len(set(hvd.allgather_object(zlib.crc32(state)))) == 1


def batches():
    for data, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
        yield


hvd.init()
torch.manual_seed(3)
dataset = make_data(240)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = Net().double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
found = {}
for number, _ in enumerate(batches()):
    if number == 2:
        model.eval()
        found["validated"] = same_everywhere()
        model.train()
    if number == 4:
        # A metric first, which all ranks wait for.
        hvd.allreduce(torch.zeros(1))
        if hvd.rank() == 0:
            torch.save(model.state_dict(), "/dev/null")
    if number == 6:
        break
found["left early"] = same_everywhere()
average = {name: value.clone() for name, value in model.state_dict().items()}
for _ in batches():
    for name, value in model.state_dict().items():
        average[name].mul_(0.9).add_(value, alpha=0.1)
found["epoch"] = same_everywhere()
