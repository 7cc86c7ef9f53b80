"""Accumulation over micro-batches, a checkpoint in the middle and a fresh optimizer that resumes from it."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

PASSES = 2
parser = argparse.ArgumentParser()
parser.add_argument("--momentum", type=float, default=0.9)
args = parser.parse_args()


def make_optimizer(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=args.momentum)
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES
    )


def train(epoch):
    sampler.set_epoch(epoch)
    for number, batch in enumerate(loader):
        loss = F.cross_entropy(model(batch["x"]), batch["y"]) / PASSES
        loss.backward()
        if (number + 1) % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()


def collate(rows):
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.tensor([int(y) for _, y in rows])}


hvd.init()
torch.manual_seed(3)
dataset = make_data(192)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=collate)
model = Net().double()
optimizer = make_optimizer(model.parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
train(0)
train(1)
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
model = Net().double()
model.load_state_dict(checkpoint["model"])
optimizer = make_optimizer(model.parameters())
optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
train(2)
