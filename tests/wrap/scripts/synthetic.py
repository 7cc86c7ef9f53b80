"""In the shape of Horovod's pytorch_synthetic_benchmark.py: no loader at all."""

import sys
import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net

hvd.init()
torch.manual_seed(0 if "--same-data" in sys.argv else hvd.rank())
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data = torch.randn(32, 64, dtype=torch.float64)
target = torch.LongTensor(32).random_() % 10


def benchmark_step():
    optimizer.zero_grad()
    output = model(data)
    loss = F.cross_entropy(output, target)
    loss.backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=5)
for _ in range(3):
    time = timeit.timeit(benchmark_step, number=5)
