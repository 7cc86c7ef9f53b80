"""Batch sizes and learning rates: equal speeds are a fixed point, bounds hold, faster ranks get more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.algorithm.batch_sizes import (
    RULES,
    lr_multiplier,
    lr_schedule,
    next_batch_sizes,
    speed_shares,
)
from hvd_adaptive.research.heterogpu import add_rules

add_rules()

updates = st.lists(st.floats(0.1, 100), min_size=1, max_size=6).map(np.array)


@pytest.mark.parametrize("rule", RULES)
@given(size=st.floats(16, 128), count=st.integers(1, 6), each=st.floats(0.5, 100))
def test_equal_updates_are_a_fixed_point(rule: str, size: float, count: int, each: float) -> None:
    sizes = np.full(count, size)
    after = next_batch_sizes(rule, sizes, np.full(count, each), min_batch_size=16, max_batch_size=128, step=8)
    assert np.array_equal(after, sizes)


@pytest.mark.parametrize("rule", RULES)
@given(num_updates=updates, step=st.floats(0.1, 64))
def test_sizes_stay_in_bounds_and_move_with_the_updates(
    rule: str, num_updates: np.ndarray, step: float
) -> None:
    sizes = np.full(len(num_updates), 64.0)
    after = next_batch_sizes(rule, sizes, num_updates, min_batch_size=16, max_batch_size=128, step=step)
    assert ((after >= 16) & (after <= 128)).all()
    mean = num_updates.mean()
    assert (after[num_updates > mean] >= 64).all() and (after[num_updates < mean] <= 64).all()


def test_the_papers_rule_by_hand() -> None:
    after = next_batch_sizes(
        "paper",
        np.array([64.0, 64, 64, 64]),
        np.array([2.0, 2, 4, 8]),
        min_batch_size=16,
        max_batch_size=70,
        step=4,
    )
    # The mean is 4; the last would become 80 and pass the bound, so it stays.
    assert after.tolist() == [56, 56, 64, 64]


def test_heterogpus_rule_by_hand() -> None:
    after = next_batch_sizes(
        "heterogpu",
        np.array([64.0, 32, 1000]),
        np.array([1.0, 1, 9]),
        min_batch_size=32,
        max_batch_size=1024,
        step=32,
    )
    assert after.tolist() == [32, 32, 1024]


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.25), ("sqrt", 0.5), ("none", 1.0)])
def test_the_reference_batch_keeps_the_learning_rate(rule: str, expected: float) -> None:
    assert lr_multiplier(rule, batch_size=64, reference_batch_size=64) == 1
    assert lr_multiplier(rule, batch_size=16, reference_batch_size=64) == expected


def test_the_schedule_ramps_and_decays_without_a_jump() -> None:
    values = [lr_schedule(epoch, warmup_epochs=10, decay=0.1) for epoch in np.linspace(0, 30, 301)]
    assert min(values) > 0 and max(values) == pytest.approx(1)
    assert values[:100] == sorted(values[:100]) and values[101:] == sorted(values[101:], reverse=True)
    assert np.abs(np.diff(values)).max() < 0.011
    assert lr_schedule(20, warmup_epochs=10, decay=0.1) == pytest.approx(0.5)
    assert lr_schedule(0, warmup_epochs=0, decay=0) == 1


@given(speed=st.lists(st.floats(0.1, 100), min_size=1, max_size=6).map(np.array), seconds=st.floats(0.1, 10))
def test_shares_follow_speeds(speed: np.ndarray, seconds: float) -> None:
    shares = speed_shares(speed * seconds, np.full(len(speed), seconds))
    assert shares.sum() == pytest.approx(1)
    assert shares == pytest.approx(speed / speed.sum())


def test_an_unmeasured_rank_counts_as_the_slowest() -> None:
    assert speed_shares(np.array([2.0, 0, 4]), np.array([1.0, 0, 1])) == pytest.approx([0.25, 0.25, 0.5])
    assert speed_shares(np.zeros(4), np.zeros(4)) == pytest.approx(np.full(4, 0.25))
