"""Claims partition the epoch, whatever their sizes, and end together."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.algorithm.ledger import Ledger, MegaBatch, claim_size, epoch_order, round_size


@given(size=st.integers(1, 500), seed=st.integers(0, 100), epoch=st.integers(0, 5))
def test_an_epoch_order_is_a_permutation_of_its_own(size: int, seed: int, epoch: int) -> None:
    order = epoch_order(size, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(size))
    assert np.array_equal(order, epoch_order(size, seed=seed, epoch=epoch))
    if size > 50:
        assert not np.array_equal(order, epoch_order(size, seed=seed, epoch=epoch + 1))
        assert not np.array_equal(order, epoch_order(size, seed=seed + 1, epoch=epoch))


@given(dataset_size=st.integers(1, 10_000), mega_batch=st.integers(1, 12_000), start=st.floats(0, 0.999))
def test_rounds_partition_the_rest_of_an_epoch_evenly(
    dataset_size: int, mega_batch: int, start: float
) -> None:
    ledger = Ledger(cursor=int(start * dataset_size))
    sizes = []
    while ledger.epoch == 0:
        sizes.append(round_size(ledger.cursor, dataset_size=dataset_size, mega_batch=mega_batch))
        ledger = ledger.advance(sizes[-1], dataset_size)
    assert sum(sizes) == dataset_size - int(start * dataset_size)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= 1.5 * mega_batch + 1
    assert ledger == Ledger(epoch=1, cursor=0)


def test_the_ledger_refuses_to_leave_the_epoch() -> None:
    with pytest.raises(ValueError, match="7 \\+ 4 of 10"):
        Ledger(cursor=7).advance(4, 10)


@given(
    work=st.lists(st.integers(0, 30), min_size=1, max_size=60), cuts=st.lists(st.integers(1, 40), min_size=1)
)
def test_claims_by_work_partition_the_samples_in_order(work: list[int], cuts: list[int]) -> None:
    rows = np.arange(100, 100 + len(work))
    mega_batch = MegaBatch(rows, np.array(work))
    assert mega_batch.total_work == sum(max(w, 1) for w in work)
    position, claimed, turn = 0, [], 0
    while position < mega_batch.total_work:
        stop = min(position + cuts[turn % len(cuts)], mega_batch.total_work)
        claimed.append(mega_batch.claimed(position, stop))
        position, turn = stop, turn + 1
    assert np.array_equal(np.concatenate(claimed), rows)


def test_a_claim_by_work_is_as_heavy_as_asked_for() -> None:
    work = np.full(1000, 7)
    mega_batch = MegaBatch(np.arange(1000), work)
    assert len(mega_batch.claimed(700, 1400)) == 100


@given(
    remaining=st.integers(1, 5000),
    full=st.floats(1, 500),
    pending=st.floats(0, 500),
    others=st.floats(0, 2000),
    share=st.floats(0.01, 1),
)
def test_claims_stay_in_bounds_and_leave_no_sliver(
    remaining: int, full: float, pending: float, others: float, share: float
) -> None:
    size = claim_size(
        remaining=remaining,
        full_claim=full,
        own_pending=pending,
        others_full_claims=others,
        speed_share=share,
    )
    floor = min(max(2.0, full / (4 if pending > full else 16)), full)
    assert 1 <= size <= remaining
    assert size <= round(full) + floor
    left = remaining - size
    assert left == 0 or left >= floor
    assert size >= round(floor) or size == remaining


def finish_times(speeds: list[float], *, batch: int, mega_batch: int, seed: int, cut: bool) -> np.ndarray:
    """Ranks with prefetch in virtual time; returns when each one ends."""
    generator = np.random.default_rng(seed)
    shares = np.array(speeds) / sum(speeds)
    world_size, cursor = len(speeds), 0
    pending, held, ends = np.zeros(world_size), [0] * world_size, np.zeros(world_size)

    def claim(rank: int) -> int:
        nonlocal cursor
        remaining = mega_batch - cursor
        if not remaining:
            return 0
        size = batch
        if cut:
            size = claim_size(
                remaining=remaining,
                full_claim=batch,
                own_pending=pending[rank],
                others_full_claims=batch * (world_size - 1),
                speed_share=shares[rank],
            )
        size = min(size, remaining)
        cursor += size
        return size

    events = [(0.0, rank) for rank in range(world_size)]
    for rank in range(world_size):
        held[rank] = claim(rank)
    while events:
        now, rank = heapq.heappop(events)
        size = held[rank]
        if not size:
            ends[rank] = now
            continue
        pending[rank] = size
        held[rank] = claim(rank)
        seconds = (size + 2) / speeds[rank] * (1 + 0.05 * generator.standard_normal())
        heapq.heappush(events, (now + seconds, rank))
    assert cursor == mega_batch
    return ends


@pytest.mark.parametrize("speeds", [[1, 1, 2, 4], [1, 1, 1, 1], [1, 8], [3, 2, 2, 1]])
def test_cut_claims_end_together(speeds: list[float]) -> None:
    def waiting(cut: bool) -> float:
        waits = []
        for seed in range(20):
            ends = finish_times(speeds, batch=64, mega_batch=6400, seed=seed, cut=cut)
            waits.append((ends.max() - ends).mean() / ends.max())
        return float(np.mean(waits))

    assert waiting(cut=True) < 0.012
    assert waiting(cut=True) < 0.75 * waiting(cut=False)
