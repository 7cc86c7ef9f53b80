"""Mixed precision as Horovod documents it: GradScaler, synchronize, unscale, clip, skip_synchronize, a scheduler."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(1)
dataset = make_data(160)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=10, sampler=sampler)
model = Net().double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
losses = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    scheduler.step()
