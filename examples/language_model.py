"""A small GPT with AdamW and clipping, in a loop with hvd_adaptive.Session. Its twin is language_model_horovod.py:

    mpirun -np 2 --bind-to none python examples/language_model.py
    diff examples/language_model_horovod.py examples/language_model.py

Compare them on ranks of unequal speed, which `--slowdown` emulates, by the time to the same held-out bits a byte:

    mpirun -np 2 --bind-to none python examples/language_model.py --slowdown 1,3 --target 3.7
    hvd-adaptive run -np 2 --slowdown 1,3 --shares equal examples/language_model_horovod.py --target 3.7
"""

import argparse
import math
import time

import torch
from gpt import GPT, load_text, next_byte_loss

import hvd_adaptive

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--target", type=float, default=0.0, help="stop at so many held-out bits a byte")
parser.add_argument("--slowdown", help="emulate unequal ranks, as in 1,3")
parser.add_argument("--small", action="store_true", help="a few seconds")
args = parser.parse_args()

torch.manual_seed(1)
train_data, test_data = load_text(120_000 if args.small else 1_200_000)
device = hvd_adaptive.bind_device()
model = GPT(width=32, num_layers=2).to(device) if args.small else GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
config = hvd_adaptive.Config(batch_size=16, mega_batch=640, slowdown=args.slowdown)
session = hvd_adaptive.Session(model, optimizer, config)


def evaluate(record):
    """After each merge: every rank scores a part of the held-out windows with the merged model."""
    x, y = (tensor[session.rank :: session.world_size].to(device) for tensor in test_data.tensors)
    with torch.no_grad():
        loss = next_byte_loss(model, x, y).item()
    bits = sum(session.gather(loss * len(x))) / len(test_data) / math.log(2)
    if session.rank == 0:
        seconds = time.perf_counter() - start
        print(f"epoch {record.epoch:.2f}: held-out {bits:.3f} bits a byte after {seconds:.1f} s", flush=True)
    if bits <= args.target:
        session.stop(agreed=True)


session.records.append(evaluate)
warmup = len(train_data) // 10
start = time.perf_counter()
for batch in session.batches(train_data, num_epochs=args.epochs):
    with session.step(batch):
        for group in session.optimizer.param_groups:
            # By the samples of all ranks, whose numbers of steps differ.
            group["lr"] = 0.002 * min(1.0, (batch.num_samples_before + 1) / warmup)
        session.optimizer.zero_grad()
        next_byte_loss(model, batch.x, batch.y).backward()
        session.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        session.optimizer.step()
session.close()
