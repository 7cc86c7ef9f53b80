"""The plain-Horovod twin of language_model.py: the same text, model, optimizer, clipping and batch size.

    mpirun -np 2 --bind-to none python examples/language_model_horovod.py
"""

import argparse
import math
import time

import horovod.torch as hvd
import torch
from gpt import GPT, load_text, next_byte_loss
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--target", type=float, default=0.0, help="stop at so many held-out bits a byte")
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
train_data, test_data = load_text(120_000 if args.small else 1_200_000)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
model = GPT(width=32, num_layers=2).to(device) if args.small else GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_data, batch_size=16, sampler=sampler)


def evaluate(epoch):
    """Every rank scores a part of the held-out windows; returns the bits a byte over all ranks."""
    x, y = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in test_data.tensors)
    with torch.no_grad():
        loss = next_byte_loss(model, x, y)
    bits = hvd.allreduce(loss * len(x), op=hvd.Sum).item() / len(test_data) / math.log(2)
    if hvd.rank() == 0:
        seconds = time.perf_counter() - start
        print(f"epoch {epoch:.2f}: held-out {bits:.3f} bits a byte after {seconds:.1f} s", flush=True)
    return bits


def train():
    """Trains, with a look at the held-out windows as often as language_model.py takes one."""
    warmup = len(train_data) // 10
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader, 1):
            num_samples_before = (epoch * len(loader) + step - 1) * 16 * hvd.size()
            for group in optimizer.param_groups:
                group["lr"] = 0.002 * min(1.0, (num_samples_before + 1) / warmup)
            optimizer.zero_grad()
            next_byte_loss(model, x.to(device), y.to(device)).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            if (step % 20 == 0 or step == len(loader)) and evaluate(epoch + step / len(loader)) <= args.target:
                return


start = time.perf_counter()
train()
