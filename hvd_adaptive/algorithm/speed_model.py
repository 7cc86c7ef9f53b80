"""How long a rank's step takes as a function of its batch, and the batches that make all ranks' steps equally long.

A step of a rank takes a + c x work seconds: a for what every step costs (launching kernels, the optimizer), c for each unit
of work (a sample, or a non-zero). Only the sum is seen, once a round; the two come apart when the batch size moves.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adaptive.algorithm.statistics import Array

# Standard deviation of a round's seconds a step, relative; what a round of a hundred steps shows on a shared machine.
_NOISE = 0.05
# How much of a step its fixed part may well be, before any other batch size was seen.
_OVERHEAD_SHARE = 0.3
# A surprise of so many standard deviations is a rank whose whole speed changed, not news about a against c.
_JUMP = 3.0
# The least part of the first step that work costs; with none a rank could take any batch in the same time.
_LEAST_WORK_SHARE = 0.05


class SpeedModel:
    """Each rank's seconds a step, a + c x work, by recursive least squares with forgetting.

    Errors are relative to the step's seconds. Forgetting acts on a rank's speed only, that is along (a, c): the common form,
    which divides the whole covariance, lets it grow without bound in the direction that a steady batch size does not
    show, and the first move then throws the estimate anywhere. Here, while a rank's work a step stays the same, a stays 0
    (the prior) and c is the filtered ratio of seconds to work, which is exact at that batch size; the first other batch
    size begins to tell a from c. A rank whose seconds jump (by three standard deviations of what was expected) is taken to
    have become slower or faster as a whole, at once.

    Args:
        world_size: number of ranks.
        forgetting: in (0, 1]; a rank's speed is taken to wander by ``1 - forgetting`` (relative, standard deviation) from
            one observation to the next. 1: speeds are constant.
    """

    def __init__(self, world_size: int, *, forgetting: float = 0.95) -> None:
        self._wander = 1.0 - forgetting
        # Seconds of a step without work, and of one with as much work as the first observed; rank by rank.
        self._theta = np.zeros((world_size, 2))
        self._covariance = np.zeros((world_size, 2, 2))
        # Work a step in the first observation; 0 for a rank that was never observed.
        self._scale = np.zeros(world_size)

    @property
    def observed(self) -> NDArray[np.bool_]:
        """Which ranks have been observed, shape (world_size,)."""
        return self._scale > 0

    def observe(self, num_steps: Array, work: Array, seconds: Array, errors: Array | None = None) -> None:
        """Takes in what the ranks did in one round.

        Args:
            num_steps: steps of each rank, shape (world_size,), >= 0; a rank without steps teaches nothing.
            work: work of all these steps, shape (world_size,), >= 0.
            seconds: seconds of all these steps, shape (world_size,), >= 0.
            errors: standard errors of the seconds, relative, shape (world_size,); None: what a hundred steps have.
        """
        active = (num_steps > 0) & (work > 0) & (seconds > 0)
        step_work, step_s = work / np.where(active, num_steps, 1.0), seconds / np.where(active, num_steps, 1.0)
        first = active & ~self.observed
        noise = np.full(len(step_s), _NOISE) if errors is None else np.maximum(errors, _NOISE)
        self._update(np.flatnonzero(active & self.observed), step_work, step_s, noise)
        self._scale[first] = step_work[first]
        self._theta[first] = np.stack((np.zeros(first.sum()), step_s[first]), axis=1)
        # What a may be, c is not: at this batch size only the noise is unknown.
        trade = np.array([[1.0, -1.0], [-1.0, 1.0]])
        steady = np.array([[0.0, 0.0], [0.0, 1.0]])
        variance = noise[first, None, None] ** 2
        self._covariance[first] = step_s[first, None, None] ** 2 * (_OVERHEAD_SHARE**2 * trade + variance * steady)

    def _update(self, ranks: NDArray[np.intp], step_work: Array, step_s: Array, noise: Array) -> None:
        """One step of the filter for ranks that were observed before; n of them below."""
        theta, seconds = self._theta[ranks], step_s[ranks]  # (n, 2), (n,)
        covariance = self._covariance[ranks] + self._wander**2 * theta[:, :, None] * theta[:, None, :]  # (n, 2, 2)
        relative_work = step_work[ranks] / self._scale[ranks]
        # For the regressor r = (1, relative work): r theta, C r, and r C r.
        predicted = theta[:, 0] + theta[:, 1] * relative_work
        projected = covariance[:, :, 0] + covariance[:, :, 1] * relative_work[:, None]  # (n, 2)
        variance = projected[:, 0] + projected[:, 1] * relative_work + (noise[ranks] * predicted) ** 2
        surprise = seconds - predicted
        # Of the logarithm: else what goes up as a whole comes down as a change of the fixed part, and so bit by bit c grows.
        jumped = (np.log(seconds / predicted) * predicted) ** 2 > _JUMP**2 * variance
        ratio = np.where(jumped, seconds / predicted, 1.0)
        gain = projected / variance[:, None]
        filtered = covariance - gain[:, :, None] * projected[:, None, :]
        estimate = _bounded(theta + gain * surprise[:, None], relative_work, seconds)
        self._theta[ranks] = np.where(jumped[:, None], theta * ratio[:, None], estimate)
        self._covariance[ranks] = np.where(jumped[:, None, None], covariance * ratio[:, None, None] ** 2, filtered)

    def coefficients(self) -> tuple[Array, Array]:
        """Returns a >= 0, seconds, and c > 0, seconds a unit of work; both shape (world_size,).

        A rank that was never observed counts as slow as the slowest other; before any observation all are equal.
        """
        seen = self.observed
        if not seen.any():
            return np.zeros(len(seen)), np.ones(len(seen))
        fixed = self._theta[:, 0].copy()
        per_work = self._theta[:, 1] / np.where(seen, self._scale, 1.0)
        fixed[~seen], per_work[~seen] = fixed[seen].max(), per_work[seen].max()
        return fixed, per_work

    def seconds(self, batch_work: Array) -> Array:
        """Returns the seconds of a step with so much work, shape (world_size,).

        Args:
            batch_work: work of each rank's step, shape (world_size,), >= 0.
        """
        fixed, per_work = self.coefficients()
        return fixed + per_work * batch_work

    def equalize(self, total: float, lower: Array, upper: Array) -> Array:
        """Returns the batches that sum to ``total`` and make the steps of all ranks within their bounds equally long.

        The solution of sum clip((T - a_i) / c_i, lower_i, upper_i) = total, found exactly: the sum is piecewise linear in T.

        Args:
            total: work of all ranks' batches together.
            lower: least work of each rank's batch, shape (world_size,), >= 0.
            upper: most work of each rank's batch, shape (world_size,), may be infinite.

        Returns:
            Work of each rank's batch, shape (world_size,), float64.

        Raises:
            ValueError: if a lower bound is above its upper bound, or the bounds leave no room for the total.
        """
        if (lower > upper).any():
            rank = int(np.flatnonzero(lower > upper)[0])
            raise ValueError(f"rank {rank}: lower must be <= upper, got {lower[rank]} > {upper[rank]}")
        slack = 1e-9 * total
        if not lower.sum() - slack <= total <= upper.sum() + slack:
            raise ValueError(
                f"total must be within the sums of the bounds, got {total} outside [{lower.sum()}, {upper.sum()}]; "
                "change the bounds or the global batch size"
            )
        if total <= lower.sum() or total >= upper.sum():
            return np.array(lower if total <= lower.sum() else upper, dtype=np.float64)
        fixed, per_work = self.coefficients()
        first, last = fixed + per_work * lower, fixed + per_work * upper
        corners = np.unique(np.concatenate((first, last[np.isfinite(last)])))
        # The sum rises with T, so few corners need it.
        place = bisect.bisect_left(
            corners, total, key=lambda t: np.clip((t - fixed) / per_work, lower, upper).sum()
        )
        if place == 0:  # by rounding only
            return np.array(lower, dtype=np.float64)
        left = corners[place - 1]
        # Between two corners, or beyond the last, the same ranks are free.
        free = (first <= left) & (last > left)
        if not free.any():
            return np.array(upper, dtype=np.float64)
        batches = np.where(last <= left, upper, lower)
        inverse = 1.0 / per_work[free]
        step_s = (total - batches[~free].sum() + (fixed[free] * inverse).sum()) / inverse.sum()
        batches[free] = np.clip((step_s - fixed[free]) * inverse, lower[free], upper[free])
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes."""
        return {
            "theta": self._theta.copy(),
            "covariance": self._covariance.copy(),
            "scale": self._scale.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the estimates of another model.

        Raises:
            ValueError: if they are of another number of ranks.
        """
        if len(state["scale"]) != len(self._scale):
            raise ValueError(
                f"state must be of {len(self._scale)} ranks, got {len(state['scale'])}: other ranks have other speeds, "
                "start with a new model"
            )
        self._theta = np.array(state["theta"], dtype=np.float64)
        self._covariance = np.array(state["covariance"], dtype=np.float64)
        self._scale = np.array(state["scale"], dtype=np.float64)


def fit_line(work: Array, seconds: Array) -> tuple[float, float, float]:
    """Fits seconds = a + c x work by least squares of the relative errors, with a >= 0 and c > 0.

    For steps measured at several sizes on purpose, where a rank's speed does not wander and nothing has to be forgotten.

    Args:
        work: work of each measured step, shape (num_steps,), > 0.
        seconds: of each, shape (num_steps,), > 0.

    Returns:
        a, c, and the largest relative difference between the line and the measurements.

    Raises:
        ValueError: for nothing measured, or values that are not > 0.
    """
    if not len(work) == len(seconds) > 0 or not (np.all(work > 0) and np.all(seconds > 0)):
        raise ValueError(f"work and seconds must be equally many, and > 0, got {work} and {seconds}")
    columns = np.stack((1 / seconds, work / seconds), axis=1)
    slope_only = float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    a, c = 0.0, slope_only
    if len(np.unique(work)) > 1:
        a, c = map(float, np.linalg.lstsq(columns, np.ones(len(work)), rcond=None)[0])
    if a < 0:
        a, c = 0.0, slope_only
    least = _LEAST_WORK_SHARE * float(np.median(seconds)) / float(np.median(work))
    if c < least:
        c = least
        a = max(0.0, float(((1 - c * columns[:, 1]) * columns[:, 0]).sum() / (columns[:, 0] ** 2).sum()))
    return a, c, float(np.abs((a + c * work) / seconds - 1).max())


class Damping:
    """Lets batch sizes follow their targets without following the noise.

    All ranks move or none, by the same fraction of the way, so that the sum is kept. They move when a rank's target has been
    more than 5% from its size on the same side three times in a row, or once by more than half: a jump that large is worth
    one wrong step of a quarter if it was a hiccup, and three rounds of everybody's waiting if it was not. No size
    changes by more than a quarter at a time, since the learning rate follows it.

    Args:
        world_size: number of ranks.
    """

    DEAD_BAND = 0.05
    PATIENCE = 3
    AT_ONCE = 0.5
    MAX_CHANGE = 0.25

    def __init__(self, world_size: int) -> None:
        # Targets in a row above (positive) or below (negative) the dead band.
        self._in_a_row = np.zeros(world_size)

    def next(self, sizes: Array, target: Array, *, lower: Array, upper: Array) -> Array:
        """Returns the next sizes.

        Args:
            sizes: present sizes, shape (world_size,), > 0.
            target: where they should be, shape (world_size,), within the bounds.
            lower: bound of each rank, shape (world_size,).
            upper: bound of each rank, shape (world_size,).

        Returns:
            Shape (world_size,). Sizes outside the bounds (a new memory ceiling), or with another sum than the target's, give
            the target at once.
        """
        outside = ((sizes < lower * (1 - 1e-9)) | (sizes > upper * (1 + 1e-9))).any()
        if outside or not np.isclose(sizes.sum(), target.sum(), rtol=1e-9, atol=0):
            self._in_a_row[:] = 0
            return target.copy()
        deviation = target / sizes - 1
        side = np.sign(deviation) * (np.abs(deviation) > self.DEAD_BAND)
        self._in_a_row = np.where(side * self._in_a_row > 0, self._in_a_row + side, side)
        patient = (np.abs(self._in_a_row) >= self.PATIENCE).any()
        largest = float(np.abs(deviation).max())
        if not patient and largest <= self.AT_ONCE:
            return sizes.copy()
        if largest <= self.MAX_CHANGE:
            return target.copy()
        return sizes + self.MAX_CHANGE / largest * (target - sizes)

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes."""
        return {"in_a_row": self._in_a_row.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the counts of another damping of as many ranks."""
        self._in_a_row = np.array(state["in_a_row"], dtype=np.float64)


def _bounded(theta: Array, relative_work: Array, seconds: Array) -> Array:
    """Moves each rank's (a, c), shape (n, 2), along what its last observation could not tell apart, until a >= 0 and c is more
    than nothing."""
    total = theta[:, 0] + theta[:, 1] * relative_work
    total = np.where(total > 0, total, seconds)
    # Of the first step's work: as much of a tiny batch's step would make one like the first several times longer.
    least = _LEAST_WORK_SHARE / (1.0 - _LEAST_WORK_SHARE)
    per_work = np.clip(theta[:, 1], least * total / (1.0 + least * relative_work), total / relative_work)
    return np.stack((np.maximum(total - per_work * relative_work, 0.0), per_work), axis=1)
