"""Claims of several batches at once: pools partition the work, ask the cursor seldom, and end a round together."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.algorithm.ledger import ClaimRule, batches_ahead
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.engine import claim_pool
from hvd_adaptive.engine.claim_pool import PooledCursor, open_pool
from hvd_adaptive.engine.claims import Claim, SharedCursor


def rules(sizes: Sequence[float], speeds: Sequence[float], unit: int = 1) -> Any:
    shares = np.array(speeds, dtype=float)
    return partial(
        ClaimRule.of_round,
        batch_sizes=np.array(sizes, dtype=float),
        speed_shares=shares / shares.sum(),
        work_per_sample=1.0,
        dynamic=True,
        unit=unit,
    )


@pytest.mark.parametrize("seed", range(8))
def test_pools_partition_the_work_and_close_at_one_place(seed: int) -> None:
    generator = random.Random(seed)
    num_hosts, per_host = generator.choice([(1, 4), (2, 3), (4, 2), (6, 1)])
    world = LocalWorld(num_hosts * per_host, num_hosts=num_hosts, host_stores=True)
    unit = generator.choice([1, 4])
    sizes = [unit * generator.randint(2, 12) for _ in range(world.world_size)]
    total = unit * generator.randint(1, 2000)
    rule_of, closes = rules(sizes, [1 + rank % 3 for rank in range(world.world_size)], unit), seed % 2

    def claim_all(transport: LocalTransport) -> tuple[list[Claim], int | None]:
        chance = random.Random(f"{seed} {transport.rank}")
        rule = rule_of(transport.rank)
        cursor = SharedCursor(transport, "c", total_work=total, least=rule.least)
        pool = open_pool(cursor, transport, "p", rule_of=rule_of)
        assert pool is not None
        taken: list[Claim] = []
        while (claim := pool.claim(lambda remaining: rule.size(remaining, pending=rule.full_claim))) is not None:
            taken.append(claim)
            time.sleep(chance.random() * 1e-3)
            if closes and transport.rank == 1 and len(taken) == 2:
                pool.close()
        transport.rendezvous("claimed")
        assert pool.claim(lambda remaining: remaining) is None
        return taken, pool.end

    found = world.run(claim_all)
    ends = {end for _, end in found}
    taken = sorted(claim for own, _ in found for claim in own)
    assert len(ends) == 1
    end = ends.pop()
    edges = [0, *(stop for _, stop in taken)]
    assert [start for start, _ in taken] == edges[:-1]
    assert edges[-1] == (total if end is None else end)
    assert closes or end is None
    least = rule_of(0).least
    assert all(stop - start >= min(least, total) and (stop == edges[-1] or not (stop - start) % unit) for start, stop in taken)


def test_the_cursor_is_asked_seldom() -> None:
    world_size, per_host = 64, 8
    world = LocalWorld(world_size, num_hosts=world_size // per_host, host_stores=True)
    transports = [LocalTransport(world, rank) for rank in range(world_size)]
    asked: list[str] = []
    rule_of = rules([64] * world_size, [1, 1, 2, 4] * (world_size // 4))
    pools = []
    for transport in transports:
        def add(key: str, amount: int, transport: LocalTransport = transport) -> int:
            asked.append(key)
            return LocalTransport.add(transport, key, amount)

        transport.add = add  # type: ignore[method-assign]
        cursor = SharedCursor(transport, "c", total_work=64 * 25 * world_size, least=2)
        pools.append(open_pool(cursor, transport, "p", rule_of=rule_of))
    num_claims = 0
    left = set(range(world_size))
    while left:
        for rank in sorted(left):
            rule = rule_of(rank)
            if pools[rank].claim(lambda remaining, rule=rule: rule.size(remaining, pending=64)) is None:  # type: ignore[union-attr]
                left.discard(rank)
            else:
                num_claims += 1
    assert num_claims >= 25 * world_size
    assert len(asked) < 0.4 * num_claims  # 2 a claim without pools


def test_a_rank_waits_while_another_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    world = LocalWorld(2, num_hosts=1, host_stores=True)
    first, second = LocalTransport(world, 0), LocalTransport(world, 1)
    rule_of = rules([8, 8], [1, 1])
    filling, go_on = threading.Event(), threading.Event()

    def slow(key: str, amount: int) -> int:
        filling.set()
        assert go_on.wait(20)
        return LocalTransport.add(first, key, amount)

    first.add = slow  # type: ignore[method-assign]
    size = partial(rule_of(0).size, pending=8)
    pools = [
        open_pool(SharedCursor(t, "c", total_work=160, least=2), t, "p", rule_of=rule_of) for t in (first, second)
    ]
    assert all(pools)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        go_on.set()
        time.sleep(seconds)

    monkeypatch.setattr(claim_pool, "time", SimpleNamespace(sleep=nap))
    claims: list[Claim | None] = []
    thread = threading.Thread(target=lambda: claims.append(pools[0].claim(size)))  # type: ignore[union-attr]
    thread.start()
    assert filling.wait(20)
    claims.append(pools[1].claim(size))  # type: ignore[union-attr]
    thread.join(20)
    assert naps and sorted(filter(None, claims)) == [(0, 8), (8, 16)]


def test_who_leaves_the_rest_to_others_leaves_the_pool_open() -> None:
    world = LocalWorld(2, num_hosts=1, host_stores=True)
    transports = [LocalTransport(world, rank) for rank in range(2)]
    rule_of = rules([8, 8], [1, 1])
    pools = [open_pool(SharedCursor(t, "c", total_work=16, least=2), t, "p", rule_of=rule_of) for t in transports]
    assert pools[0].claim(lambda remaining: 0) is None  # type: ignore[union-attr]
    taken = []
    while (claim := pools[1].claim(lambda remaining: 4)) is not None:  # type: ignore[union-attr]
        taken.append(claim)
    assert [edge for claim in taken for edge in claim] == [0, 4, 4, 8, 8, 12, 12, 16]
    assert pools[0].claim(lambda remaining: 4) is None  # type: ignore[union-attr]


def test_few_ranks_ask_the_cursor_itself() -> None:
    transport = LocalTransport(LocalWorld(8), 0)
    cursor = SharedCursor(transport, "c", total_work=100)
    assert open_pool(cursor, transport, "p", rule_of=rules([8] * 8, [1] * 8)) is None
    many = LocalTransport(LocalWorld(65), 0)
    assert isinstance(open_pool(cursor, many, "p", rule_of=rules([8] * 65, [1] * 65)), PooledCursor)
    assert [batches_ahead(count) for count in (1, 64, 65, 512, 4096)] == [1, 1, 2, 8, 64]
