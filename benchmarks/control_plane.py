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
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
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
from hvd_adaptive.comm import host_store, store_address
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
RANKS_PER_HOST = 8  # of the pretended hosts
# Of the rules, what a round of strategy `local` runs.
_ROUND_OF_LOCAL = ("weights, the slowest of all rules", "shares of the speed", "batch sizes, proportional", "merge period")
Rows = dict[tuple[int, "str | None"], dict[str, float]]


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
            rows[count, "hosts"] = store_row(count, "hosts")
        if count > 4 * RANKS_PER_HOST:
            rows[count, "hosts, districts"] = store_row(count, "hosts, districts")
    names = list(next(iter(rows.values())))
    lines += [
        "",
        f"Processes that claim {ROUNDS} rounds of {STEPS} batches a rank without computing, and meet {MEETINGS} times after each "
        "(all share this machine's cores):",
        "",
        f"| ranks | stores | {' | '.join(names)} |",
        f"| --- | --- |{' --- |' * len(names)}",
    ]
    for (count, layout), row in rows.items():
        lines.append(f"| {count} | {layout or 'one'} | {' | '.join(f'{row[name]:,.4g}' for name in names)} |")
    lines += ["", *check_lines(rows), "", *model_lines(rows, columns)]
    publish(lines, options.record)


def check_lines(rows: Rows) -> list[str]:
    """The model of a meeting, fitted to the smaller half of the sizes, beside what was measured."""
    cores = len(os.sched_getaffinity(0))
    lines = [
        "The model against these rows, fitted to the rows of one store and at most half the processes. CPU: of all stores and "
        f"ranks, us a rank. Time: that CPU over this machine's {cores} cores, which other work shares, ms from the last arrival "
        "to the last departure:",
        "",
        "| ranks | stores | CPU predicted | measured | time predicted at least | measured |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (count, layout), row in rows.items():
        smaller = [rows[key] for key in rows if key[1] is None and 4 < key[0] <= count // 2]
        if not smaller:
            continue
        store_us, own_us = cost_of(smaller)
        turns = sum(sum(level) for level in levels_of(count, layout))
        predicted = (turns * store_us + count * own_us) / count
        lines.append(
            f"| {count} | {layout or 'one'} | {predicted:.0f} | {row['own us'] + row['us of all stores a rank']:.0f} | "
            f"{predicted * count / cores / 1e3:.2f} | {row['last arrival to last departure, ms']:.2f} |"
        )
    return lines


def cost_of(rows: list[dict[str, float]]) -> tuple[float, float]:
    """CPU microseconds of a store for each that meets there, and of a rank that does."""
    return statistics.median(r["us of all stores a rank"] for r in rows), statistics.median(r["own us"] for r in rows)


def levels_of(count: int, layout: str | None) -> list[list[int]]:
    """How many meet in each store, one list a level, the last of them of rank 0's."""
    if layout is None:
        return [[count]]
    hosts = [f"host {rank // RANKS_PER_HOST}" for rank in range(count)]
    with patched(layout):
        levels, present = [], list(range(count))
        groups = [lambda rank: [r for r in range(count) if hosts[r] == hosts[rank]]] if host_store.has_host_stores(hosts) else []
        if host_store.district(0, hosts) is not None:
            groups.append(lambda rank: host_store.district(rank, hosts) or [])
        for group in groups:
            firsts = sorted({group(rank)[0] for rank in present})
            levels.append([sum(group(rank)[0] == first for rank in present) for first in firsts])
            present = firsts
    return [*levels, [len(present)]]


@contextlib.contextmanager
def patched(layout: str | None) -> Iterator[None]:
    """Has few ranks meet as many do."""
    before = host_store._FROM_RANKS, host_store._MOST_HOSTS
    host_store._FROM_RANKS, host_store._MOST_HOSTS = 2, 4 if layout == "hosts, districts" else 64
    yield
    host_store._FROM_RANKS, host_store._MOST_HOSTS = before


def model_lines(rows: Rows, columns: dict[int, dict[str, float]]) -> list[str]:
    """A round's control on hosts with cores of their own."""
    lines = [
        "The model: ms of a round's control once the last rank is there, if all come at once, on hosts with cores of their own, "
        "with 10 Gbit/s and 50 us between them:",
        "",
        "| ranks | a host's | stores | meeting | two gathers of statistics | rules | together | before: meeting in one store |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    store_us, own_us = cost_of([row for (count, layout), row in rows.items() if layout is None and count > 4])
    for count in [size for size in columns if size > 64]:
        for per_host in (1, 4, 8):
            links = Links(
                world_size=count, ranks_per_host=per_host, bandwidth=1.25e9, latency_s=50e-6, host_bandwidth=1e10,
                host_latency_s=2e-6,
            )  # fmt: skip
            hosts = [f"host {rank // per_host}" for rank in range(count)]
            sizes = [per_host] if host_store.has_host_stores(hosts) else []
            left = links.num_hosts if sizes else count
            if (ranks := host_store.district(0, hosts)) is not None:
                sizes.append(len(ranks) // per_host if sizes else len(ranks))
                left = -(-left // sizes[-1])
            sizes.append(left)
            trips_ms = 1e3 * 6 * links.latency_s * len(sizes)
            meeting_ms = sum(sizes) * store_us / 1e3 + own_us / 1e3 * len(sizes) + trips_ms
            before_ms = (count * store_us + own_us) / 1e3 + 1e3 * 6 * links.latency_s
            gathers_ms = 2e3 * links.allgather_s(8 * len(RoundStats.names()))
            rules_ms = sum(columns[count][name] for name in _ROUND_OF_LOCAL)
            lines.append(
                f"| {count} | {per_host} | {' + '.join(map(str, sizes))} | {meeting_ms:.1f} | {gathers_ms:.1f} | "
                f"{rules_ms:.1f} | {meeting_ms + gathers_ms + rules_ms:.1f} | {before_ms:.1f} |"
            )
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
    claims = rule_of_round()
    found[f"sizes of {STEPS} claims"] = median_ms(
        lambda: (rule_of_round(), [claims.size(10**6, pending=64) for _ in range(STEPS)])
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
        server_s: CPU seconds of the stores that it serves: rank 0's for the claims, and all for the meetings.
    """

    arrived: list[float] = field(default_factory=list)
    departed: list[float] = field(default_factory=list)
    num_claims: int = 0
    num_operations: int = 0
    num_host_operations: int = 0
    claim_s: float = 0.0
    own_s: float = 0.0
    server_s: tuple[float, float] = (0.0, 0.0)


def play_control(count: int, layout: str | None) -> list[Found]:
    """Lets so many processes claim the pieces of some rounds and meet after each; returns what each found.

    Args:
        count: of the ranks.
        layout: "hosts": of 8 ranks, each with a store of its own; "hosts, districts": two or three of them meet, too; None: all
            ask rank 0's.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(count)]
    children = [
        context.Process(target=one_rank, args=(rank, count, layout, pipes[rank][1])) for rank in range(count)
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


def one_rank(rank: int, count: int, layout: str | None, pipe: Any) -> None:
    """A rank's claims and meetings, in a process of its own."""

    def gather(value: Any) -> list[Any]:
        pipe.send(value)
        values: list[Any] = pipe.recv()
        return values

    hosts = None if layout is None else [f"host {other // RANKS_PER_HOST}" for other in range(count)]
    before = set(os.listdir("/proc/self/task"))
    with patched(layout):
        side = SideChannel(rank=rank, world_size=count, gather=gather, same_host=True, stall_limit_s=300, hosts=hosts)
    # One thread serves a store, and rank 0's is older than its host's and its district's.
    servers = sorted(map(int, set(os.listdir("/proc/self/task")) - before))
    found = Found()
    transport: Any = Counting(side, rank, count)
    sizes, shares = np.full(count, 64.0), np.full(count, 1 / count)
    claimed_s = met_s = np.zeros(3)
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
    found.server_s = (float(claimed_s[0]), float(met_s.sum()))
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
        return self._side.store.add(key, amount)

    def compare_set(self, *arguments: str) -> str:
        self.num_host_operations += 1
        assert self._side.host is not None
        return self._side.host.compare_set(*arguments)


def cpu_seconds(threads: list[int]) -> np.ndarray:
    """CPU seconds of the first three of some threads of this process; 0 where there are fewer."""
    nanoseconds = [int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) for thread in threads[:3]]
    return np.array([*nanoseconds, 0, 0, 0][:3]) * 1e-9


def store_row(count: int, layout: str | None) -> dict[str, float]:
    """What claims and meetings of so many processes cost."""
    found = play_control(count, layout)
    arrivals, departures = (np.array([getattr(f, name) for f in found]) for name in ("arrived", "departed"))
    num_meetings = arrivals.shape[1]
    claims, operations = sum(f.num_claims for f in found), sum(f.num_operations for f in found)
    return {
        "claims": claims,
        "operations a claim": operations / claims,
        "host operations a claim": sum(f.num_host_operations for f in found) / claims,
        "us an operation": 1e6 * found[0].server_s[0] / operations,
        "claims a second": claims / max(f.claim_s for f in found),
        "us of all stores a rank": 1e6 * sum(f.server_s[1] for f in found) / num_meetings / count,
        "own us": 1e6 * sum(f.own_s for f in found) / num_meetings / count,
        "last arrival to last departure, ms": 1e3 * float(np.median(departures.max(axis=0) - arrivals.max(axis=0))),
    }


if __name__ == "__main__":
    main()
