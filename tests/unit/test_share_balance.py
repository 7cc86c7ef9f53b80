"""Shares of a fixed batch: at the optimum within a few looks, still at equal ranks, whatever the noise, in virtual time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.algorithm.share_balance import Jitter, ShareBalance, StepWindow
from hvd_adaptive.algorithm.share_control import ShareControl
from hvd_adaptive.algorithm.speed_model import SpeedModel
from hvd_adaptive.config import Config

BATCH = 256
SLOWDOWN = np.array([8.0, 8, 4, 2])


class Ranks:
    """Ranks whose steps take a + c x samples seconds, times noise, and their controller."""

    def __init__(
        self, fixed: Any, per_sample: Any, *, jitter: float = 0.0, drift: float = 0.0, seed: int = 0, **options: Any
    ) -> None:
        self.fixed, self.per_sample = np.asarray(fixed, dtype=float), np.asarray(per_sample, dtype=float)
        self.jitter, self.drift, self.generator = jitter, drift, np.random.default_rng(seed)
        self.count = len(self.fixed)
        config = Config(strategy="sync", global_batch_size=BATCH, **options)
        self.control = ShareControl(config, self.count, global_batch_size=BATCH, smallest=1)
        self.step, self.num_looks, self.num_moves = 0, 0, 0
        self.seen: list[list[int]] = []

    def play(self, num_steps: int) -> float:
        """Plays steps; returns how many times as long as the best the last one would be without noise."""
        for _ in range(num_steps):
            shares = np.array(self.control.shares_at(self.step), dtype=float)
            self.seen.append(shares.tolist())
            assert shares.sum() == BATCH
            drift = np.exp(self.drift * self.generator.standard_normal(self.count))
            self.fixed, self.per_sample = self.fixed * drift, self.per_sample * drift
            noise = np.exp(self.jitter * self.generator.standard_normal(self.count))
            window = self.control.count(shares, (self.fixed + self.per_sample * shares) * noise)
            if window is not None:
                before = self.control.whole
                self.control.observe(window, step=self.step)
                self.num_looks += 1
                self.num_moves += not np.array_equal(before, self.control.whole)
            self.step += 1
        return float((self.fixed + self.per_sample * self.control.whole).max()) / self.best_s()

    def best_s(self) -> float:
        model = SpeedModel(self.count)
        for _ in range(20):
            for size in (50.0, 100.0):
                model.observe(np.ones(self.count), np.full(self.count, size), self.fixed + self.per_sample * size)
        shares = model.equalize(BATCH, np.ones(self.count), np.full(self.count, np.inf))
        return float((self.fixed + self.per_sample * shares).max())


# The fixed part of an equal share's step.
OVERHEADS = {"none": 0.0, "a tenth": 0.7, "a half": 6.4, "four fifths": 25.6}


@pytest.mark.parametrize("overhead", OVERHEADS.values(), ids=OVERHEADS)
def test_the_optimum_is_found_within_three_looks(overhead: float) -> None:
    ranks = Ranks(overhead * 0.1 * SLOWDOWN, 0.1 * SLOWDOWN)
    before = ranks.play(1)
    assert before > 1.1
    while ranks.num_looks < 3:
        after = ranks.play(1)
    assert ranks.step <= 32 and after < 1.1, (before, after, ranks.control.whole.tolist())
    assert ranks.play(60) < 1.05 and ranks.play(200) < 1.04 and ranks.num_moves <= 4


@pytest.mark.parametrize("overhead", OVERHEADS.values(), ids=OVERHEADS)
def test_jitter_and_drift_do_not_keep_it_from_the_optimum(overhead: float) -> None:
    worst, moves = [], []
    for seed in range(12):
        ranks = Ranks(overhead * 0.1 * SLOWDOWN, 0.1 * SLOWDOWN, jitter=0.1, drift=0.002, seed=seed)
        worst.append([ranks.play(20), ranks.play(40), *(ranks.play(20) for _ in range(10))])
        moves.append(ranks.num_moves)
    typical = np.median(worst, axis=0)
    assert typical[0] < 1.15 and typical[1] < 1.12 and (typical[2:] < 1.05).all(), typical.round(3)
    # No swinging to and fro.
    assert np.mean(moves) < 5


@pytest.mark.parametrize(("count", "jitter"), [(4, 0.0), (4, 0.1), (4, 0.3), (16, 0.1), (16, 0.3)])
def test_equal_ranks_keep_equal_shares_through_noise(count: int, jitter: float) -> None:
    moves, slower = [], []
    for seed in range(10):
        ranks = Ranks(np.ones(count), np.full(count, 0.1), jitter=jitter, seed=seed)
        slower.append(ranks.play(400))
        moves.append(ranks.num_moves)
    assert np.mean(moves) <= 1 and np.mean(slower) < 1.03, (moves, slower)


@pytest.mark.parametrize(("jitter", "most"), [(0.3, 1.15), (0.6, 1.4)])
def test_a_step_of_one_sample_does_not_make_an_equal_one_seem_long(jitter: float, most: float) -> None:
    beliefs, costs = [], []
    for seed in range(5):
        ranks = Ranks(0.07 * 64 * SLOWDOWN, 0.07 * SLOWDOWN, jitter=jitter, seed=seed)
        costs.append(np.mean([ranks.play(10) for _ in range(40)][10:]))
        mean = np.exp(jitter**2 / 2)
        beliefs.append((ranks.control.equal_share_s / (mean * 0.07 * 128 * SLOWDOWN)).max())
    assert np.median(beliefs) < 1.5 and max(beliefs) < 2.5, np.round(beliefs, 2)
    assert np.median(costs) < most, np.round(costs, 2)


def test_a_difference_that_only_the_first_steps_showed_is_forgotten() -> None:
    ranks = Ranks([6.0, 6.0], [0.03, 0.03], jitter=0.05)
    ranks.fixed[1] = 14.0
    ranks.play(6)
    ranks.fixed[1] = 6.0
    ranks.play(40)
    assert ranks.play(400) == 1.0, ranks.control.whole
    # What is certain is not tried again.
    ranks = Ranks(0.7 * SLOWDOWN, 0.1 * SLOWDOWN, jitter=0.05)
    ranks.play(600)
    assert np.max(ranks.seen[60:], axis=1).min() > 80


def test_a_share_at_most_doubles_at_once() -> None:
    ranks = Ranks(np.zeros(4), [1.0, 1.0, 1.0, 0.01])
    ranks.play(200)
    fastest = np.array(ranks.seen)[:, 3]
    assert fastest[-1] > 240 and (fastest[1:] <= 2 * fastest[:-1] + 1).all()


def test_a_change_of_speeds_is_followed_within_a_few_steps_of_its_look() -> None:
    ranks = Ranks(0.64 * SLOWDOWN, 0.1 * SLOWDOWN, jitter=0.03)
    assert ranks.play(100) < 1.06
    ranks.fixed, ranks.per_sample = ranks.fixed[::-1].copy(), ranks.per_sample[::-1].copy()
    ranks.play(32 + 1)
    assert ranks.play(30) < 1.1


def test_new_shares_hold_from_the_step_after_the_next() -> None:
    ranks = Ranks(np.zeros(4), 0.1 * SLOWDOWN)
    ranks.play(20)
    # One step that is not measured, four that are, one whose batch is there already.
    assert ranks.seen[5] == ranks.seen[0] == [64] * 4 and ranks.seen[6] == [32, 32, 64, 128]
    assert ranks.control.shares_at(5) == [64] * 4
    ranks.control.begin_round()
    assert ranks.control.shares_at(0) == [32, 32, 64, 128]


def test_what_cannot_be_gained_moves_nothing() -> None:
    """A rank that needs longer for one sample than the others for all: any shares of the others are as good."""
    ranks = Ranks([100.0, 0.1, 0.1], [1.0, 0.01, 0.01], jitter=0.02)
    ranks.play(60)
    moves = ranks.num_moves
    ranks.play(400)
    assert ranks.num_moves == moves and ranks.control.whole[0] == 1


@pytest.mark.parametrize(("rule", "expected"), [("static", [32, 32, 64, 128]), ("fixed", [64, 64, 64, 64])])
def test_rules_that_do_not_follow(rule: str, expected: list[float]) -> None:
    ranks = Ranks(np.zeros(4), 0.1 * SLOWDOWN, batch_size_rule=rule)
    ranks.play(34)
    ranks.per_sample = ranks.per_sample[::-1].copy()
    ranks.play(100)
    assert ranks.control.whole.tolist() == expected and ranks.num_looks == (rule == "static")


def test_shares_stay_within_a_ranks_bounds() -> None:
    ranks = Ranks(np.zeros(4), [100.0, 1, 1, 0.25], min_batch_size=20, max_batch_size=120)
    ranks.play(100)
    assert ranks.control.whole.min() == 20 and ranks.control.whole.max() == 120


def test_a_state_goes_on_where_it_was() -> None:
    for rule in ("proportional", "static"):
        ranks, other = (Ranks(0.64 * SLOWDOWN, 0.1 * SLOWDOWN, batch_size_rule=rule) for _ in range(2))
        ranks.play(200)
        other.control.load_state_dict(ranks.control.state_dict())
        other.control.begin_round()
        assert other.control.whole.tolist() == ranks.control.whole.tolist()
        other.play(40)
        assert other.num_moves == 0 and bool(other.num_looks) == (rule == "proportional")


def test_the_error_of_a_window_is_that_of_its_mean_by_all_windows() -> None:
    generator, window, jitter = np.random.default_rng(0), StepWindow(), Jitter(2)
    for _ in range(400):
        window.add(np.array([8, 8]), np.array([1.0, 2.0]) * generator.normal(1, [0.2, 0.1]))
    assert jitter.errors(window) == pytest.approx([0.2 / 20, 0.1 / 20], rel=0.1)
    few = StepWindow.gathered(np.array([[4, 40, 2, 1.0], [4, 80, 2, 1.0]]))
    assert (few.variances() == 0).all() and jitter.errors(few) == pytest.approx([0.2 / 2, 0.1 / 2], rel=0.1)
    # Before anything else was seen, steps that agree prove little.
    assert (Jitter(2).errors(few) > 0.05).all()
    rows = np.array([[4, 40, 2, 1.0], [4, 80, 2, 1.5]])
    gathered = StepWindow.gathered(rows)
    assert gathered.num_samples.tolist() == [40, 80] and gathered.variances() == pytest.approx([0, 0.125 / 0.25 * 4 / 3])
    one = StepWindow(*rows[0])
    assert one.vector().tolist() == rows[0].tolist() and dataclasses.astuple(one) == (4, 40, 2, 1)


def test_noise_of_a_fast_rank_does_not_hide_a_slow_one() -> None:
    balance, sizes = ShareBalance(3), np.full(3, 20.0)
    # Every second step of the last rank is held up; then every second one of the slowest.
    quiet, held_up = np.array([1.0, 2, 0.2]), np.array([1.0, 2, 1.0])
    window = StepWindow()
    for seconds in (quiet, held_up) * 2:
        window.add(sizes, seconds)
    balance.learn(StepWindow(np.full(3, 4.0), window.num_samples, window.seconds, window.squares))
    assert balance.next(sizes, lower=np.ones(3), upper=np.full(3, 60.0))[1] < 13
    balance, window = ShareBalance(3), StepWindow()
    for seconds in (np.array([1.0, 0.5, 1]), np.array([1.0, 3, 1])) * 2:
        window.add(sizes, seconds)
    balance.learn(StepWindow(np.full(3, 4.0), window.num_samples, window.seconds, window.squares))
    assert balance.next(sizes, lower=np.ones(3), upper=np.full(3, 60.0)).tolist() == [20, 20, 20]


def test_looks_that_agree_move_shares_which_each_of_them_leaves_within_its_noise() -> None:
    costs = []
    for seed in range(8):
        balance, generator = ShareBalance(2), np.random.default_rng(seed)
        # The first rank is three times as fast, and has a ninth more than its part.
        sizes, speeds = np.array([90.0, 18.0]), np.array([3.0, 1.0])
        for look in range(60):
            window = StepWindow()
            for _ in range(10):
                window.add(sizes, sizes / speeds * generator.lognormal(0, 0.3, 2))
            balance.learn(StepWindow(np.full(2, 10.0), window.num_samples, window.seconds, window.squares))
            sizes = balance.next(sizes, lower=np.ones(2), upper=np.full(2, 108.0))
            if look >= 30:
                costs.append((sizes / speeds).max() / 27)
    assert np.mean(costs) < 1.04, np.mean(costs)


def test_equal_shares_are_preferred_where_others_save_little_and_gone_back_to() -> None:
    ranks = Ranks(np.ones(4), [0.1, 0.1, 0.1, 0.102], jitter=0.02)
    ranks.play(200)
    assert ranks.num_moves == 0
    ranks.per_sample[3] = 0.2
    ranks.play(100)
    assert ranks.control.whole[3] < 50
    # It is nearly as fast as the others again.
    ranks.per_sample[3] = 0.103
    ranks.play(200)
    assert ranks.control.whole.tolist() == [64] * 4


def test_a_new_bound_is_obeyed_at_once() -> None:
    balance, sizes = ShareBalance(2), np.array([10.0, 10])
    window = StepWindow.gathered(np.array([[4, 40, 4, 4.0], [4, 40, 4, 4.0]]))
    balance.learn(window)
    assert balance.next(sizes, lower=np.ones(2), upper=np.full(2, 20.0)).tolist() == [10, 10]
    assert balance.next(sizes, lower=np.ones(2), upper=np.array([8.0, 20])).tolist() == [8, 12]
