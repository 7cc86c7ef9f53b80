"""A plain Horovod script; on rank 1 a worker of the loader is killed, as by the out-of-memory killer."""

import os
import signal
import time

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
model = torch.nn.Linear(6, 2)
data = TensorDataset(torch.randn(100_000, 6), torch.zeros(100_000, dtype=torch.int64))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, hvd.size(), hvd.rank()), num_workers=1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
batches = iter(loader)
for number, (x, y) in enumerate(batches):
    if hvd.rank() == 1 and number == 30:
        print(f"killed at {time.time()}", flush=True)
        os.kill(batches._workers[0].pid, signal.SIGKILL)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
