"""Shares of a batch that all ranks compute together, moved until all ranks take equally long for theirs.

The sum of the gradients is the same whatever the shares, so a large move harms nothing but the time of the steps until the
next look, which comes soon after one. What holds moves back is the noise of what was measured, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.algorithm.speed_model import SpeedModel
from hvd_adaptive.algorithm.statistics import Array, Statistics


@dataclass(slots=True)
class StepWindow(Statistics):
    """The steps between two looks at the ranks' speeds: of one rank as numbers, or of all as arrays, shape (world_size,).

    Attributes:
        num_steps: steps measured, equal on all ranks.
        num_samples: samples in them.
        seconds: their seconds, without those of waiting for other ranks.
        squares: the sum of each step's seconds squared.
    """

    num_steps: Any = 0.0
    num_samples: Any = 0.0
    seconds: Any = 0.0
    squares: Any = 0.0

    def add(self, num_samples: Any, seconds: Any) -> None:
        """Counts a step."""
        self.num_steps = self.num_steps + 1.0
        self.num_samples = self.num_samples + num_samples
        self.seconds = self.seconds + seconds
        self.squares = self.squares + seconds * seconds

    @classmethod
    def gathered(cls, vectors: Array) -> StepWindow:
        """Returns the window of all ranks from their vectors, shape (world_size, 4)."""
        return cls(*vectors.T)

    def variances(self) -> Array:
        """Returns the variance of each rank's seconds a step, relative to their mean's square, shape (world_size,)."""
        mean = np.maximum(self.seconds / self.num_steps, 1e-12)
        variance = np.maximum(self.squares / self.num_steps / mean**2 - 1.0, 0.0)
        return np.asarray(variance * self.num_steps / np.maximum(self.num_steps - 1.0, 1.0))


class Jitter:
    """How much the seconds of a rank's steps vary, by all windows, the last ones most.

    A few steps in a row often agree by chance, or because all of them were held up by the same thing: what they show of it alone
    would make them look sure.

    Args:
        world_size: number of ranks.
    """

    # Relative standard deviation of a step before any was seen, and how many steps that counts as.
    EXPECTED, EXPECTED_STEPS = 0.2, 8.0
    # What counts of the windows before.
    KEPT = 0.7
    # Times what was known that a window's variance may count later: one in which a rank's speed changed shows no jitter.
    MOST = 4.0

    def __init__(self, world_size: int) -> None:
        self._steps = np.full(world_size, self.EXPECTED_STEPS)
        self._squares = self.EXPECTED**2 * self._steps

    def errors(self, window: StepWindow) -> Array:
        """Takes in a window; returns the relative standard error of each rank's mean seconds a step, shape (world_size,)."""
        seen = window.variances()
        lasting = np.minimum(seen, self.MOST * self._squares / self._steps)
        self._squares = self.KEPT * self._squares + lasting * window.num_steps
        self._steps = self.KEPT * self._steps + window.num_steps
        return np.sqrt(np.maximum(seen, self._squares / self._steps) / window.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes."""
        return {"squares": self._squares.copy(), "steps": self._steps.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of another one of as many ranks."""
        self._squares = np.array(state["squares"], dtype=np.float64)
        self._steps = np.array(state["steps"], dtype=np.float64)


class ShareBalance:
    """Each rank's samples of a batch of fixed size, by a model of the ranks' steps.

    Shares go all the way to where the model expects steps of equal length, though none more than doubles at once, if steps become
    shorter by more than 15%, or by more than 3% in the third look in a row. They do not for what is within the noise of a look,
    unless six looks in a row find one rank the slowest: then they go to the mean of what these wanted. What counts is the step
    that all wait for, not the shares: ranks whose steps cost more than their samples can have any share. Equal shares
    need no weights, so they are preferred to others that would save less than 5%. Where unequal ones save less than a third,
    equal ones are tried again for a look now and then, more and more seldom: that the ranks differ may have been a chance of the
    first steps, and as long as shares stay what they are, nothing else would show it.

    Args:
        world_size: number of ranks.

    Attributes:
        is_sure: more than one look speaks for what :meth:`next` has returned.
        is_trial: it has returned equal shares to try them for a look.
    """

    DEAD_BAND = 0.03
    PATIENCE = 3
    # Looks that say together what one alone may say by chance.
    TOGETHER = 6
    # Steps in them that make it sure: the first looks are short.
    STEPS_TOGETHER = 100
    AT_ONCE = 0.15
    # Standard errors of the slowest rank's mean; half as many again where there is no second look.
    NOISE = 1.6
    # What multiplying all gradients may cost, of a step.
    WEIGHTING = 0.05
    # Times a share may grow at once: what far more samples cost can only be guessed, and a wrong guess makes all wait.
    GROWTH = 2.0
    # Looks at the same unequal shares until equal ones are tried, twice as many each time; and up to which saving they are.
    FIRST_TRIAL = 4
    DOUBTFUL = 1 / 3

    def __init__(self, world_size: int) -> None:
        self._model = SpeedModel(world_size)
        self._jitter = Jitter(world_size)
        # Of the last window.
        self._errors = np.zeros(world_size)
        # Looks in a row that would have moved.
        self._in_a_row = 0
        # Looks in a row that found one rank the slowest, by noise or not; which one; the sum of their targets.
        self._num_agreed, self._slowest, self._targets = 0, -1, np.zeros(world_size)
        self._num_steps = self._agreed_steps = 0.0
        self._looks_to_trial = self._trial_interval = self.FIRST_TRIAL
        self.is_trial = self.is_sure = False

    def end_trial(self) -> None:
        """Gives a trial up, as equal shares are kept for another reason."""
        self.is_trial = False

    def learn(self, window: StepWindow) -> None:
        """Takes in the steps of a window, whose fields are of shape (world_size,)."""
        self._errors = self._jitter.errors(window)
        num_steps = np.broadcast_to(window.num_steps, self._errors.shape)
        self._num_steps = float(num_steps.min())
        self._model.observe(num_steps, window.num_samples, window.seconds, self._errors)

    @property
    def is_ready(self) -> bool:
        """Whether every rank has been seen."""
        return bool(self._model.observed.all())

    def seconds(self, sizes: Array) -> Array:
        """Returns the seconds of each rank's step with so many samples, by the model, shape (world_size,)."""
        return self._model.seconds(sizes)

    def target(self, total: float, lower: Array, upper: Array) -> Array:
        """Returns the shares of ``total`` samples with which all ranks within their bounds take equally long, or equal ones.

        Args:
            total: samples of all ranks together.
            lower: fewest samples of each rank, shape (world_size,).
            upper: most samples of each rank, shape (world_size,), may be infinite.

        Raises:
            ValueError: if the bounds leave no room for the total.
        """
        best, equal = self._model.equalize(total, lower, upper), np.full(len(lower), total / len(lower))
        is_possible = bool((lower <= equal).all() and (equal <= upper).all())
        return equal if is_possible and self._cost(equal) <= self._cost(best) else best

    def next(self, sizes: Array, *, lower: Array, upper: Array) -> Array:
        """Returns the next shares, of the same sum, after a window has been learnt.

        Args:
            sizes: the present ones, shape (world_size,), > 0. Outside the bounds (which are new), they move at once.
            lower: fewest samples of each rank, shape (world_size,).
            upper: most samples of each rank, shape (world_size,), may be infinite.

        Raises:
            ValueError: if the bounds leave no room for the sum.
        """
        total, self.is_sure = float(sizes.sum()), False
        if ((sizes < lower * (1 - 1e-9)) | (sizes > upper * (1 + 1e-9))).any():
            self._in_a_row, self._num_agreed, self.is_trial = 0, 0, False
            return self.target(total, lower, upper)
        target = self.target(total, lower, np.minimum(upper, self.GROWTH * sizes))
        if self.is_trial:
            # It was tried against these, which many looks had found.
            self._in_a_row, self._num_agreed, self.is_trial, self.is_sure = 0, 0, False, True
            return target
        gain = 1.0 - self._cost(target) / self._cost(sizes)
        slowest = int(self._model.seconds(sizes).argmax())
        threshold = max(self.DEAD_BAND, self.NOISE * float(self._errors[slowest]))
        self._in_a_row = self._in_a_row + 1 if gain > threshold else 0
        agree = self._agree(slowest, target, gain)
        if self._in_a_row < self.PATIENCE and gain <= max(self.AT_ONCE, 1.5 * threshold) and not agree:
            return self._tried(sizes, lower, upper)
        wanted = self._targets * (total / self._targets.sum()) if agree else target
        self.is_sure = self._in_a_row >= self.PATIENCE or (agree and self._agreed_steps >= self.STEPS_TOGETHER)
        self._in_a_row, self._num_agreed = 0, 0
        return wanted

    def _agree(self, slowest: int, target: Array, gain: float) -> bool:
        """Takes in what a look wants; returns whether enough of them in a row have found the same rank the slowest."""
        if gain <= self.DEAD_BAND:
            self._num_agreed = 0
            return False
        if not self._num_agreed or slowest != self._slowest:
            self._num_agreed, self._slowest, self._targets, self._agreed_steps = 0, slowest, np.zeros(len(target)), 0.0
        self._num_agreed += 1
        self._agreed_steps += self._num_steps
        self._targets = self._targets + target
        return self._num_agreed >= self.TOGETHER

    def _tried(self, sizes: Array, lower: Array, upper: Array) -> Array:
        """Returns the shares as they are, or equal ones if it is time to try those."""
        equal = np.full(len(sizes), sizes.mean())
        saving = 1.0 - self._cost(sizes) / self._cost(equal)
        is_possible = bool((lower <= equal).all() and (equal <= upper).all())
        if np.array_equal(sizes, equal) or saving > self.DOUBTFUL or not is_possible:
            return sizes.copy()
        self._looks_to_trial -= 1
        if self._looks_to_trial:
            return sizes.copy()
        self._trial_interval *= 2
        self._looks_to_trial, self.is_trial = self._trial_interval, True
        return equal

    def _cost(self, sizes: Array) -> float:
        """Seconds of a step with these shares."""
        is_equal = bool(np.ptp(sizes) <= 1e-9 * sizes.max())
        return float(self._model.seconds(sizes).max()) * (1.0 if is_equal else 1.0 + self.WEIGHTING)

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes."""
        return {
            "speed_model": self._model.state_dict(),
            "jitter": self._jitter.state_dict(),
            "in_a_row": self._in_a_row,
            "agreed": [self._num_agreed, self._slowest],
            "targets": self._targets.copy(),
            "trial": [self._looks_to_trial, self._trial_interval, int(self.is_trial)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of another balance of as many ranks."""
        self._model.load_state_dict(state["speed_model"])
        self._jitter.load_state_dict(state["jitter"])
        self._in_a_row = int(state["in_a_row"])
        self._num_agreed, self._slowest = map(int, state["agreed"])
        self._targets = np.array(state["targets"], dtype=np.float64)
        self._looks_to_trial, self._trial_interval, is_trial = map(int, state["trial"])
        self.is_trial = bool(is_trial)
