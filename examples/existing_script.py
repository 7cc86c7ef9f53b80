"""A plain Horovod script, as people have it: a small CNN for the 1,797 handwritten digits that come with scikit-learn.

`hvd-adaptive run` makes it adaptive without an edit, so this file is its own twin. Plain, and then adaptive:

    mpirun -np 2 --bind-to none python examples/existing_script.py
    hvd-adaptive run -np 2 examples/existing_script.py

Compare them on ranks of unequal speed, which `--slowdown` emulates. `--shares equal` leaves the script as it is:

    hvd-adaptive run -np 2 --slowdown 1,3 --shares equal examples/existing_script.py
    hvd-adaptive run -np 2 --slowdown 1,3 examples/existing_script.py
"""

import argparse
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()
epochs, width = (8, 16) if args.small else (args.epochs, 128)

hvd.init()
torch.manual_seed(1)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(labels)) % 4 == 0
train_data = TensorDataset(images[~is_test], labels[~is_test])
test_data = TensorDataset(images[is_test], labels[is_test])
train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_data, batch_size=32, sampler=train_sampler)
test_sampler = DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
test_loader = DataLoader(test_data, batch_size=256, sampler=test_sampler)

model = nn.Sequential(
    nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
    nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(width * 16, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

start = time.perf_counter()
for epoch in range(1, epochs + 1):
    model.train()
    train_sampler.set_epoch(epoch)
    for x, y in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum() for x, y in test_loader)
    accuracy = hvd.allreduce(correct / len(test_sampler)).item()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: held-out accuracy {accuracy:.4f} after {time.perf_counter() - start:.1f} s", flush=True)
