"""The plain-Horovod twin of image_classification.py: the same images, model, optimizer, schedule and batch size.

    mpirun -np 2 --bind-to none python examples/image_classification_horovod.py
"""

import argparse
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits import Digits, small_resnet
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--target", type=float, default=1.0, help="stop at this held-out accuracy")
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()
epochs, width = (5, 16) if args.small else (args.epochs, 64)

hvd.init()
torch.manual_seed(1)
train_data, test_data = Digits(train=True), Digits(train=False)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
model = small_resnet(width).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))


def evaluate(epoch):
    """Every rank scores a part of the held-out images; returns the accuracy over all ranks."""
    x, y = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in (test_data.images, test_data.labels))
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).sum()
    accuracy = hvd.allreduce(correct, op=hvd.Sum).item() / len(test_data)
    if hvd.rank() == 0:
        seconds = time.perf_counter() - start
        print(f"epoch {epoch:.2f}: held-out accuracy {accuracy:.4f} after {seconds:.1f} s", flush=True)
    return accuracy


start = time.perf_counter()
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        scheduler.step()
    if evaluate(epoch + 1) >= args.target:
        break
