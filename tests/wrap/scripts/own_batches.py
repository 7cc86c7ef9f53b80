"""A batch sampler of the script's own, around DistributedSampler, with workers that stay; sparse gradients."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--sparse", action="store_true")
parser.add_argument("--sparse-as-dense", action="store_true")
args = parser.parse_args()


class SortedBatches:
    """Batches of the rank's samples, each sorted."""

    def __init__(self, sampler, batch_size):
        self.sampler = sampler
        self.batch_size = batch_size

    def __iter__(self):
        indices = list(self.sampler)
        for start in range(0, len(indices), self.batch_size):
            yield sorted(indices[start : start + self.batch_size])

    def __len__(self):
        return -(-len(self.sampler) // self.batch_size)


class Bags(torch.utils.data.Dataset):
    def __init__(self):
        self.inner = make_data(240)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return x.reshape(-1).topk(5).indices, y


hvd.init()
torch.manual_seed(3)
dataset = Bags()
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(
    dataset,
    batch_sampler=SortedBatches(sampler, 8),
    num_workers=args.num_workers,
    persistent_workers=args.num_workers > 0,
)
model = torch.nn.Sequential(
    torch.nn.EmbeddingBag(64, 16, mode="sum", sparse=args.sparse), torch.nn.Linear(16, 10)
).double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05),
    named_parameters=model.named_parameters(),
    sparse_as_dense=args.sparse_as_dense,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
