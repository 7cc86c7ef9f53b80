"""A merge of all rows against a merge of the touched rows, by the share of rows that a rank touches.

    mpirun -np 2 --bind-to none python benchmarks/merge_rows.py --num-rows 135909 --width 128

Prints a Markdown table: seconds of the median merge on the slowest rank, waiting excluded, and MB that a rank sends.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from recording import header
from torch import nn

from hvd_adaptive import Config
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy


def merges(transport: Transport, options: argparse.Namespace, share: float, mode: str) -> tuple[float, float]:
    """Returns the seconds of a merge and its megabytes."""
    bag = nn.EmbeddingBag(options.num_rows, options.width, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    config = Config(sparse_merge=mode, outer_step=options.outer_step, hash_interval=0)
    strategy = LocalStrategy(bag, optimizer, config, transport)
    generator = np.random.default_rng(transport.rank)
    # Rows are as popular as words: the ranks share most of the popular ones.
    popularity = 1.0 / np.arange(1, options.num_rows + 1)
    count = max(1, round(share * options.num_rows))
    seconds, megabytes = [], []
    for number in range(options.rounds + 2):
        rows = generator.choice(options.num_rows, count, replace=False, p=popularity / popularity.sum())
        bag(torch.from_numpy(rows).view(1, -1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = RoundStats(batch_size=1, num_updates=1, num_samples=1)
        _, _, payload_bytes = strategy.end_round(stats)
        slowest = transport.allgather_stats(np.array([stats.merge_s])).max()
        # The first merges pay for buffers.
        if number >= 2:
            seconds.append(slowest)
            megabytes.append(payload_bytes / 1e6)
    return float(np.median(seconds)), float(np.median(megabytes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-rows", type=int, default=135_909, help="those of Amazon-670k's features")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.05, 0.1, 0.25, 0.5, 0.9])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--outer-step", default="nesterov", choices=("none", "momentum", "nesterov"))
    options = parser.parse_args()
    transport = connect(stall_limit_s=300)
    if transport.rank == 0:
        how = f"{transport.world_size} ranks, {torch.get_num_threads()} threads each."
        print("\n".join(header("Merges of touched rows and of all rows", how)))
        print("| rows a rank touches | all rows s | MB | touched rows s | MB | auto s | MB |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for share in options.shares:
        cells = [merges(transport, options, share, mode) for mode in ("never", "always", "auto")]
        if transport.rank == 0:
            numbers = " | ".join(f"{seconds:.4f} | {megabytes:.2f}" for seconds, megabytes in cells)
            print(f"| {share:.0%} | {numbers} |", flush=True)
    transport.close()


if __name__ == "__main__":
    main()
