"""Bits for each layer (L-GreCo) against uniform bits, on gradients and deltas of models in training.

    python benchmarks/layer_bits.py [--task digits,transformer,embedded] [--seeds 0,1,2] [--record FILE]

Bits are chosen by one draw of stochastic rounding; bytes and errors are measured with another. Prints a Markdown record.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recording import header, publish
from tasks import TASKS, Task
from torch import Tensor

from hvd_adaptive.algorithm.ledger import epoch_order
from hvd_adaptive.compress import decode, encode
from hvd_adaptive.compress.bits import choose_bits, error_curve
from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.compress.quantize import MaxMin
from hvd_adaptive.engine.batches import BatchSource

UNIFORM = (3, 4, 5, 6)
DELTA_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits,transformer,embedded")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    lines = header(
        "Bits for each layer",
        f"A gradient, and the change of {DELTA_STEPS} steps, at the end of the first epoch. Errors are relative L2.",
    )
    for name in options.task.split(","):
        lines += [
            *(f"## {name}", ""),
            "| | seed | uniform bits | error | MB | chosen bits | error | MB | bytes saved |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        task = TASKS[name]()
        for seed in map(int, options.seeds.split(",")):
            for kind, tensors in values_of(task, seed):
                lines += [row(kind, seed, compare_bits(tensors, uniform)) for uniform in UNIFORM]
    publish(lines, options.record)


def values_of(task: Task, seed: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Trains one process for an epoch, and gives its last gradient and the change of its last steps."""
    torch.manual_seed(seed)
    # Dense gradients: sparse ones are exempt.
    model = task.make_model(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    source = BatchSource(task.train, torch.device("cpu"), None)
    order = epoch_order(len(source), seed=seed, epoch=0)
    num_steps = len(order) // task.global_batch
    start: list[Tensor] = []
    for step in range(num_steps):
        if step == max(0, num_steps - DELTA_STEPS):
            start = [p.detach().clone() for p in model.parameters()]
        batch = source.load(order[step * task.global_batch : (step + 1) * task.global_batch], task.global_batch)
        optimizer.zero_grad()
        task.loss(model(batch.x), batch.y).backward()
        optimizer.step()
    named = list(model.named_parameters())
    yield "gradient", {name: p.grad.detach() for name, p in named if p.grad is not None}
    yield "delta", {name: p.detach() - before for (name, p), before in zip(named, start, strict=True)}


def compare_bits(tensors: dict[str, Tensor], uniform: int) -> dict[str, Any]:
    """Chooses bits by one draw of random numbers and measures bytes and error by another."""
    policy = parse_policy(f"maxmin:{uniform}")
    coded = {n: v for n, v in tensors.items() if isinstance(policy.codec(TensorInfo(n, tuple(v.shape))), MaxMin)}
    curves = np.stack([error_curve(v, key=1) for v in coded.values()])
    sizes = [v.numel() for v in coded.values()]
    chosen = choose_bits(sizes, curves, uniform_bits=uniform)

    def measure(bits: list[int]) -> tuple[int, float]:
        num_bytes, lost = 0, 0.0
        for value, width in zip(coded.values(), bits, strict=True):
            codec = MaxMin(width)
            payload = encode(codec, value, key=2)
            num_bytes += payload.numel()
            lost += float((decode(codec, payload, value.numel()) - value.reshape(-1)).double().square().sum())
        return num_bytes, (lost / sum(float(v.double().square().sum()) for v in coded.values())) ** 0.5

    uniform_bytes, uniform_error = measure([uniform] * len(sizes))
    chosen_bytes, chosen_error = measure(chosen)
    return {
        "uniform": uniform, "bits": dict(zip(coded, chosen, strict=True)), "uniform_bytes": uniform_bytes,
        "bytes": chosen_bytes, "uniform_error": uniform_error, "error": chosen_error,
    }  # fmt: skip


def row(kind: str, seed: int, found: dict[str, Any]) -> str:
    widths = list(found["bits"].values())
    few = len(widths) <= 4
    bits = " ".join(f"{name}:{width}" for name, width in found["bits"].items()) if few else spread(widths)
    saved = 1 - found["bytes"] / found["uniform_bytes"]
    return (
        f"| {kind} | {seed} | {found['uniform']} | {found['uniform_error']:.4f} | {found['uniform_bytes'] / 1e6:.3f} | {bits} | "
        f"{found['error']:.4f} | {found['bytes'] / 1e6:.3f} | {saved:.1%} |"
    )


def spread(widths: list[int]) -> str:
    return ", ".join(f"{widths.count(width)} layers at {width}" for width in sorted(set(widths)))


if __name__ == "__main__":
    main()
