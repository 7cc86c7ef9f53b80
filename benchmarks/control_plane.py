"""What the control plane costs a rank in a round, up to 4096 ranks: the rules on real statistics, and claims at a real store.

python benchmarks/control_plane.py [--ranks 4096] [--record FILE]

The rules run as every rank runs them, on statistics of so many ranks. Claims and meetings go to a real store (the one that rank
0 serves) from processes and threads of this machine, each on a connection of its own; the seconds of the store's thread are
its process's CPU time, which does not depend on how many cores the claimants share with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from recording import header, publish

from hvd_adaptive.algorithm.batch_sizes import speed_shares
from hvd_adaptive.algorithm.ledger import ClaimRule
from hvd_adaptive.algorithm.merge_weights import RULES, merge_weights
from hvd_adaptive.algorithm.round_control import RoundControl
from hvd_adaptive.algorithm.share_balance import StepWindow
from hvd_adaptive.algorithm.share_control import ShareControl
from hvd_adaptive.algorithm.shares import cut_round
from hvd_adaptive.algorithm.statistics import Gathered
from hvd_adaptive.comm import store_address
from hvd_adaptive.comm.side_channel import SideChannel
from hvd_adaptive.config import Config
from hvd_adaptive.engine.claims import SharedCursor
from hvd_adaptive.engine.records import RoundRecord, RoundStats

# Dozens of claimants that share two cores connect more slowly than ranks do.
store_address.PROBE_S = 60.0

STEPS = 25  # a rank's in a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    sizes = sorted({4, 256, options.ranks})
    lines = [
        *header(f"The control plane at {options.ranks} ranks"),
        "Milliseconds a round on every rank, median of 20:",
        "",
        f"| | {' | '.join(f'{size} ranks' for size in sizes)} |",
        f"| --- |{' --- |' * len(sizes)}",
    ]
    columns = [core_ms(size) for size in sizes]
    lines += [f"| {name} | {' | '.join(f'{column[name]:.2f}' for column in columns)} |" for name in columns[0]]
    lines += [
        "",
        "Claims from one cursor, every claimant claiming again at once, and meetings of as many ranks:",
        "",
        "| claimants | claims/s | operations a claim | store's thread, us an operation | last arrival to last departure, ms | "
        "us of it a rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for count in (1, 4, 16, 64):
        lines.append(f"| {count} | {' | '.join(store_row(count))} |")
    publish(lines, options.record)


# The rules


def round_statistics(count: int, seed: int) -> Gathered:
    """Statistics of ranks at speeds 1:1:2:4 with noise, as a round of claims leaves them."""
    generator = np.random.default_rng(seed)
    speed = np.array([1.0, 1.0, 2.0, 4.0])[np.arange(count) % 4] * generator.normal(1, 0.03, count)
    steps = np.maximum(1, np.round(STEPS * speed / 2))
    busy_s = 64 * steps / (1000 * speed)
    columns = {
        "batch_size": 64.0, "num_updates": steps, "num_samples": 64 * steps, "num_steps": steps, "work": 64 * steps,
        "busy_s": busy_s, "finite": 1.0, "norm_per_parameter": 0.01, "merge_s": 0.05, "control_s": 0.005, "wait_s": 0.01,
        "train_s": 1.0, "loss_sum": 64 * steps, "loss_samples": 64 * steps,
    }  # fmt: skip
    nothing = RoundStats.by_name(np.zeros((count, len(RoundStats.names()))))
    return nothing | {name: np.broadcast_to(column, count) for name, column in columns.items()}


def median_ms(action: Callable[[], Any], num_repeats: int = 20) -> float:
    times = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def core_ms(count: int) -> dict[str, float]:
    """Milliseconds of each part for so many ranks."""
    found: dict[str, float] = {}
    rounds = [round_statistics(count, seed) for seed in range(8)]
    stats = rounds[0]
    columns = {name: stats[name] for name in ("num_updates", "num_samples", "norm_per_parameter")}
    found["weights, the slowest of all rules"] = max(
        median_ms(
            lambda rule=rule: merge_weights(
                rule, batch_sizes=stats["batch_size"], finite=stats["finite"] > 0, **columns
            )
        )
        for rule in [Config(merge_weights=name) for name in RULES]
    )
    found["shares of the speed"] = median_ms(lambda: speed_shares(stats["work"], stats["busy_s"]))
    sizes = np.full(count, 64.0)
    for rule in ("fixed", "paper", "proportional"):
        control = RoundControl(Config(batch_size_rule=rule), count, speaks=False)
        turn = iter(range(10**6))
        found[f"batch sizes, {rule}"] = median_ms(
            lambda control=control, turn=turn: control.next_batch_sizes(sizes, rounds[next(turn) % 8], warming_up=False)
        )
    shares = ShareControl(Config(strategy="sync"), count, global_batch_size=64 * count, smallest=1)
    turn = iter(range(10**6))
    windows = [
        StepWindow(np.full(count, 32.0), r["num_samples"], r["busy_s"], r["busy_s"] ** 2 / 32) for r in rounds
    ]
    found["shares of sync"] = median_ms(lambda: shares.observe(windows[next(turn) % 8], step=0))
    whole = [int(size) for size in shares.whole]
    found[f"a rank's parts of {STEPS} steps of sync"] = median_ms(
        lambda: list(cut_round(STEPS * 64 * count, total=64 * count, shares_at=lambda _: whole, rank=count - 1))
    )
    rule_of_round = lambda: ClaimRule.of_round(  # noqa: E731
        count - 1, batch_sizes=sizes, speed_shares=np.full(count, 1 / count), work_per_sample=1.0, dynamic=True
    )
    rule = rule_of_round()
    found[f"sizes of {STEPS} claims"] = median_ms(
        lambda: (rule_of_round(), [rule.size(10**6, pending=64) for _ in range(STEPS)])
    )
    record = RoundRecord(
        round=1, epoch=0.5, train_s=2.0, num_samples=10**6, loss=1.0, weight=np.full(count, 1 / count), payload_bytes=10**8,
        stats=stats,
    )  # fmt: skip
    period = RoundControl(Config(merge_period="auto"), count, speaks=False)

    def finish_round() -> None:
        record.num_samples, record.train_s = record.num_samples + 64 * STEPS * count, record.train_s + 1
        period.after_round(record, 10**9)

    found["merge period"] = median_ms(finish_round)
    found["the round's record as JSON (rank 0)"] = median_ms(lambda: json.dumps(record.to_json()))
    return found


# The store


def store_row(count: int) -> list[str]:
    """Claims and meetings of so many claimants at a store in a process of its own."""
    num_processes = min(count - 1, 4)
    context = multiprocessing.get_context("fork")
    offers = [context.Pipe() for _ in range(num_processes)]
    done: Any = context.Queue()
    threads = [(count - 1 + i) // num_processes for i in range(num_processes)]
    first = np.concatenate(([1], 1 + np.cumsum(threads))).tolist() if threads else []
    total = 3000 if count <= 16 else 1500
    children = [
        context.Process(target=claimants, args=(range(first[i], first[i + 1]), count, offers[i][1], total, done))
        for i in range(num_processes)
    ]
    for child in children:
        child.start()

    def tell(offer: Any) -> Any:
        for here, _ in offers:
            here.send(offer)
        return offer

    channel = SideChannel(rank=0, world_size=count, broadcast=tell, same_host=True, stall_limit_s=120)
    own = Claimant(0, channel, total)
    own.claim()
    cpu_s = time.process_time() - own.cpu_s
    results = [own.result(), *(item for _ in children for item in done.get())]
    channel.close()
    for child in children:
        child.join()
    claims, operations = sum(r["claims"] for r in results), sum(r["operations"] for r in results)
    seconds = max(r["stop"] for r in results) - min(r["start"] for r in results)
    arrivals, departures = (np.array([r[name] for r in results]) for name in ("arrived", "departed"))
    meeting_s = float(np.median((departures.max(axis=0) - arrivals.max(axis=0))[1:]))
    # Rank 0 of this process claims too; its own CPU seconds are left out.
    each_us = 1e6 * (cpu_s - own.python_s) / operations
    return [
        f"{claims / seconds:,.0f}",
        f"{operations / claims:.2f}",
        f"{each_us:.1f}",
        f"{1e3 * meeting_s:.2f}",
        f"{1e6 * meeting_s / count:.1f}",
    ]


class Claimant:
    """One rank's claims and meetings."""

    def __init__(self, rank: int, channel: SideChannel, total: int) -> None:
        self.rank, self.channel, self.total = rank, channel, total
        self.claims = self.operations = 0
        self.start = self.stop = self.cpu_s = self.python_s = 0.0
        self.arrived: list[float] = []
        self.departed: list[float] = []

    def compare_set(self, *arguments: str) -> str:
        self.operations += 1
        return self.channel.compare_set(*arguments)

    def add(self, key: str, amount: int) -> int:
        self.operations += 1
        return self.channel.add(key, amount)

    def claim(self) -> None:
        transport: Any = self
        self.channel.arrive("start")
        self.cpu_s, self.start, own = time.process_time(), time.monotonic(), time.thread_time()
        cursor = SharedCursor(transport, "cursor", total_work=2 * self.total)
        while cursor.claim(lambda _: 2) is not None:
            self.claims += 1
        self.stop, self.python_s = time.monotonic(), time.thread_time() - own
        for number in range(6):
            self.arrived.append(time.monotonic())
            self.channel.arrive(f"meeting {number}")
            self.departed.append(time.monotonic())

    def result(self) -> dict[str, Any]:
        names = ("claims", "operations", "start", "stop", "arrived", "departed")
        return {name: getattr(self, name) for name in names}


def claimants(ranks: range, count: int, offer: Any, total: int, done: Any) -> None:
    """Some ranks as threads of this process."""
    received = offer.recv()
    found: list[dict[str, Any]] = []

    def one(rank: int) -> None:
        channel = SideChannel(
            rank=rank, world_size=count, broadcast=lambda _: received, same_host=True, stall_limit_s=120
        )
        claimant = Claimant(rank, channel, total)
        claimant.claim()
        found.append(claimant.result())
        channel.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.put(found)


if __name__ == "__main__":
    main()
