"""In the shape of Horovod's pytorch_imagenet_resnet50.py: sub-batches, metrics reduced at each of them, lr set per batch."""

import argparse
import math

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from common import Net, make_data
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=8)


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch_idx):
    progress = epoch + float(batch_idx + 1) / len(train_loader)
    lr_adj = 1.0 / hvd.size() * (progress * (hvd.size() - 1) / 5 + 1)
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0125 * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            data_batch = data[i : i + args.batch_size]
            target_batch = target[i : i + args.batch_size]
            output = model(data_batch)
            train_accuracy.update((output.argmax(1) == target_batch).float().mean())
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss.float())
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    metrics.append((train_loss.avg.item(), train_accuracy.avg.item()))


def validate():
    model.eval()
    val_loss = Metric("val_loss")
    with torch.no_grad():
        for data, target in val_loader:
            val_loss.update(F.cross_entropy(model(data), target).float())
    metrics.append((val_loss.avg.item(),))


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    metrics = []
    train_dataset = make_data(200)
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(
        train_dataset, batch_size=args.batch_size * args.batches_per_allreduce, sampler=train_sampler
    )
    val_dataset = make_data(50, 1)
    val_sampler = DistributedSampler(val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    val_loader = DataLoader(val_dataset, batch_size=8, sampler=val_sampler)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0125, momentum=0.9, weight_decay=5e-5)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(2):
        train(epoch)
        validate()
