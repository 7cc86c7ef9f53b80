"""Which ranks compute slower than they should: against the other ranks, or against their own earlier rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hvd_adaptive.algorithm.statistics import Array

# Rounds in a row before a verdict changes: one slow round is a page fault or a neighbour's short job.
_PERSISTENCE = 3
# Rounds of a rank's history, and how many of them a verdict on it needs. The first is left out: kernels are compiled in it.
_HISTORY = 50
_LEAST_HISTORY = 5
_PEERS, _ITSELF = "the other ranks", "its own earlier rounds"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the limit.

    Attributes:
        rank: which.
        against: what it is compared with, in words.
        factor: its seconds for each unit of work over those of the comparison.
        is_new: it was not one in the round before.
    """

    rank: int
    against: str
    factor: float
    is_new: bool


class StragglerWatch:
    """Judges every round from the ranks' own seconds, in which they waited for nobody.

    A rank's cost is its seconds for each unit of work. It is a straggler where its cost has been ``limit`` times the median of
    the other ranks' for three rounds in a row, or ``limit`` times the median of its own earlier rounds, of which those that were
    too slow do not count; until it has been faster than that for three rounds in a row.

    Args:
        world_size: number of ranks.
        limit: > 1.
    """

    def __init__(self, world_size: int, *, limit: float) -> None:
        self._limit = limit
        self._history: list[deque[float]] = [deque(maxlen=_HISTORY) for _ in range(world_size)]
        self._is_first = np.ones(world_size, dtype=bool)
        self._verdicts = {against: np.zeros(world_size, dtype=bool) for against in (_PEERS, _ITSELF)}
        self._streaks = {against: np.zeros(world_size, dtype=np.int64) for against in (_PEERS, _ITSELF)}

    def observe(self, work: Array, seconds: Array) -> list[Straggler]:
        """Takes in a round; returns the ranks that are stragglers after it.

        Args:
            work: of each rank, shape (world_size,), >= 0. A rank without work is judged as before.
            seconds: that each rank spent on it, waiting for other ranks excluded, shape (world_size,), >= 0.
        """
        seen = (work > 0) & (seconds > 0)
        cost = np.full(len(work), np.nan)
        cost[seen] = seconds[seen] / work[seen]
        found = []
        for rank in np.flatnonzero(seen).tolist():
            others = np.delete(cost, rank)
            others = others[~np.isnan(others)]
            history = self._history[rank]
            compared = {
                _PEERS: float(np.median(others)) if len(others) else None,
                _ITSELF: float(np.median(history)) if len(history) >= _LEAST_HISTORY else None,
            }
            factors = {against: cost[rank] / base for against, base in compared.items() if base is not None}
            is_new = {against: self._judge(against, rank, factor) for against, factor in factors.items()}
            if not self._is_first[rank] and factors.get(_ITSELF, 1.0) < self._limit:
                history.append(float(cost[rank]))
            self._is_first[rank] = False
            late = [against for against in factors if self._verdicts[against][rank]]
            if late:
                worst = max(late, key=lambda against: factors[against])
                found.append(Straggler(rank, worst, float(factors[worst]), any(is_new.values())))
        return found

    def _judge(self, against: str, rank: int, factor: float) -> bool:
        """Counts towards a change of the verdict; returns whether the rank has just become a straggler."""
        slow, verdicts, streaks = factor >= self._limit, self._verdicts[against], self._streaks[against]
        streaks[rank] = streaks[rank] + 1 if slow != verdicts[rank] else 0
        if streaks[rank] < _PERSISTENCE:
            return False
        verdicts[rank], streaks[rank] = slow, 0
        return slow
