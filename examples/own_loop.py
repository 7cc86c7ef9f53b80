"""Your own training loop with hvd_adaptive.Session. Its twin in plain Horovod is own_loop_horovod.py:

    mpirun -np 2 --bind-to none python examples/own_loop.py
    diff examples/own_loop_horovod.py examples/own_loop.py

Compare them on ranks of unequal speed, which `--slowdown` emulates, by the time to the same held-out accuracy:

    mpirun -np 2 --bind-to none python examples/own_loop.py --slowdown 1,3 --target 0.7
    hvd-adaptive run -np 2 --slowdown 1,3 --shares equal examples/own_loop_horovod.py --target 0.7
"""

import argparse
import time

import torch
import torch.nn.functional as F
from code_pieces import PieceClassifier, load_pieces

import hvd_adaptive

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--target", type=float, default=1.0, help="stop at this held-out accuracy")
parser.add_argument("--slowdown", help="emulate unequal ranks, as in 1,3")
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()

torch.manual_seed(1)
train_data, test_data = load_pieces(100 if args.small else 2000)
device = hvd_adaptive.bind_device()
model = PieceClassifier().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
config = hvd_adaptive.Config(batch_size=64, mega_batch=2304, slowdown=args.slowdown)
session = hvd_adaptive.Session(model, optimizer, config)


def evaluate(record):
    """After each merge: every rank scores a part of the held-out pieces with the merged model."""
    x, y = (tensor[session.rank :: session.world_size].to(device) for tensor in test_data.tensors)
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
for batch in session.batches(train_data, num_epochs=args.epochs):
    with session.step(batch):
        session.optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
session.close()
