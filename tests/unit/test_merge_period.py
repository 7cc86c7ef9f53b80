"""The merge period: communication gets its share and no more, changes are bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.algorithm.merge_period import (
    MergePeriod,
    are_alike,
    part_of_short_rounds,
    with_short_rounds,
)
from hvd_adaptive.config import Config


def run(
    period: MergePeriod,
    *,
    merge_s: Any,
    sample_s: float,
    num_rounds: int,
    largest: int = 10**9,
) -> list[int]:
    """Rounds of a job whose merge takes so long; merge_s may be a function of the round."""
    sizes = []
    for number in range(num_rounds):
        merge = merge_s(number) if callable(merge_s) else merge_s
        period.observe(
            num_samples=period.mega_batch,
            round_s=merge + sample_s * period.mega_batch,
            communication_s=merge,
            largest=largest,
        )
        sizes.append(period.mega_batch)
    return sizes


@given(
    merge_s=st.floats(1e-4, 1),
    sample_s=st.floats(1e-6, 1e-3),
    share=st.floats(0.01, 0.3),
    start=st.integers(10, 10_000),
)
def test_communication_takes_its_share_or_less(
    merge_s: float, sample_s: float, share: float, start: int
) -> None:
    sizes = run(MergePeriod("auto", start=start, share=share), merge_s=merge_s, sample_s=sample_s, num_rounds=30)
    taken = merge_s / (merge_s + sizes[-1] * sample_s)
    assert taken <= share * 1.06
    assert sizes[-1] == start or taken >= share * 0.94
    assert sizes[-1] == sizes[-2]
    for before, after in zip([start, *sizes], sizes, strict=False):
        assert before / 2 - 1 <= after <= before * 2 and after >= start


def test_a_period_returns_when_the_link_gets_faster() -> None:
    sizes = run(
        MergePeriod("auto", start=100, share=0.03),
        merge_s=lambda n: 1.0 if n < 20 else 0.01,
        sample_s=0.001,
        num_rounds=40,
    )
    assert sizes[19] == pytest.approx(32_333, abs=1) and sizes[-1] == pytest.approx(323, abs=1)


def test_one_slow_merge_changes_nothing() -> None:
    sizes = run(
        MergePeriod("auto", start=100, share=0.03),
        merge_s=lambda n: 5.0 if n == 10 else 0.01,
        sample_s=0.001,
        num_rounds=20,
    )
    assert len(set(sizes[4:])) == 1


@pytest.mark.parametrize("rule", ["fixed", "auto"])
def test_no_period_passes_the_largest_unless_it_starts_there(rule: str) -> None:
    slow: dict[str, Any] = {"merge_s": 100.0, "sample_s": 0.001, "num_rounds": 20}
    assert max(run(MergePeriod(rule, start=100, share=0.03), **slow, largest=1000)) <= 1000
    assert set(run(MergePeriod(rule, start=5000, share=0.03), **slow, largest=1000)) == {5000}


@pytest.mark.parametrize(
    ("num_updates", "part"),
    [
        ([5, 5], 1.0), ([50, 50, 50], 1.0), ([2.5, 2.5, 5, 10], 0.5), ([10, 10, 20, 40], 0.5),
        # The slow rank makes a step: rounds in which the fast one makes five would be 0.56 as long.
        ([1, 9], 1.0), ([1, 1, 8, 8], 0.9), ([0, 4], 1.0),
    ],
)  # fmt: skip
def test_short_rounds_of_ranks_that_differ_are_shorter(num_updates: list[float], part: float) -> None:
    assert part_of_short_rounds(np.array(num_updates), Config(), merges=1) == pytest.approx(part)


def test_rounds_with_merges_beside_steps_are_as_long_as_their_merges() -> None:
    config = Config(merges_per_round=8)
    assert part_of_short_rounds(np.array([24.0, 24.0]), config, merges=8) == pytest.approx(1.0)
    # Three steps of the fastest rank between two merges.
    assert part_of_short_rounds(np.array([18.0, 24.0]), config, merges=8) == pytest.approx(21 / 24)
    # One merge after five steps, where ranks are not alike.
    assert part_of_short_rounds(np.array([12.0, 24.0]), config, merges=1) == pytest.approx(5 / 24 * 18 / 24)
    assert are_alike(np.array([0.45, 0.55])) and not are_alike(np.array([0.4, 0.6]))


def test_a_period_follows_the_part_of_its_start_that_ranks_let_it() -> None:
    period = MergePeriod("auto", start=160, share=0.1)
    sizes = []
    for part in (1.0, 0.5, 0.5, 0.5, 1.0, 0.5, 1.0, 1.0):
        period.observe(num_samples=period.mega_batch, round_s=1.0, communication_s=0.0, largest=10**6, part=part)
        sizes.append(period.mega_batch)
    assert sizes == [160, 80, 80, 80, 80, 80, 160, 160]


def test_how_much_longer_than_the_shortest_a_round_would_be_is_told() -> None:
    """Merges of a second, at most a tenth of the time, beside samples of 10 ms: 900 samples."""
    period = MergePeriod("auto", start=80, share=0.1)
    for expected in (0.0, 450 / 40, 900 / 40, 900 / 40):
        period.observe(num_samples=80, round_s=1.8, communication_s=1.0, largest=10**6, part=0.5)
        assert period.stretch == pytest.approx(expected)


def test_the_share_is_told() -> None:
    period = MergePeriod("fixed", start=100, share=0.03)
    run(period, merge_s=1.0, sample_s=0.01, num_rounds=3)
    assert period.communication_share == pytest.approx(0.5)


def test_the_state_survives_a_restart() -> None:
    job: dict[str, Any] = {"merge_s": lambda n: 0.1 + 0.05 * (n % 2), "sample_s": 0.001, "num_rounds": 4}
    one, two = MergePeriod("auto", start=100, share=0.03), MergePeriod("auto", start=100, share=0.03)
    run(one, **job)
    two.load_state_dict(one.state_dict())
    assert run(one, **job) == run(two, **job)
    # What an older version measured says nothing of the ranks.
    two.load_state_dict({**one.state_dict(), "measured": np.ones((3, 2))})
    assert two.mega_batch == one.mega_batch
    run(two, **job)
    # A quarter of the ranks, each with as much work as before.
    two = MergePeriod("auto", start=25, share=0.03)
    two.load_state_dict(one.state_dict())
    assert two.mega_batch == round(one.mega_batch / 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (5 * 3 * 16, "auto", 0.1)), ({"merges_per_round": 4}, (4 * 3 * 3 * 16, "auto", 0.1)),
        ({"mega_batch": 700}, (700, None, 0.03)),
        ({"merge_period": "fixed"}, (800, "fixed", 0.03)), ({"merge_period": "auto"}, (5 * 3 * 16, "auto", 0.03)),
        ({"merge_period": "auto", "merge_share": 0.3}, (5 * 3 * 16, "auto", 0.3)),
        ({"mega_batch": 700, "merge_period": "auto"}, (700, "auto", 0.03)),
    ],
)  # fmt: skip
def test_short_rounds_are_for_who_has_set_no_period(options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = with_short_rounds(Config(batch_size=16, **options), 3, beside_steps=False)
    assert (config.mega_batch_samples, config.merge_period, config.merge_share) == expected


@pytest.mark.parametrize(
    ("options", "world_size", "merges"),
    [
        ({}, 2, 8), ({}, 1, None), ({"merges_per_round": 1}, 2, 1), ({"merges_per_round": 3}, 1, 3),
        ({"mega_batch": 700}, 2, None),
        ({"merge_period": "auto"}, 2, 8), ({"merge_period": "fixed"}, 2, None), ({"dispatch": "equal"}, 2, None),
        ({"record": True}, 2, None), ({"island": "2"}, 4, None), ({"optimizer_state": "average"}, 2, None),
        ({"merge_weights": "fisher-rows"}, 2, None), ({"outer_state": "host"}, 2, None), ({"outlier_limit": 3.0}, 2, 8),
    ],
)  # fmt: skip
def test_merges_go_beside_steps_where_nothing_speaks_against_it(
    options: dict[str, Any], world_size: int, merges: int | None
) -> None:
    config = with_short_rounds(Config(batch_size=16, **options), world_size, beside_steps=True)
    assert config.merges_per_round == merges
    if merges == 8:
        assert config.mega_batch == 8 * 3 * world_size * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merges_per_round": 0}, "merges_per_round must be > 0, got 0"),
        ({"merges_per_round": 2, "merge_fragments": 2}, "merges_per_round 2 needs merge_fragments 1, got 2"),
        ({"merges_per_round": 2, "merge_weights": "fisher-rows"}, "merges_per_round 2 needs merge_weights uniform or updates"),
        ({"merges_per_round": 2, "island": "2"}, "merges_per_round 2 needs no island, got '2'"),
        ({"merges_per_round": 2, "strategy": "sync"}, "merges_per_round 2 needs strategy local, got 'sync'"),
    ],
)
def test_what_does_not_go_with_merges_beside_steps_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)
