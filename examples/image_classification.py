"""Image classification with the updates of plain Horovod: hvd_adaptive.Session with strategy `sync`, and a torch scheduler.

Each step is one of the global batch, as with plain Horovod. A rank computes a part of it by its speed. The twin in plain
Horovod is image_classification_horovod.py:

    mpirun -np 2 --bind-to none python examples/image_classification.py
    diff examples/image_classification_horovod.py examples/image_classification.py

Compare them on ranks of unequal speed, which `--slowdown` emulates, by the time to the same held-out accuracy:

    mpirun -np 2 --bind-to none python examples/image_classification.py --slowdown 1,3 --target 0.95
    hvd-adaptive run -np 2 --slowdown 1,3 --shares equal examples/image_classification_horovod.py --target 0.95
"""

import argparse
import time

import torch
import torch.nn.functional as F
from digits import Digits, small_resnet

import hvd_adaptive

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--target", type=float, default=1.0, help="stop at this held-out accuracy")
parser.add_argument("--slowdown", help="emulate unequal ranks, as in 1,3")
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()
epochs, width = (5, 16) if args.small else (args.epochs, 64)

torch.manual_seed(1)
train_data, test_data = Digits(train=True), Digits(train=False)
device = hvd_adaptive.bind_device()
model = small_resnet(width).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
# A round ends in a look at the held-out images: after each epoch.
config = hvd_adaptive.Config(strategy="sync", batch_size=32, mega_batch=len(train_data), slowdown=args.slowdown)
session = hvd_adaptive.Session(model, optimizer, config)
num_steps = -(-len(train_data) // (32 * session.world_size))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(session.optimizer, epochs * num_steps)


def evaluate(record):
    """After each round: every rank scores a part of the held-out images."""
    x, y = (tensor[session.rank :: session.world_size].to(device) for tensor in (test_data.images, test_data.labels))
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).sum().item()
    accuracy = sum(session.gather(correct)) / len(test_data)
    if session.rank == 0:
        seconds = time.perf_counter() - start
        print(f"epoch {record.epoch:.2f}: held-out accuracy {accuracy:.4f} after {seconds:.1f} s", flush=True)
    if accuracy >= args.target:
        session.stop(agreed=True)


session.records.append(evaluate)
start = time.perf_counter()
for batch in session.batches(train_data, num_epochs=epochs):
    with session.step(batch):
        session.optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
        scheduler.step()
session.close()
