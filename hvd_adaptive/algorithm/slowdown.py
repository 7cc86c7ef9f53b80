"""The heterogeneity emulator's schedule: how many times slower each rank is, over training seconds."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from hvd_adaptive.validation import parse_slowdown


class Slowdown:
    """The ranks' factors over time.

    Args:
        schedule: ``Config.slowdown``; None is a factor of 1.
        world_size: number of ranks.

    Raises:
        ValueError: if the schedule does not have one factor a rank.
    """

    def __init__(self, schedule: str | None, *, world_size: int) -> None:
        entries = parse_slowdown(schedule) if schedule is not None else [(0.0, (1.0,) * world_size)]
        if len(entries[0][1]) != world_size:
            raise ValueError(
                f"slowdown must have one factor a rank: {world_size} ranks, got {len(entries[0][1])} factors in {schedule!r}"
            )
        self._starts = [start for start, _ in entries]
        self._factors = np.array([factors for _, factors in entries])

    def factors(self, train_s: float) -> NDArray[np.float64]:
        """Returns the ranks' factors at a training second, shape (world_size,), >= 1."""
        factors: NDArray[np.float64] = self._factors[bisect.bisect_right(self._starts, train_s) - 1]
        return factors

    def capacity_s(self, start_s: float, stop_s: float) -> NDArray[np.float64]:
        """Returns the unstretched compute seconds of each rank in [start_s, stop_s), shape (world_size,)."""
        edges = np.clip([*self._starts, np.inf], start_s, stop_s)
        return np.diff(edges) @ (1 / self._factors)
