"""The shared cursor under every interleaving of its operations: claims partition the work, none is a sliver, few operations."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.algorithm.ledger import ClaimRule
from hvd_adaptive.comm.in_process_store import InProcessStore
from hvd_adaptive.engine.claims import Claim, EqualClaims, SharedCursor, StepFrontier


class Interleaved(InProcessStore):
    """A store beside whose operations other ranks may claim: the worst that concurrency can do, as the seed says."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.others: list[Any] = []
        self.num_operations = 0

    def add(self, key: str, amount: int) -> int:
        # Who was refused waits for the end of who closed the cursor, so that one is not overtaken here.
        while self.others and not key.endswith(".end") and self.random.random() < 0.4:
            # An operation of another rank comes first; it may itself be overtaken.
            self.random.choice(self.others)()
        self.num_operations += 1
        return super().add(key, amount)

    def forget(self, key: str) -> None:
        super().forget(key)


@pytest.mark.parametrize("total", [8, 9, 17, 25, 33, 101, 153])
def test_whole_batches_leave_no_single_sample_which_batchnorm_refuses(total: int) -> None:
    for seed in range(20):
        transport: Any = Interleaved(seed)
        rules = [
            ClaimRule.of_round(
                rank, batch_sizes=np.full(2, 8.0), speed_shares=np.full(2, 0.5), work_per_sample=1.0, dynamic=True, unit=8
            )
            for rank in range(2)
        ]  # fmt: skip
        cursors = [SharedCursor(transport, "c", total_work=total, least=rules[0].least) for _ in rules]
        claims = []
        generator = np.random.default_rng(seed)
        while len(claims) < 100:
            rank = int(generator.integers(2))
            claim = cursors[rank].claim(lambda remaining, rule=rules[rank]: rule.size(remaining, pending=8.0))  # type: ignore[misc]
            if claim is None:
                break
            claims.append(claim[1] - claim[0])
        assert sum(claims) == total and min(claims) > 1 and max(claims) <= 9, (seed, claims)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("start", [0, 24])
def test_equally_many_batches_leave_no_single_sample_either(num_ranks: int, start: int) -> None:
    for left, stretch in itertools.product(range(1, 100), (1, 3)):
        store: Any = InProcessStore()
        frontiers = [StepFrontier(store, "steps", num_steps=100) for _ in range(num_ranks)]
        claims = [
            EqualClaims(
                frontiers[rank], rank=rank, world_size=num_ranks, size=8, total_work=start + left, start=start, unit=8,
                stretch=stretch, least=2,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        taken = sorted(claim for own in claims for claim in iter(lambda own=own: own.claim(lambda remaining: 1 // 0), None))  # type: ignore[misc]
        edges = [start, *(stop for _, stop in taken)]
        assert [first for first, _ in taken] == edges[:-1] and edges[-1] == start + left
        assert all(2 <= stop - first <= 9 for first, stop in taken) or left == 1, taken
        assert {own.end for own in claims} == {None}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    total=st.integers(1, 400),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    closes=st.booleans(),
)
def test_claims_partition_the_work_whatever_the_interleaving(seed: int, total: int, sizes: list[int], closes: bool) -> None:
    transport: Any = Interleaved(seed)
    speeds = np.arange(1.0, len(sizes) + 1)
    rules = [
        ClaimRule.of_round(
            rank, batch_sizes=np.array(sizes, dtype=float), speed_shares=speeds / speeds.sum(), work_per_sample=1.0, dynamic=True
        )
        for rank in range(len(sizes))
    ]  # fmt: skip
    least = rules[0].least
    assert {rule.least for rule in rules} == {min(2, *sizes)}
    cursors = [SharedCursor(transport, "c", total_work=total, least=least) for _ in rules]
    taken: list[Claim] = []
    busy, refused = [False] * len(rules), [False] * len(rules)

    def turn(rank: int) -> None:
        # A rank makes one claim at a time.
        if busy[rank] or refused[rank]:
            return
        busy[rank] = True
        claim = cursors[rank].claim(lambda remaining: rules[rank].size(remaining, pending=0))
        busy[rank] = False
        if claim is None:
            refused[rank] = True
        else:
            taken.append(claim)

    transport.others = [lambda rank=rank: turn(rank) for rank in range(len(rules))]
    if closes:
        for _ in range(seed % 7):
            turn(seed % len(rules))
        cursors[seed % len(rules)].close()
    while not all(refused):
        turn(transport.random.randrange(len(rules)))
    end = {cursor.end for cursor in cursors}
    assert len(end) == 1
    edges = [0, *(stop for _, stop in sorted(taken))]
    assert [start for start, _ in sorted(taken)] == edges[:-1]
    assert edges[-1] == (end.pop() if closes and edges[-1] < total else total)
    assert all(stop - start >= min(least, total) for start, stop in taken)
    cursors[0].forget()
    assert transport.add("c", 0) == transport.add("c.end", 0) == 0


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_a_claim_takes_two_operations_however_many_ranks_claim(num_ranks: int) -> None:
    transport: Any = Interleaved(0)
    cursors = [SharedCursor(transport, "c", total_work=20 * num_ranks) for _ in range(num_ranks)]
    num_claims = sum(cursor.claim(lambda _: 2) is not None for _ in range(10) for cursor in cursors)
    assert num_claims == 10 * num_ranks and transport.num_operations == 2 * num_claims
