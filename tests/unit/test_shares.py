"""Shares of a global batch: sums, bounds, and that a round's parts are every row once, in step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_adaptive.algorithm.shares import cut_round, integer_shares, stub_shares


def random_cases(count: int) -> list[tuple[list[float], int, int, list[int] | None]]:
    generator = np.random.default_rng(0)
    cases = []
    for _ in range(count):
        num_ranks = int(generator.integers(1, 9))
        targets = (generator.exponential(size=num_ranks) ** 3 * (generator.random(num_ranks) > 0.1)).tolist()
        lower = int(generator.integers(0, 4))
        upper = None if generator.random() < 0.5 else generator.integers(lower, 60, num_ranks).tolist()
        most = 300 if upper is None else sum(upper)
        if most >= num_ranks * lower:
            cases.append((targets, int(generator.integers(num_ranks * lower, most + 1)), lower, upper))
    return cases


def test_shares_add_up_within_their_bounds() -> None:
    for targets, total, lower, upper in random_cases(2000):
        shares = integer_shares(targets, total, lower=lower, upper=upper)
        assert sum(shares) == total
        assert min(shares) >= lower
        assert upper is None or all(s <= u for s, u in zip(shares, upper, strict=True))
        assert shares == integer_shares([3 * t for t in targets], total, lower=lower, upper=upper)


def test_shares_are_their_exact_proportion_rounded_where_no_bound_binds() -> None:
    checked = 0
    for targets, total, lower, upper in random_cases(2000):
        if not sum(targets):
            continue
        exact = [total * t / sum(targets) for t in targets]
        if min(exact) >= lower and all(x <= u for x, u in zip(exact, upper or [total] * len(exact), strict=True)):
            shares = integer_shares(targets, total, lower=lower, upper=upper)
            assert all(abs(s - x) < 1 for s, x in zip(shares, exact, strict=True))
            checked += 1
    assert checked > 200


def test_more_target_is_never_fewer_samples() -> None:
    for targets, total, lower, _ in random_cases(500):
        shares = integer_shares(targets, total, lower=lower)
        order = sorted(range(len(targets)), key=lambda r: targets[r])
        assert all(shares[a] <= shares[b] + (targets[a] == targets[b]) for a, b in itertools.pairwise(order))


def test_what_a_bound_takes_is_spread_in_proportion() -> None:
    assert integer_shares([1, 1, 2, 4], 80) == [10, 10, 20, 40]
    assert integer_shares([1, 1, 2, 4], 80, upper=[80, 80, 80, 20]) == [15, 15, 30, 20]
    assert integer_shares([0, 1, 3], 82, lower=2) == [2, 20, 60]
    assert integer_shares([0, 0, 0], 7) == [3, 2, 2]
    # Settling the cap raises the first rank above its lower bound again.
    assert integer_shares([1, 9, 90], 100, lower=5, upper=[100, 100, 40]) == [6, 54, 40]


@pytest.mark.parametrize(
    ("targets", "total", "lower", "upper", "message"),
    [
        ([1, 1], 5, 3, None, "5 samples cannot be split over 2 ranks with at least 3 samples each"),
        ([1, 1], 5, 1, [2, 2], r"at least 1 and at most \[2, 2\]"),
        ([1, -1], 5, 1, None, "targets must be finite numbers >= 0"),
        ([1, float("nan")], 5, 1, None, "targets must be finite"),
        ([], 5, 1, None, "one a rank"),
    ],
)
def test_what_cannot_be_split_is_refused(
    targets: list[float], total: int, lower: int, upper: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        integer_shares(targets, total, lower=lower, upper=upper)


def test_a_small_batch_goes_to_whom_it_is_enough_for() -> None:
    assert stub_shares([5, 5, 10, 20], 8, lower=1) == [1, 1, 2, 4]
    assert stub_shares([5, 5, 10, 20], 2, lower=1) == [0, 0, 1, 1]
    assert stub_shares([5, 5, 10, 20], 5, lower=2) == [0, 0, 2, 3]
    assert stub_shares([5, 5], 1, lower=2) == [1, 0]


@pytest.mark.parametrize("num_rows", [1, 3, 40, 41, 47, 79, 120])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
@pytest.mark.parametrize("smallest", [1, 2])
def test_a_rounds_parts_are_every_row_once_and_in_step(num_rows: int, num_micro_batches: int, smallest: int) -> None:
    shares = [6, 7, 9, 18]
    ranks = [
        list(
            cut_round(
                num_rows, total=40, shares_at=lambda _: shares, rank=rank, num_micro_batches=num_micro_batches, smallest=smallest
            )
        )
        for rank in range(4)
    ]
    rows = [row for parts in ranks for part in parts for row in range(part.start, part.stop)]
    assert sorted(rows) == list(range(num_rows))
    num_steps = -(-num_rows // 40)
    for parts in ranks:
        assert [part.ends_step for part in parts] == ([False] * (num_micro_batches - 1) + [True]) * num_steps
        # What is not empty is large enough, where there are so many rows.
        assert all(part.start == part.stop or part.stop - part.start >= min(smallest, num_rows) or num_rows % 40 == 1
                   for part in parts)  # fmt: skip
    for step in range(num_steps):
        window = slice(step * num_micro_batches, (step + 1) * num_micro_batches)
        assert sum(part.weight for parts in ranks for part in parts[window]) == pytest.approx(1)
        bounds = {(part.batch_start, part.batch_stop) for parts in ranks for part in parts[window]}
        assert bounds == {(40 * step, min(40 * step + 40, num_rows))}
        whole = bounds == {(40 * step, 40 * step + 40)}
        if whole:
            assert [sum(p.stop - p.start for p in parts[window]) for parts in ranks] == shares
            assert all(part.start < part.stop for parts in ranks for part in parts[window])


def test_shares_that_change_within_a_round_lose_no_row() -> None:
    generator = np.random.default_rng(0)
    shares = [integer_shares(generator.exponential(size=3).tolist(), 20) for _ in range(6)]
    ranks = [list(cut_round(117, total=20, shares_at=shares.__getitem__, rank=rank)) for rank in range(3)]
    assert sorted(row for parts in ranks for p in parts for row in range(p.start, p.stop)) == list(range(117))
    assert [[parts[step].stop - parts[step].start for parts in ranks] for step in range(5)] == shares[:5]
