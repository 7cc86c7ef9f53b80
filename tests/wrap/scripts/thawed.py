"""Fine-tuning: a layer that is frozen for a while, by name; or more micro-batches a step from the second epoch on."""

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
data = make_data(192)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = Net().double()
passes = 1
# In which epoch the layer is frozen.
frozen_in = {"thaws": 0, "freezes": 1, "frozen_before": 0}.get(mode)
if mode == "frozen_before":
    model.fc1.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=1e-2)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.fc1.requires_grad_(frozen_in != epoch)
    if mode == "more_passes" and epoch == 1:
        passes = 2
        optimizer.set_backward_passes_per_step(passes)
    for number, (x, y) in enumerate(loader, 1):
        (F.nll_loss(model(x), y) / passes).backward()
        if number % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
