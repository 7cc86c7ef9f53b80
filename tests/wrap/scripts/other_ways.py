"""Loops whose steps are not those of an optimizer that Horovod averages for: by name."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

mode = sys.argv[1]
hvd.init()
torch.manual_seed(3)
data = make_data(4000)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if mode == "adasum":
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum)
elif mode != "manual":
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for num_steps, (x, y) in enumerate(loader, 1):
    optimizer.zero_grad()
    if mode == "cuts" and num_steps > 40:
        x, y = x[:1], y[:1]
    if mode == "mismatches" and len(y.tolist()) != 8:
        # torch raises it, called by the package's followers or not.
        x = x @ torch.ones(3, 3)
    F.nll_loss(model(x), y).backward()
    if mode == "manual":
        for name, parameter in model.named_parameters():
            parameter.grad = hvd.allreduce(parameter.grad, name=name)
    if mode == "breaks" and len(y.tolist()) != 8:
        raise RuntimeError("only batches of eight")
    optimizer.step()
    print(f"step {num_steps} of rank {hvd.rank()}: {len(x)}", flush=True)
    if mode == "averages":
        hvd.allreduce(torch.tensor(1.0), name="accuracy")
    if num_steps == 60:
        break
print("to the end", flush=True)
