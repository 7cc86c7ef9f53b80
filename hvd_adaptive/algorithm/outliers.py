"""Progress that is much larger than a rank's usual one, and how far a merge may move a model (A-EDiT, arXiv 2412.07210)."""

from __future__ import annotations

import logging
import math

from hvd_adaptive.algorithm.statistics import Array

log = logging.getLogger(__name__)

# Norms before which none is judged. As many outliers in a row are what a rank does now.
_LEAST_COUNT = 8
# Weight of the latest norm in a long history, the paper's.
_LATEST = 0.02
# Of the mean: ranks whose norms hardly vary must not be left out for nothing.
_LEAST_SPREAD = 0.1


class NormHistory:
    """What norms a rank's progress usually has: their exponential mean and variance.

    A norm is an outlier if it is more than ``limit`` standard deviations above the mean. The history learns an outlier as if it
    were just at that limit, and begins again after eight in a row. So a rank whose norms have grown for good, as after a change
    of the learning rate, is soon let in again; the paper's learns none.

    Args:
        limit: standard deviations, > 0; 3 in the paper.
        whose: whose progress it is, for the log.
    """

    def __init__(self, limit: float, whose: str = "a rank") -> None:
        self._limit = limit
        self._whose = whose
        self._count = self._num_outliers = 0
        self._mean = 0.0
        self._variance = 0.0

    def is_outlier(self, norm: float, work: float) -> bool:
        """Returns whether a norm is an outlier, and learns it.

        Args:
            norm: of the progress, finite. 0 does not count: beside a mean of 0 all that follows would be outliers.
            work: updates that made it: norms are compared over its square root, as progress is partly a random walk. 0: none.
        """
        if not norm or not work:
            return False
        value = norm / math.sqrt(work)
        highest = self._mean + self._limit * max(math.sqrt(self._variance), _LEAST_SPREAD * self._mean)
        outlies = self._count >= _LEAST_COUNT and value > highest
        self._num_outliers = self._num_outliers + 1 if outlies else 0
        if self._num_outliers == _LEAST_COUNT:
            log.warning(
                "%s: the progress was an outlier in %d merges in a row (outlier_limit). So its history begins again, "
                "and the next %d merges take it in, however large it is. If that is too large, look at the rank's data or lower "
                "the learning rate.",
                self._whose, _LEAST_COUNT, _LEAST_COUNT,
            )  # fmt: skip
            self.load_state_dict([0.0, 0.0, 0.0, 0.0])
            return True
        self._count += 1
        share = max(1 / self._count, _LATEST)
        difference = (highest if outlies else value) - self._mean
        self._mean += share * difference
        self._variance = (1 - share) * (self._variance + share * difference**2)
        return outlies

    def state_dict(self) -> list[float]:
        """Returns what :meth:`load_state_dict` takes."""
        return [float(self._count), self._mean, self._variance, float(self._num_outliers)]

    def load_state_dict(self, state: list[float]) -> None:
        """Goes on from a state."""
        # Older states do not count outliers in a row.
        count, self._mean, self._variance, num_outliers = (*state, 0.0)[:4]
        self._count, self._num_outliers = int(count), int(num_outliers)


def clip_factor(weights: Array, norms: Array, largest: float) -> float:
    """Returns by what a merged delta is to be multiplied so that its norm is at most ``largest``.

    The norm is taken for the weighted mean of the ranks' norms, which it cannot exceed: every rank knows those bit by bit, where
    norms of the sum might differ in a bit from one processor to the next.

    Args:
        weights: of the ranks, shape (world_size,).
        norms: of the ranks' deltas, shape (world_size,).
        largest: > 0; 10 in the paper.
    """
    norm = float((weights * norms).sum())
    return min(1.0, largest / norm) if norm > 0 else 1.0
