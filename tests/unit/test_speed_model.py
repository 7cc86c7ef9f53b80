"""The model of a rank's step time, and batch sizes by it: exact, equivariant, stable under noise, quick after a jump."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.algorithm.speed_model import Damping, SpeedModel


@st.composite
def ranks(draw: Any) -> dict[str, np.ndarray]:
    """Ranks with a fixed part and a cost of work each, observed at two batch sizes."""
    count = draw(st.integers(1, 6))
    column = lambda low, high: np.array(draw(st.lists(st.floats(low, high), min_size=count, max_size=count)))  # noqa: E731
    return {"fixed": column(0, 0.5), "per_work": column(0.02, 2), "work": column(1, 100)}


def trained(fixed: np.ndarray, per_work: np.ndarray, work: np.ndarray) -> SpeedModel:
    model = SpeedModel(len(fixed))
    for factor in (1.0, 0.9, 1.15, 1.0, 0.8):
        observe(model, fixed, per_work, factor * work)
    return model


def observe(
    model: SpeedModel, fixed: np.ndarray, per_work: np.ndarray, batch: np.ndarray, noise: Any = 1.0
) -> None:
    num_steps = np.full(len(batch), 10.0)
    model.observe(num_steps, num_steps * batch, num_steps * (fixed + per_work * batch) * noise)


@given(case=ranks(), fraction=st.floats(0, 1), low=st.floats(0, 1), high=st.floats(1, 3))
def test_equal_step_times_within_the_bounds(
    case: dict[str, np.ndarray], fraction: float, low: float, high: float
) -> None:
    model = trained(**case)
    lower, upper = low * case["work"], high * case["work"]
    total = lower.sum() + fraction * (upper.sum() - lower.sum())
    batches = model.equalize(total, lower, upper)
    assert batches.sum() == pytest.approx(total)
    assert (batches >= lower).all() and (batches <= upper).all()
    seconds = model.seconds(batches)
    free = (batches > lower * (1 + 1e-9)) & (batches < upper * (1 - 1e-9))
    if free.any():
        common = seconds[free].mean()
        assert seconds[free] == pytest.approx(np.full(free.sum(), common), rel=1e-6)
        # A rank at its bound would like to go further: at its most it is the quicker one, at its least the slower.
        at_upper, at_lower = batches >= upper * (1 - 1e-9), batches <= lower * (1 + 1e-9)
        assert (seconds[at_upper & ~at_lower] <= common * (1 + 1e-6)).all()
        assert (seconds[at_lower & ~at_upper] >= common * (1 - 1e-6)).all()


@given(case=ranks(), seed=st.integers(0, 100))
def test_batches_follow_a_permutation_of_the_ranks(case: dict[str, np.ndarray], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(case["work"]))
    lower, upper = 0.2 * case["work"], 3 * case["work"]
    batches = trained(**case).equalize(case["work"].sum(), lower, upper)
    permuted = trained(**{name: values[order] for name, values in case.items()})
    assert permuted.equalize(case["work"].sum(), lower[order], upper[order]) == pytest.approx(batches[order])


def test_bounds_may_be_infinite_and_equal() -> None:
    model = trained(np.array([0.1, 0.1, 0.2]), np.array([0.1, 0.2, 0.1]), np.full(3, 10.0))
    free = model.equalize(30.0, np.zeros(3), np.full(3, np.inf))
    assert np.ptp(model.seconds(free)) < 1e-9
    assert model.equalize(30.0, np.full(3, 10.0), np.full(3, 10.0)).tolist() == [10, 10, 10]
    assert model.equalize(3.0, np.ones(3), np.full(3, np.inf)).tolist() == [1, 1, 1]
    assert model.equalize(6.0, np.ones(3), np.full(3, 2.0)).tolist() == [2, 2, 2]
    capped = model.equalize(30.0, np.zeros(3), np.array([4.0, np.inf, 4.0]))
    assert capped.tolist() == pytest.approx([4, 22, 4])


def test_bounds_without_room_are_named() -> None:
    model = SpeedModel(2)
    with pytest.raises(ValueError, match=r"got 10.0 outside \[2.0, 8.0\]"):
        model.equalize(10.0, np.ones(2), np.full(2, 4.0))
    with pytest.raises(ValueError, match=r"got 1.0 outside \[2.0, 8.0\]"):
        model.equalize(1.0, np.ones(2), np.full(2, 4.0))
    with pytest.raises(ValueError, match=r"rank 1: lower must be <= upper, got 5\.0 > 4\.0"):
        model.equalize(8.0, np.array([1.0, 5]), np.full(2, 4.0))


def test_two_batch_sizes_tell_the_fixed_part_from_the_cost_of_work() -> None:
    fixed, per_work = np.array([0.02, 0.0, 0.005]), np.array([0.001, 0.002, 0.0005])
    model = SpeedModel(3, forgetting=1.0)
    for turn in range(40):
        observe(model, fixed, per_work, np.full(3, 64.0 if turn % 2 else 48.0))
    assert model.coefficients()[0] == pytest.approx(fixed, abs=1e-3)
    assert model.seconds(np.full(3, 128.0)) == pytest.approx(fixed + per_work * 128, rel=0.02)


def test_one_batch_size_is_the_ratio_and_winds_nothing_up() -> None:
    generator = np.random.default_rng(0)
    fixed, per_work, batch = np.array([0.05, 0.0]), np.array([0.001, 0.004]), np.full(2, 64.0)
    model = SpeedModel(2)
    for _ in range(2000):
        observe(model, fixed, per_work, batch, noise=1 + 0.03 * generator.standard_normal(2))
    a, c = model.coefficients()
    assert a == pytest.approx(np.zeros(2), abs=1e-6)
    assert model.seconds(batch) == pytest.approx(fixed + per_work * batch, rel=0.1)
    assert c * 64 == pytest.approx(model.seconds(batch))
    variance = np.trace(model.state_dict()["covariance"], axis1=1, axis2=2) / model.seconds(batch) ** 2
    assert (variance < 0.25).all()
    observe(model, fixed, per_work, 1.25 * batch)
    assert model.seconds(1.25 * batch) == pytest.approx(fixed + per_work * 1.25 * batch, rel=0.1)


def test_a_jump_of_speed_is_believed_at_once_and_a_hiccup_forgotten_at_once() -> None:
    fixed, per_work = np.array([0.01, 0.01]), np.array([0.001, 0.001])
    model = trained(fixed, per_work, np.full(2, 60.0))
    before, known = model.coefficients(), model.state_dict()["covariance"][1]
    observe(model, fixed, per_work, np.full(2, 60.0), noise=np.array([1, 3.0]))
    after = model.coefficients()
    assert model.seconds(np.full(2, 60.0)) == pytest.approx([0.07, 0.21], rel=0.02)
    # As a whole, and with what is known of one part against the other.
    assert after[0][1] / after[1][1] == pytest.approx(before[0][1] / before[1][1])
    ratio = after[1][1] / before[1][1]
    assert model.state_dict()["covariance"][1][0, 0] == pytest.approx(known[0, 0] * ratio**2, rel=0.5)
    observe(model, fixed, per_work, np.full(2, 60.0))
    assert model.seconds(np.full(2, 30.0)) == pytest.approx(fixed + per_work * 30, rel=0.1)


def test_a_drift_of_speed_is_followed() -> None:
    model = SpeedModel(1)
    for turn in range(40):
        observe(model, np.zeros(1), np.full(1, 0.001 * 1.02**turn), np.full(1, 64.0))
    assert model.seconds(np.ones(1)) == pytest.approx([0.001 * 1.02**39], rel=0.05)


@given(
    seed=st.integers(0, 10_000),
    size=st.lists(st.floats(1, 200), min_size=5, max_size=30),
    noise=st.floats(0, 0.8),
)
def test_whatever_is_observed_times_stay_positive(seed: int, size: list[float], noise: float) -> None:
    generator = np.random.default_rng(seed)
    model = SpeedModel(1)
    for batch in size:
        observe(model, np.zeros(1), np.ones(1), np.array([batch]), noise=np.exp(noise * generator.standard_normal(1)))
        a, c = model.coefficients()
        assert np.isfinite(a).all() and np.isfinite(c).all() and (a >= 0).all() and (c > 0).all()


def test_a_rank_without_an_observation_counts_as_the_slowest() -> None:
    model = SpeedModel(3)
    assert model.seconds(np.full(3, 8.0)).tolist() == [8, 8, 8]
    model.observe(np.array([10.0, 0, 10]), np.array([100.0, 0, 100]), np.array([1.0, 0, 4]))
    assert model.seconds(np.full(3, 10.0)) == pytest.approx([0.1, 0.4, 0.4])
    assert model.observed.tolist() == [True, False, True]


def test_the_state_survives_a_restart() -> None:
    case = {"fixed": np.array([0.1, 0.2]), "per_work": np.array([0.1, 0.3]), "work": np.array([5.0, 9.0])}
    model, other = trained(**case), SpeedModel(2)
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        observe(each, case["fixed"], case["per_work"], np.array([7.0, 7.0]))
    assert np.array_equal(model.seconds(case["work"]), other.seconds(case["work"]))
    with pytest.raises(ValueError, match="state must be of 3 ranks, got 2"):
        SpeedModel(3).load_state_dict(model.state_dict())


class Loop:
    """The controller on simulated ranks: observe, equalize, damp."""

    def __init__(self, fixed: np.ndarray, per_work: np.ndarray, *, noise: float, seed: int) -> None:
        self.fixed, self.per_work, self.noise = fixed, per_work, noise
        self.generator = np.random.default_rng(seed)
        self.sizes = np.full(len(fixed), 64.0)
        self.model, self.damping = SpeedModel(len(fixed)), Damping(len(fixed))

    def round(self) -> float:
        """One round; returns how much of the mean rank's time is spent waiting for the slowest step."""
        noise = np.exp(self.noise * self.generator.standard_normal(len(self.sizes)))
        observe(self.model, self.fixed, self.per_work, self.sizes, noise=noise)
        lower, upper = np.full(len(self.sizes), 4.0), np.full(len(self.sizes), 512.0)
        target = self.model.equalize(64.0 * len(self.sizes), lower, upper)
        before = self.sizes
        self.sizes = self.damping.next(self.sizes, target, lower=lower, upper=upper)
        assert self.sizes.sum() == pytest.approx(64.0 * len(self.sizes))
        assert (np.abs(self.sizes / before - 1) <= 0.25 + 1e-9).all()
        return self.imbalance()

    def imbalance(self) -> float:
        seconds = self.fixed + self.per_work * self.sizes
        return float(np.abs(seconds / seconds.mean() - 1).max())


@pytest.mark.parametrize("overhead", [0.0, 0.02])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_steps_become_equal_within_eight_rounds_and_within_ten_after_a_jump(overhead: float, noise: float) -> None:
    worst: list[list[float]] = []
    for seed in range(20):
        loop = Loop(np.full(4, overhead), np.array([4.0, 4, 2, 1]) / 1000, noise=noise, seed=seed)
        before = [loop.round() for _ in range(30)]
        loop.per_work, loop.fixed = loop.per_work[::-1].copy(), loop.fixed[::-1].copy()
        worst.append([*before, *(loop.round() for _ in range(30))])
    typical = np.median(np.array(worst), axis=0)
    assert (typical[8:30] < 0.05).all() and (typical[40:] < 0.05).all(), typical.round(3)


def test_equal_ranks_keep_their_sizes_whatever_the_noise() -> None:
    moves = 0
    for seed in range(20):
        loop = Loop(np.full(4, 0.01), np.full(4, 0.001), noise=0.02, seed=seed)
        for _ in range(50):
            before = loop.sizes
            loop.round()
            moves += not np.array_equal(before, loop.sizes)
    assert moves <= 10
    quiet = Loop(np.full(4, 0.01), np.full(4, 0.001), noise=0.0, seed=0)
    for _ in range(10):
        quiet.round()
    assert quiet.sizes.tolist() == [64.0] * 4


BOUNDS = {"lower": np.full(2, 1.0), "upper": np.full(2, 100.0)}


def test_the_damping_waits_for_three_on_one_side() -> None:
    damping, sizes = Damping(2), np.array([10.0, 10])
    up, down, near = np.array([11.0, 9]), np.array([9.0, 11]), np.array([10.4, 9.6])
    for target in (up, up, down, up, up, near, up, up):
        assert damping.next(sizes, target, **BOUNDS).tolist() == [10, 10]
    assert damping.next(sizes, up, **BOUNDS).tolist() == [11, 9]


def test_the_damping_moves_at_once_for_a_large_change_but_by_a_quarter_only() -> None:
    damping, sizes = Damping(2), np.array([10.0, 30])
    moved = damping.next(sizes, np.array([20.0, 20]), **BOUNDS)
    assert moved.tolist() == [12.5, 27.5]
    moved = damping.next(moved, np.array([18.0, 22]), **BOUNDS)
    assert moved.tolist() == [12.5, 27.5]
    assert damping.next(moved, np.array([16.0, 24]), **BOUNDS).tolist() == pytest.approx([15.625, 24.375])


def test_a_new_bound_or_another_total_is_obeyed_at_once() -> None:
    damping = Damping(2)
    upper = np.array([8.0, 100])
    assert damping.next(np.array([10.0, 10]), np.array([8.0, 12]), lower=np.ones(2), upper=upper).tolist() == [8, 12]
    assert damping.next(np.array([10.0, 10]), np.array([9.0, 9]), **BOUNDS).tolist() == [9, 9]


@given(
    sizes=st.lists(st.floats(5, 50), min_size=2, max_size=5).map(np.array),
    seed=st.integers(0, 1000),
    rounds=st.integers(1, 6),
)
def test_the_damping_keeps_the_sum_and_follows_permutations(
    sizes: np.ndarray, seed: int, rounds: int
) -> None:
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(sizes))
    bounds = {"lower": np.full(len(sizes), 1.0), "upper": np.full(len(sizes), 1000.0)}
    one, two, ours, theirs = Damping(len(sizes)), Damping(len(sizes)), sizes, sizes[order]
    for _ in range(rounds):
        target = sizes * generator.uniform(0.5, 2, len(sizes))
        target *= sizes.sum() / target.sum()
        after, permuted = one.next(ours, target, **bounds), two.next(theirs, target[order], **bounds)
        assert permuted == pytest.approx(after[order])
        assert after.sum() == pytest.approx(sizes.sum())
        assert (np.abs(after / ours - 1) <= 0.25 + 1e-9).all()
        ours, theirs = after, permuted


def test_the_damping_survives_a_restart() -> None:
    damping, other, sizes, up = Damping(2), Damping(2), np.array([10.0, 10]), np.array([11.0, 9])
    damping.next(sizes, up, **BOUNDS)
    damping.next(sizes, up, **BOUNDS)
    other.load_state_dict(damping.state_dict())
    assert other.next(sizes, up, **BOUNDS).tolist() == [11, 9]
