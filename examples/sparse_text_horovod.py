"""The plain-Horovod twin of sparse_text.toml: the same data, model, loss, batch size, and torch's Adagrad.

    mpirun -np 2 --bind-to none python examples/sparse_text_horovod.py
"""

import argparse
import itertools
import time

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from hvd_adaptive.xmc.data import cache, resolve
from hvd_adaptive.xmc.sparse_mlp import SparseMLP, multilabel_softmax_loss

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--target", type=float, default=1.0, help="stop at this P@1 on the test data")
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()


class Rows(torch.utils.data.Dataset):
    """Reads the rows of a batch at once, as they are stored."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitems__(self, rows):
        return self.data.get_batch(rows)


hvd.init()
torch.manual_seed(1)
source = resolve(None)
cache.build(source)
train_data, test_data = cache.open_splits(source)
model = SparseMLP(train_data.num_features, train_data.num_labels, unit_rows=True)
# 0.05: plain Horovod does better with it than with 0.1, see docs/choosing.md.
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
train_rows = Rows(train_data)
sampler = DistributedSampler(train_rows, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_rows, batch_size=64, sampler=sampler, collate_fn=lambda batch: batch)
num_epochs, num_steps = (1, 40) if args.small else (args.epochs, len(loader))


def evaluate(epoch):
    """Every rank scores a part of the test data; returns P@1 over all ranks: how often the first label is a right one."""
    hits = torch.tensor(0)
    for rows in torch.arange(hvd.rank(), len(test_data), hvd.size()).split(256):
        x, labels = test_data.get_batch(rows.numpy())
        with torch.no_grad():
            best = model(x).argmax(1)
        hits += (torch.repeat_interleave(best, labels.offsets.diff()) == labels.indices).sum()
    p1 = hvd.allreduce(hits, op=hvd.Sum).item() / len(test_data)
    if hvd.rank() == 0:
        print(f"epoch {epoch:.2f}: P@1 {p1:.4f} after {time.perf_counter() - start:.1f} s", flush=True)
    return p1


def train():
    """Trains, with four looks at the test data an epoch, as the built-in trainer takes them."""
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for step, (x, labels) in enumerate(itertools.islice(loader, num_steps), 1):
            optimizer.zero_grad()
            multilabel_softmax_loss(model(x), labels).backward()
            optimizer.step()
            if step % (num_steps // 4) == 0 and evaluate(epoch + step / len(loader)) >= args.target:
                return


start = time.perf_counter()
train()
