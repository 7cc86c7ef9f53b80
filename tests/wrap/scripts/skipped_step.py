"""GradScaler leaves out one rank's first step, and the script validates right after it. Rank 0 alone saves at the end."""

import time
import zlib

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(3)
dataset = make_data(64)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = Net().double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for number, (data, target) in enumerate(loader):
    optimizer.zero_grad()
    is_broken = number == 0 and hvd.rank() == 1
    loss = F.cross_entropy(model(data), target) * (float("inf") if is_broken else 1.0)
    scaler.scale(loss).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    if number == 0:
        start = time.monotonic()
        model.eval()
        stood_s = time.monotonic() - start
        state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        same = len(set(hvd.allgather_object(zlib.crc32(state)))) == 1
        model.train()
    if number == len(loader) - 1:
        start = time.monotonic()
        if hvd.rank() == 0:
            torch.save(model.state_dict(), "/dev/null")
ended_s = time.monotonic() - start
