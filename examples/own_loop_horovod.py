"""The plain-Horovod twin of own_loop.py: the same data, model, optimizer and batch size.

    mpirun -np 2 --bind-to none python examples/own_loop_horovod.py
"""

import argparse
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from code_pieces import PieceClassifier, load_pieces
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--target", type=float, default=1.0, help="stop at this held-out accuracy")
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
train_data, test_data = load_pieces(100 if args.small else 2000)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
model = PieceClassifier().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_data, batch_size=64, sampler=sampler)


def evaluate(epoch):
    """Every rank scores a part of the held-out pieces; returns the accuracy over all ranks."""
    x, y = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in test_data.tensors)
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).sum()
    accuracy = hvd.allreduce(correct, op=hvd.Sum).item() / len(test_data)
    if hvd.rank() == 0:
        seconds = time.perf_counter() - start
        print(f"epoch {epoch:.2f}: held-out accuracy {accuracy:.4f} after {seconds:.1f} s", flush=True)
    return accuracy


def train():
    """Trains, with a look at the held-out pieces as often as own_loop.py takes one."""
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader, 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            if (step % 18 == 0 or step == len(loader)) and evaluate(epoch + step / len(loader)) >= args.target:
                return


start = time.perf_counter()
train()
