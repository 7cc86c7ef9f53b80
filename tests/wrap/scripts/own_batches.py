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
parser.add_argument("--by-length", action="store_true", help="batches of so many tokens, dealt out to the ranks")
parser.add_argument("--unpadded", action="store_true", help="some ranks have one sample less")
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


class Dealt:
    """Batches of at most 60 tokens, of which each rank takes its turn."""

    def __init__(self, num_samples):
        self.num_replicas, self.rank = hvd.size(), hvd.rank()
        self.lengths = [3 + i % 9 for i in range(num_samples)]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self.lengths), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        batches = [[]]
        for i in order:
            if (len(batches[-1]) + 1) * max(self.lengths[j] for j in [*batches[-1], i]) > 60:
                batches.append([])
            batches[-1].append(i)
        whole = len(batches) // self.num_replicas * self.num_replicas
        return iter(batches[self.rank : whole : self.num_replicas])


class Unpadded:
    """Every N-th sample, none twice."""

    def __init__(self, num_samples):
        self.num_samples, self.num_replicas, self.rank = num_samples, hvd.size(), hvd.rank()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self):
        return len(range(self.rank, self.num_samples, self.num_replicas))


class Bags(torch.utils.data.Dataset):
    def __init__(self):
        self.inner = make_data(239 if args.unpadded else 240)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return x.reshape(-1).topk(5).indices, y


hvd.init()
torch.manual_seed(3)
dataset = Bags()
if args.by_length:
    sampler = Dealt(len(dataset))
elif args.unpadded:
    sampler = Unpadded(len(dataset))
else:
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(
    dataset,
    batch_sampler=sampler if args.by_length else SortedBatches(sampler, 8),
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
