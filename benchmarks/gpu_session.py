"""Samples a second of a GPT on a GPU: a plain loop of each rank by itself, and sessions, in turns.

    mpirun -np 1 python benchmarks/gpu_session.py                          what a Session costs a step
    mpirun -np 2 python benchmarks/gpu_session.py --width 768 --layers 12 --batch 16 --bf16

Ranks share the first GPU where there is only one. "alone" exchanges nothing: it is the most that ranks can do on this machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from gpt import GPT, load_text, next_byte_loss

from hvd_adaptive import Config, Session
from hvd_adaptive.cluster.device import bind_device
from hvd_adaptive.comm import connect

MODES: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "local": {},
    "local, 4 bits": {"compression": "maxmin:4"},
    "local, micro-batches": {"micro_batch_size": 0},
    "sync": {"strategy": "sync"},
    "sync, 4 bits": {"strategy": "sync", "compression": "maxmin:4"},
    "horovod": {"strategy": "horovod"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--steps", type=int, default=300, help="of each rank, in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=["alone", "local", "local, 4 bits"], choices=MODES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transport = connect(stall_limit_s=120)
    choice = "cuda:0" if options.device == "auto" and torch.cuda.device_count() == 1 else options.device
    device = bind_device(choice, local_rank=transport.local_rank, local_size=transport.local_size)
    data = load_text(1 << 40)[0]
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in options.modes}
    for turn in range(options.turns + 1):
        for mode in options.modes:
            one = play(MODES[mode], options, data, transport, device, num_steps=options.steps if turn else options.steps // 3)
            if turn:  # the first one compiles and loads
                found[mode].append(one)
    if transport.rank == 0:
        base = statistics.median(one["samples_s"] for one in found[options.modes[0]])
        for mode, turns in found.items():
            speed = statistics.median(one["samples_s"] for one in turns)
            last = turns[-1]
            print(
                f"{mode:24s} {speed:9.1f} samples/s  {speed / base:5.3f} of {options.modes[0]}  loss {last['loss']:.3f}  "
                f"peak {last['peak_mb']:.0f} MB  compiled {last['compiled']:.0f}"
            )
        if options.json:
            options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "found": found}))
    transport.close()


def play(
    settings: dict[str, Any] | None, options: argparse.Namespace, data: TensorDataset, transport: Any, device: torch.device,
    *, num_steps: int,
) -> dict[str, float]:  # fmt: skip
    """Trains a new model so many steps of each rank; returns samples a second of all ranks, and more. COLLECTIVE."""
    torch.manual_seed(1)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model: nn.Module = GPT(options.width, options.layers, max(1, options.width // 64)).to(device)
    forward = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    batch_size, num_samples = options.batch, num_steps * options.batch * transport.world_size
    autocast = torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext()

    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with autocast:
            loss = next_byte_loss(forward, x, y)
        loss.backward()
        return loss

    if options.compile:  # not timed
        backward(*(tensor[:batch_size].to(device) for tensor in data.tensors))
    finish(device)
    transport.rendezvous("begin")
    if settings is None:
        order = torch.randperm(len(data))
        begin = time.perf_counter()
        for step in range(num_steps):
            rows = order[torch.arange(batch_size).add_(step * batch_size).remainder_(len(order))]
            taken = [tensor[rows] for tensor in data.tensors]
            if device.type == "cuda":
                taken = [tensor.pin_memory().to(device, non_blocking=True) for tensor in taken]
            optimizer.zero_grad()
            loss = backward(*taken)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finish(device)
    else:
        settings = settings | ({"micro_batch_size": batch_size} if "micro_batch_size" in settings else {})
        session = Session(model, optimizer, Config(batch_size=batch_size, stall_limit_s=120, **settings), transport=transport)
        optimizer = session.optimizer
        begin = time.perf_counter()
        for batch in session.batches(data, num_epochs=num_samples / len(data)):
            with session.step(batch):
                optimizer.zero_grad()
                for part in batch.micro_batches():
                    loss = backward(part.x, part.y)
                session.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        finish(device)
        num_samples = session.num_samples
    seconds = time.perf_counter() - begin
    seconds = max(transport.allgather_object(seconds))
    peak = torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0
    compiled = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    return {"samples_s": num_samples / seconds, "loss": loss.item(), "peak_mb": peak, "compiled": float(compiled)}


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
