"""A GAN whose steps draw noise: a row for each sample, and numbers that all samples share."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import make_data
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(5)
dataset = make_data(320)
width = dataset[0][0].numel()
made = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, width)).double()
judged = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)).double()
optimizers = []
for name, model in (("made", made), ("judged", judged)):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    optimizers.append(hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(prefix=name)))
opt_made, opt_judged = optimizers

for _ in range(3):
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    # Anew in each epoch, so its first batch is followed each time.
    for data, _label in DataLoader(dataset, batch_size=8, sampler=sampler):
        x = data.flatten(1)
        z = torch.randn(x.size(0), 4, dtype=x.dtype)
        judged.requires_grad_(True)
        opt_judged.zero_grad()
        x = x + torch.rand(()) * torch.randn_like(x)
        loss = F.softplus(-judged(x)).mean() + F.softplus(judged(made(z).detach())).mean()
        loss.backward()
        opt_judged.step()
        judged.requires_grad_(False)
        opt_made.zero_grad()
        z = torch.empty(x.size(0), 4, dtype=x.dtype).uniform_(-1, 1)
        F.softplus(-judged(made(z))).mean().backward()
        opt_made.step()
