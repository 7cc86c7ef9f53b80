"""A loader that a thread reads ahead of the script, as prefetch_generator has it."""

import queue
import sys
import threading

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class BackgroundGenerator(threading.Thread):
    def __init__(self, generator, depth):
        super().__init__(daemon=True)
        self.generator, self.queue = generator, queue.Queue(depth)
        self.start()

    def run(self):
        for item in self.generator:
            self.queue.put(item)
        self.queue.put(None)

    def __iter__(self):
        return iter(self.queue.get, None)


class LoaderX(DataLoader):
    def __iter__(self):
        own = super().__iter__()
        return iter(BackgroundGenerator(own, int(sys.argv[1]))) if int(sys.argv[1]) else own


hvd.init()
torch.manual_seed(3)
dataset = make_data(240)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = LoaderX(dataset, batch_size=8, sampler=sampler, num_workers=int("workers" in sys.argv))
validation_loader = LoaderX(make_data(40, 1), batch_size=8)
model = Net().double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
losses = []


def train():
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = sum(F.cross_entropy(model(data), target) for data, target in validation_loader)
        model.train()
        losses.append(hvd.allgather_object(loss.item(), name="losses"))


if "thread" in sys.argv:
    trainer = threading.Thread(target=train)
    trainer.start()
    trainer.join()
else:
    train()
