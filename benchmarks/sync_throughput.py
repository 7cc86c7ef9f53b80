"""Compares the throughput of `sync` with plain Horovod's, on equal ranks and at emulated speeds 1:1:2:4.

    python benchmarks/sync_throughput.py [--batch-sizes 64] [--pairs 20] [--block-s 1] [--record FILE]

Both methods train in the same processes and take turns in short blocks of equally many steps with the same global batch, so
that what else the machine does meets both: what counts is the median of the ratios of neighbouring blocks. On equal ranks
no adaptivity can win, so the ratio shows what weights, checks and looks cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from intervals import median_interval
from recording import header, publish

from hvd_adaptive.cluster.relaunch import ranks_command
from hvd_adaptive.comm import connect
from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.session.session import Session
from hvd_adaptive.xmc.data import build, open_splits, resolve
from hvd_adaptive.xmc.train_config import TrainConfig
from hvd_adaptive.xmc.trainer import local_step, make_model, make_optimizer

# Slowdown factors of ranks whose speeds are as 1:1:2:4; the sum of speeds allows 2 x what the slowest sets.
SPEEDS = {"equal": None, "1:1:2:4": "8,8,4,2"}
TARGETS = {"equal": 0.97, "1:1:2:4": 1.7}
METHODS = ("horovod", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", nargs="+", choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks at each speeds; the first quarter is not counted")
    parser.add_argument("--equal-ranks", type=int, default=2, help="ranks of the comparison on equal ranks")
    parser.add_argument("--block-s", type=float, default=1.0, help="about so long is a block of plain Horovod")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64], help="samples of a rank's step with equal shares")
    parser.add_argument("--input-gradients", choices=("sparse", "dense"), default="sparse")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result is not None:
        play(options, options.speeds[0], options.batch_sizes[0])
        return
    lines = [
        *header("Throughput of sync against plain Horovod"),
        f"Embedded data set, {options.input_gradients} input gradients; "
        "methods took turns in the same processes. Ratio: samples a second of sync over those of the "
        "neighbouring block of Horovod. Computing: the slowest rank's own milliseconds of a step with equal shares over those "
        "with the last shares, by the model that sync has of the ranks; exchange and waiting come on top. Thread: "
        "CPU milliseconds a step of the thread that trains, mean of the ranks, for both methods.",
        "",
        "| speeds | ranks, samples each | pairs | horovod, samples/s | sync | median ratio (95% interval) | middle half | all "
        "| computing | waiting | thread | last shares |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for speeds, size in itertools.product(options.speeds, options.batch_sizes):
        found = launch(options, speeds, size)
        counted = found["pairs"][len(found["pairs"]) // 4 :]
        ratios = sorted(horovod / sync for horovod, sync in counted)
        low, _, high = statistics.quantiles(ratios, n=4)
        sure = median_interval(ratios)
        rates = [found["block_samples"] / statistics.median(column) for column in zip(*counted, strict=True)]
        before_ms, now_ms = (1e3 * seconds for seconds in found["step_s"])
        cells = [
            speeds, f"{found['num_ranks']}, {size}", f"{len(counted)}", *(f"{rate:,.0f}" for rate in rates),
            f"**{statistics.median(ratios):.3f}** ({sure[0]:.3f} to {sure[1]:.3f}; wanted: {TARGETS[speeds]})",
            f"{low:.3f}-{high:.3f}",
            f"{ratios[0]:.3f}-{ratios[-1]:.3f}", f"{before_ms:.1f} / {now_ms:.1f} = {before_ms / now_ms:.2f}",
            ", ".join(f"{found['waiting'][method]:.0%}" for method in METHODS),
            ", ".join(f"{statistics.mean(found['thread_ms'][method]):.2f}" for method in METHODS),
            ", ".join(map(str, found["shares"][-1])),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
        first = ", ".join(f"{horovod / sync:.2f}" for horovod, sync in found["pairs"][: len(found["pairs"]) // 4])
        print(f"{speeds}: first pairs {first}; shares {found['shares']}", file=sys.stderr)
    publish(lines, options.record)


def launch(options: argparse.Namespace, speeds: str, batch_size: int) -> dict[str, Any]:
    """Runs the ranks; returns what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [
            *("--speeds", speeds, "--pairs", str(options.pairs), "--block-s", str(options.block_s), "--result", str(result)),
            *("--batch-sizes", str(batch_size), "--input-gradients", options.input_gradients),
        ]
        num_ranks = options.equal_ranks if SPEEDS[speeds] is None else 4
        command, env = ranks_command(num_ranks, [sys.executable, __file__, *arguments])
        subprocess.run(command, env=env, check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def play(options: argparse.Namespace, speeds: str, batch_size: int) -> None:
    """Trains both methods in turns, as one rank of several. COLLECTIVE."""
    transport = connect(stall_limit_s=300)
    source, train = resolve(None, None), TrainConfig(lr=0.1, input_gradients=options.input_gradients)
    if transport.local_rank == 0:
        build(source, None)
    transport.rendezvous("data")
    data = open_splits(source, None)[0]
    sessions, steps = {}, {}
    records: dict[str, list[RoundRecord]] = {method: [] for method in METHODS}
    thread_ms: dict[str, list[float]] = {method: [] for method in METHODS}
    for number, method in enumerate(METHODS):
        model = make_model(train, data, seed=0, device=torch.device("cpu"))
        optimizer = make_optimizer(train, model)
        config = Config(
            strategy=method, batch_size=batch_size, slowdown=SPEEDS[speeds], hash_interval=0, stall_limit_s=300
        )
        sessions[method] = session = Session(model, optimizer, config, transport=transport)
        # The names of its rounds in the store, beside the other session's.
        session.round = number * 1_000_000
        session.records.append(records[method].append)
        steps[method] = endless_steps(session, model, data)

    def block(method: str, num_steps: int) -> float:
        transport.rendezvous("block")
        start, start_thread = time.perf_counter(), time.thread_time()
        for _ in range(num_steps):
            next(steps[method])
        thread_ms[method].append(1e3 * (time.thread_time() - start_thread) / num_steps)
        transport.rendezvous("block")
        return float(transport.allgather_object(time.perf_counter() - start)[0])

    block("sync", 3)
    block("horovod", 3)
    num_steps = max(3, round(10 * options.block_s / block("horovod", 10)))
    pairs, shares = [], []
    for number in range(options.pairs):
        # Whoever goes second goes first the next time.
        order = METHODS[:: 1 if number % 2 == 0 else -1]
        seconds = {method: block(method, num_steps) for method in order}
        pairs.append(tuple(seconds[method] for method in METHODS))
        shares.append([int(size) for size in sessions["sync"].batch_sizes])
    waiting = {}
    for method, seen in records.items():
        sums = {
            name: sum(float(record.stats[name].sum()) for record in seen[len(seen) // 4 :])
            for name in ("wait_s", "busy_s", "claim_s", "control_s")
        }
        waiting[method] = sums["wait_s"] / max(sum(sums.values()), 1e-9)
    balance = sessions["sync"]._strategy._shares._balance  # type: ignore[attr-defined]
    step_s = [float(balance.seconds(sizes).max()) for sizes in (np.full(transport.world_size, batch_size), np.array(shares[-1]))]
    thread = {method: transport.allgather_object(statistics.median(values)) for method, values in thread_ms.items()}
    if transport.rank == 0:
        found = {
            "pairs": pairs, "shares": shares, "waiting": waiting, "step_s": step_s, "thread_ms": thread,
            "num_ranks": transport.world_size,
            "block_samples": num_steps * batch_size * transport.world_size,
        }  # fmt: skip
        options.result.write_text(json.dumps(found))
    transport.close()


def endless_steps(session: Session, model: torch.nn.Module, data: Any) -> Iterator[None]:
    """Makes a step each time that it is asked for one."""
    for batch in session.batches(data, num_epochs=None):
        with session.step(batch):
            batch.loss = local_step(model, session.optimizer, batch)
        yield


if __name__ == "__main__":
    main()
