"""A second optimizer that some of the ranks have, which averages over a process set of those; or over one of each half."""

import os
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

mode = sys.argv[1]
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
hvd.init()
torch.manual_seed(3)
data = make_data(240)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=5, sampler=sampler)
model, head = Net().double(), torch.nn.Linear(10, 1).double()
some = [1, 2] if mode == "first" else [0, 1]
group = hvd.add_process_set(some)


def wrap(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    return hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters(), **options)


optimizers = [] if mode == "only" and hvd.rank() in some else [torch.optim.SGD(head.parameters(), lr=0.05)]
if hvd.rank() in some:
    optimizers = [wrap(model if mode == "only" else head, process_set=group)]
if mode != "only":
    # The optimizer of all ranks steps before or after the others'.
    op = hvd.Sum if "sum" in sys.argv else hvd.Average
    optimizers.insert(0 if mode == "second" else 1, wrap(model, op=op))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = model(x)
        (F.nll_loss(out, y) + 0.1 * head(out.detach()).pow(2).mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
hvd.remove_process_set(group)
