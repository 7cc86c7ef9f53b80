"""Says which part of the time ranks compute where reading a sample takes milliseconds: read by a thread, and by workers.

    mpirun -np 2 python benchmarks/loader.py [--sample-ms 4] [--workers 0 1 2 4] [--rounds 50 200] [--record FILE]

Each sample is a made-up image, and reading it sleeps: it stands for a disk or a network, and leaves the cores to the steps of a
small CNN. A round is so many batches of all ranks together. Workers read its first ones while the ranks still merge. A thread
reads its first one while its rank waits: the shorter the rounds, the more that is.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from hvd_adaptive import Config, Session
from hvd_adaptive.comm import connect
from hvd_adaptive.doctor.machine import cpu_model
from hvd_adaptive.engine.records import RoundRecord


class SlowImages(Dataset[Any]):
    """Images of 3 x 32 x 32 numbers, each of which takes a while to read."""

    def __init__(self, num_samples: int, seconds: float) -> None:
        self._num_samples = num_samples
        self._seconds = seconds

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._seconds)
        return torch.full((3, 32, 32), row / self._num_samples), row % 10


def make_model(width: int) -> nn.Module:
    """Returns a small CNN."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(4 * width, 10),
    )


def play(options: argparse.Namespace, num_workers: int, batches: int, transport: Any) -> list[str]:
    """Trains some rounds; returns the row of the table."""
    torch.manual_seed(0)
    size = options.batch_size
    model = make_model(options.width)
    mega_batch = batches * size or None
    config = Config(batch_size=size, mega_batch=mega_batch, micro_batch_size=options.micro_batch_size, hash_interval=0)
    # Rounds whose length nobody sets are short ones with Adam, and grow.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if batches else torch.optim.AdamW(model.parameters())
    session = Session(model, optimizer, config, transport=transport)
    records: list[RoundRecord] = []
    session.records.append(records.append)
    # One round more, which does not count: workers start in it. Where rounds grow, as much again.
    num_batches = (1 + max(1, -(-options.batches // batches))) * batches if batches else 2 * options.batches
    data = SlowImages(num_batches * size, options.sample_ms / 1e3)
    for batch in session.loader(data, num_workers=num_workers):
        with session.step(batch):
            session.optimizer.zero_grad()
            for micro in batch.micro_batches():
                nn.functional.cross_entropy(model(micro.x), micro.y).backward()
            session.optimizer.step()
    first = 0 if batches else next(n for n, record in enumerate(records) if record.num_samples >= len(data) / 2)
    seconds = records[-1].train_s - records[first].train_s
    counted = records[first + 1 :]
    total = {
        name: np.sum([record.stats[name] for record in counted], axis=0)
        for name in ("busy_s", "claim_s", "wait_s", "merge_s", "control_s", "num_steps")
    }
    shown = lambda values: ", ".join(f"{value / seconds:.1%}" for value in values)  # noqa: E731
    busy = shown(total["busy_s"])
    row = [
        str(num_workers) if num_workers else "a thread",
        str(batches) if batches else f"AdamW: {(records[-1].num_samples - records[first].num_samples) / len(counted) / size:.0f}",
        f"{seconds / len(counted):.1f}",
        ", ".join(f"{1e3 * value:.0f}" for value in total["busy_s"] / total["num_steps"]),
        f"**{busy}**" if total["busy_s"].min() / seconds >= 0.95 else busy,
        shown(total["claim_s"]),
        shown(total["wait_s"]),
        shown(total["merge_s"] + total["control_s"]),
    ]
    if transport.rank == 0:
        print(" | ".join(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample-ms", type=float, default=4.0, help="milliseconds in which a sample is read")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4], help="of each rank; 0: a thread")
    rounds = "batches between two merges, of all ranks; 0: AdamW's own"
    parser.add_argument("--rounds", type=int, nargs="+", default=[50, 200], help=rounds)
    parser.add_argument("--batches", type=int, default=400, help="batches that count in each row, at least")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--width", type=int, default=40, help="of the CNN")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = connect(stall_limit_s=60)
    rows = [play(options, workers, batches, transport) for batches in options.rounds for workers in options.workers]
    if transport.rank == 0 and options.record is not None:
        title = (
            "workers a rank", "batches a round", "s a round", "ms a step", "computing", "waiting for data", "for ranks", "merging"
        )  # fmt: skip
        command = shlex.join(["mpirun", "-np", str(transport.world_size), "python", *sys.argv])
        lines = [
            "# Ranks kept busy while samples are read slowly",
            "",
            f"Date: {datetime.date.today()}. Command: `{command}`. {cpu_model()}, {os.cpu_count()} cores, shared with other "
            f"machines' work; Python {platform.python_version()}, torch {torch.__version__}. Reading a sample sleeps "
            f"{options.sample_ms:g} ms, so a batch of {options.batch_size} takes a worker "
            f"{options.sample_ms * options.batch_size:.0f} ms. Numbers by rank; the first round of each row is left out, "
            "and of AdamW's the first half.",
            "",
            f"| {' | '.join(title)} |",
            f"|{' --- |' * len(title)}",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
        options.record.write_text("\n".join(lines) + "\n", encoding="utf-8")
    transport.close()


if __name__ == "__main__":
    main()
