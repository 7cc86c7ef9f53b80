"""One changed line."""

import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvd_adaptive.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
dataset = make_data(240)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = Net().double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters(), op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sizes = set()
for data, target in loader:
    sizes.add(len(data))
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()
print(f"rank {hvd.rank()} batches {sorted(sizes)}", flush=True)
