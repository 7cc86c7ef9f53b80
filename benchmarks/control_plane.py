"""What the control plane costs a rank in a round, up to 4096 ranks: the rules on real statistics, claims and meetings at real
stores, and a model of what does not fit here.

python benchmarks/control_plane.py [--ranks 4096] [--processes 2,8,16,32,64] [--record FILE]

The rules run as every rank runs them, on statistics of so many ranks. Claims and meetings go to real stores from processes of
this machine, one a rank, forked so that they share torch's memory; ranks of pretended hosts have a store of their own. The
seconds of a store are its thread's CPU time, which does not depend on how many ranks share this machine's cores with it. The
model adds these up for hosts that have their own cores, with the network's latencies. What MPI's collectives take is measured
by benchmarks/control_gathers.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
from hvd_adaptive.engine.claim_pool import open_pool
from hvd_adaptive.engine.claims import SharedCursor
from hvd_adaptive.engine.records import RoundRecord, RoundStats
from hvd_adaptive.simulate.links import Links

# Dozens of ranks that share two cores connect more slowly than they do elsewhere.
store_address.PROBE_S = 60.0

STEPS = 25  # a rank's in a round
ROUNDS, MEETINGS = 3, 10
RANKS_PER_HOST = 8  # of the pretended hosts, and of the model's
# Of the rules, what a round of strategy `local` runs.
_ROUND_OF_LOCAL = ("weights, the slowest of all rules", "shares of the speed", "batch sizes, proportional", "merge period")
Rows = dict[tuple[int, "int | None"], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--processes", default="2,8,16,32,64")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    sizes = sorted({64, 512, options.ranks})
    lines = [
        *header(f"The control plane at {options.ranks} ranks"),
        "Milliseconds a round on every rank, median of 20:",
        "",
        f"| | {' | '.join(f'{size} ranks' for size in sizes)} |",
        f"| --- |{' --- |' * len(sizes)}",
    ]
    columns = {size: core_ms(size) for size in sizes}
    lines += [f"| {name} | {' | '.join(f'{columns[size][name]:.2f}' for size in sizes)} |" for name in columns[sizes[0]]]
    rows: Rows = {}
    for count in map(int, options.processes.split(",")):
        rows[count, None] = store_row(count, None)
        if count > RANKS_PER_HOST:
            rows[count, RANKS_PER_HOST] = store_row(count, RANKS_PER_HOST)
    names = list(next(iter(rows.values())))
    lines += [
        "",
        f"Processes that claim {ROUNDS} rounds of {STEPS} batches a rank without computing, and meet {MEETINGS} times after each "
        "(all share this machine's cores):",
        "",
        f"| ranks | a host's | {' | '.join(names)} |",
        f"| --- | --- |{' --- |' * len(names)}",
    ]
    for (count, together), row in rows.items():
        lines.append(f"| {count} | {together or 'no store'} | {' | '.join(f'{row[name]:,.4g}' for name in names)} |")
    lines += ["", *check_lines(rows), "", *model_lines(rows, columns)]
    publish(lines, options.record)


def check_lines(rows: Rows) -> list[str]:
    """The model of a meeting on this machine's own cores, fitted without the largest size, beside what was measured."""
    lines = [
        "Last arrival to last departure on this machine, as the CPU time of stores and ranks over its cores predicts it from the "
        "rows of at most half the processes, and as measured, ms:",
        "",
        "| ranks | a host's | predicted | measured |",
        "| --- | --- | --- | --- |",
    ]
    cores = len(os.sched_getaffinity(0))
    for (count, together), row in rows.items():
        smaller = [rows[key] for key in rows if key[1] == together and key[0] <= count // 2 and key[0] > 2]
        if smaller:
            at_root, at_host, own = (
                statistics.median(s[name] for s in smaller)
                for name in ("us a rank at rank 0's", "us a rank at its host's", "own us")
            )
            num_there = count if together is None else -(-count // together)
            busy_us = num_there * at_root + count * (own + (at_host if together else 0.0))
            measured = row["last arrival to last departure, ms"]
            lines.append(f"| {count} | {together or 'no store'} | {busy_us / cores / 1e3:.2f} | {measured:.2f} |")
    return lines


def model_lines(rows: Rows, columns: dict[int, dict[str, float]]) -> list[str]:
    """A round's control on hosts with cores of their own."""
    links = Links(
        world_size=1, ranks_per_host=1, bandwidth=1.25e9, latency_s=50e-6, host_bandwidth=1e10, host_latency_s=2e-6
    )  # fmt: skip
    found = {}
    for count in (512, 4096):
        if count in columns:
            rules_ms = sum(columns[count][name] for name in _ROUND_OF_LOCAL)
            for per_host in (1, 4, RANKS_PER_HOST):
                found[count, per_host] = model_ms(count, per_host, rows, rules_ms, gather=links)
    names = list(next(iter(found.values())))
    lines = [
        "The model: ms of a round's control once the last rank is there, on hosts with cores of their own, 10 Gbit/s, 50 us:",
        "",
        f"| ranks | a host's | {' | '.join(names)} | together |",
        f"| --- | --- |{' --- |' * len(names)} --- |",
    ]
    for (count, per_host), row in found.items():
        parts = " | ".join(f"{row[name]:.2f}" for name in names)
        lines.append(f"| {count} | {per_host} | {parts} | {sum(row.values()):.1f} |")
    return lines


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


@dataclass
class Found:
    """What one rank saw of a real store.

    Attributes:
        arrived: seconds at which it came to each meeting.
        departed: and went on from it.
        num_claims: pieces that it claimed.
        num_operations: of its claims, on rank 0's store.
        num_host_operations: of its claims, on its host's.
        claim_s: seconds of its claims.
        own_s: CPU seconds of its meetings.
        server_s: CPU seconds of rank 0's store for the claims, for the meetings, and for those of its host; rank 0 only.
    """

    arrived: list[float] = field(default_factory=list)
    departed: list[float] = field(default_factory=list)
    num_claims: int = 0
    num_operations: int = 0
    num_host_operations: int = 0
    claim_s: float = 0.0
    own_s: float = 0.0
    server_s: tuple[float, float, float] = (0.0, 0.0, 0.0)


def play_control(count: int, ranks_per_host: int | None) -> list[Found]:
    """Lets so many processes claim the pieces of some rounds and meet after each; returns what each found.

    Args:
        count: of the ranks.
        ranks_per_host: ranks of each pretended host, which then has a store of its own; None: all ask rank 0's.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(count)]
    children = [
        context.Process(target=one_rank, args=(rank, count, ranks_per_host, pipes[rank][1])) for rank in range(count)
    ]
    for child in children:
        child.start()
    # What ranks gather at their start goes through this process, in place of MPI.
    while True:
        values = [here.recv() for here, _ in pipes]
        if isinstance(values[0], Found):
            break
        for here, _ in pipes:
            here.send(values)
    for child in children:
        child.join()
    return values


def one_rank(rank: int, count: int, ranks_per_host: int | None, pipe: Any) -> None:
    """A rank's claims and meetings, in a process of its own."""

    def gather(value: Any) -> list[Any]:
        pipe.send(value)
        values: list[Any] = pipe.recv()
        return values

    hosts = None if ranks_per_host is None else [f"host {other // ranks_per_host}" for other in range(count)]
    before = set(os.listdir("/proc/self/task"))
    side = SideChannel(rank=rank, world_size=count, gather=gather, same_host=True, stall_limit_s=300, hosts=hosts)
    # One thread serves a store, and rank 0's is older than its host's.
    servers = sorted(map(int, set(os.listdir("/proc/self/task")) - before))
    found = Found()
    transport: Any = Counting(side, rank, count)
    sizes, shares = np.full(count, 64.0), np.full(count, 1 / count)
    claimed_s = met_s = np.zeros(2)
    for number in range(ROUNDS):
        total = 64 * STEPS * count
        rule_of = partial(ClaimRule.of_round, batch_sizes=sizes, speed_shares=shares, work_per_sample=1.0, dynamic=True)
        rule = rule_of(rank)
        cursor = SharedCursor(transport, f"cursor {number}", total_work=total, least=rule.least)
        claims = open_pool(cursor, transport, f"pool {number}", rule_of=rule_of) or cursor
        side.arrive("start")
        start_s = cpu_seconds(servers)
        begin = time.monotonic()
        size = partial(rule.size, pending=64)
        while (claim := claims.claim(size)) is not None:
            found.num_claims += claim[1] > claim[0]
        found.claim_s += time.monotonic() - begin
        side.arrive("claimed")
        between_s = cpu_seconds(servers)
        own = time.thread_time()
        for _ in range(MEETINGS):
            found.arrived.append(time.monotonic())
            side.arrive("meeting")
            found.departed.append(time.monotonic())
        found.own_s += time.thread_time() - own
        claimed_s, met_s = claimed_s + between_s - start_s, met_s + cpu_seconds(servers) - between_s
    found.num_operations, found.num_host_operations = transport.num_operations, transport.num_host_operations
    found.server_s = (float(claimed_s[0]), float(met_s[0]), float(met_s[1]))
    pipe.send(found)
    side.close()


class Counting:
    """What a rank's claims need of a transport, with its operations counted."""

    def __init__(self, side: SideChannel, rank: int, count: int) -> None:
        self.rank, self.world_size, self._side = rank, count, side
        self.host_store: Any = None if side.host is None else self
        self.ranks, self.num_hosts = ([rank], count) if side.host is None else (side.host.ranks, side.host.num_hosts)
        self.num_operations = self.num_host_operations = 0

    def add(self, key: str, amount: int) -> int:
        self.num_operations += 1
        return self._side.add(key, amount)

    def compare_set(self, *arguments: str) -> str:
        self.num_host_operations += 1
        assert self._side.host is not None
        return self._side.host.compare_set(*arguments)


def cpu_seconds(threads: list[int]) -> np.ndarray:
    """CPU seconds of the first two of some threads of this process; 0 where there are fewer."""
    nanoseconds = [int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads[:2]]
    return np.array([*nanoseconds, 0, 0][:2]) * 1e-9


def store_row(count: int, ranks_per_host: int | None) -> dict[str, float]:
    """What claims and meetings of so many processes cost."""
    found = play_control(count, ranks_per_host)
    arrivals, departures = (np.array([getattr(f, name) for f in found]) for name in ("arrived", "departed"))
    num_meetings = arrivals.shape[1]
    claims, operations = sum(f.num_claims for f in found), sum(f.num_operations for f in found)
    at_claims_s, at_meetings_s, at_host_s = found[0].server_s
    at_root = count if ranks_per_host is None else -(-count // ranks_per_host)
    return {
        "claims": claims,
        "operations a claim": operations / claims,
        "host operations a claim": sum(f.num_host_operations for f in found) / claims,
        "us an operation": 1e6 * at_claims_s / operations,
        "claims a second": claims / max(f.claim_s for f in found),
        "us a rank at rank 0's": 1e6 * at_meetings_s / num_meetings / at_root,
        "us a rank at its host's": 1e6 * at_host_s / num_meetings / min(count, ranks_per_host or count),
        "own us": 1e6 * sum(f.own_s for f in found) / num_meetings / count,
        "last arrival to last departure, ms": 1e3 * float(np.median(departures.max(axis=0) - arrivals.max(axis=0))),
    }


# The model


def model_ms(count: int, ranks_per_host: int, rows: Rows, rules_ms: float, *, gather: Links) -> dict[str, float]:
    """What a round's control costs so many ranks on hosts of their own, in ms, from what was measured here.

    Args:
        count: of the ranks.
        ranks_per_host: of each host.
        rows: what was measured, by (processes, ranks a host).
        rules_ms: of the rules, measured with so many ranks.
        gather: the network.
    """
    row = rows[max(key for key in rows if key[1] is not None)]
    num_hosts = -(-count // ranks_per_host)
    together = count > 64 and ranks_per_host > 1
    at_root = num_hosts if together else count
    meeting_s = 1e-6 * (at_root * row["us a rank at rank 0's"] + (together * ranks_per_host) * row["us a rank at its host's"])
    meeting_s += 1e-6 * row["own us"] + 4 * gather.latency_s + 4 * gather.host_latency_s * together
    links = dataclasses.replace(gather, world_size=count, ranks_per_host=ranks_per_host)
    return {
        "meeting": 1e3 * meeting_s,
        "two gathers of statistics": 2e3 * links.allgather_s(8 * len(RoundStats.names())),
        "rules": rules_ms,
    }


if __name__ == "__main__":
    main()
