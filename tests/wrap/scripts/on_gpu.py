"""A plain Horovod script on a GPU, with what people do there. Prints the sum of its parameters' squares."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

habits = sys.argv[1:]
hvd.init()
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
torch.set_num_threads(1)
torch.manual_seed(1)
x = torch.randn(128, 3, 8, 8)
dataset = TensorDataset(x, x.reshape(128, -1)[:, :10].argmax(1))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
workers = {"num_workers": 1, "persistent_workers": True} if "workers" in habits else {}
loader = DataLoader(dataset, batch_size=8, sampler=sampler, pin_memory="pinned" in habits, **workers)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).double().to(device)
if "graphed" in habits:
    model = torch.cuda.make_graphed_callables(model, (torch.randn(8, 3, 8, 8, dtype=torch.double, device=device),))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused="fused" in habits)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
# By a power of two, so that scaling changes no bit.
scaler = torch.amp.GradScaler("cuda", enabled="scaled" in habits)
total = 0.0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for data, target in loader:
        data, target = data.to(device, non_blocking=True).double(), target.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        total += loss.item()
print(f"rank {hvd.rank()}: {sum(float(p.square().sum()) for p in model.parameters()):.17g}", flush=True)
