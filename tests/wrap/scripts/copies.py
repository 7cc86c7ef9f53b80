"""Copies of the model, by name: they follow each step, or are taken where the ranks have merged."""

import copy
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

mode = sys.argv[1]
hvd.init()
torch.manual_seed(3)
data = make_data(240)
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank()))
model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
teacher = copy.deepcopy(model).requires_grad_(False)
for _ in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        optimizer.step()
        if mode == "average":
            average.update_parameters(model)
        elif mode == "teacher":
            for one, other in zip(teacher.parameters(), model.parameters(), strict=True):
                one.lerp_(other.detach(), 0.1)
    model.eval()
    best = copy.deepcopy(model)
    if mode == "merged":
        average.update_parameters(model)
own = torch.cat([p.detach().flatten() for p in [*average.parameters(), *teacher.parameters(), *best.parameters()]])
print("differ" if (hvd.allgather(own[None], name="own").std(0) > 0).any() else "are equal")
