"""Which shares of the global batch the ranks of ``sync`` compute, and when they look at each other's speeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvd_adaptive.algorithm.share_balance import ShareBalance, StepWindow
from hvd_adaptive.algorithm.shares import integer_shares
from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.config import Config

# Steps between two looks: few after a move, which is a guess until it has been seen; more, the longer guesses hold.
_LEAST_STEPS, _MOST_STEPS = 4, 32
# The first step pays for what later ones find ready: memory, kernels, connections.
_COLD_STEPS = 1
# What has moved fewer of the samples is a correction and no guess.
_SMALL_MOVE = 0.02


class ShareControl:
    """The ranks' shares of a fixed global batch.

    After each step :meth:`count` is told how long it took; when that gives a window, the ranks gather theirs for
    :meth:`observe`. The batches of some steps are on their way by then, so new shares hold from the step after these. With
    ``config.micro_batch_size`` shares are whole numbers of micro-batches.

    Args:
        config: the rules.
        world_size: number of ranks.
        global_batch_size: samples of a step over all ranks.
        smallest: fewest samples in a micro-batch.

    Attributes:
        lower: fewest samples of a rank.
        whole: the shares in whole samples, shape (world_size,), adding up to the global batch.

    Raises:
        ValueError: if the global batch has too few samples for the ranks, or too many for ``max_batch_size``.
    """

    def __init__(self, config: Config, world_size: int, *, global_batch_size: int, smallest: int) -> None:
        self._rule = config.size_rule
        self._total = global_batch_size
        self._unit = unit = config.micro_batch_size or 1
        lower = max(config.accumulation_steps * smallest, config.min_batch_size or 1)
        self.lower = -(-lower // unit) * unit
        self._upper = config.max_batch_size
        self._balance = ShareBalance(world_size)
        # Steps to measure until the next look, 0: there is none; and steps before them.
        self._due, self._to_skip = 0, _COLD_STEPS
        if world_size > 1 and self._rule != "fixed":
            # Shares that are set once should be set well.
            self._due = _MOST_STEPS if self._rule == "static" else _LEAST_STEPS
        self._window = StepWindow()
        self._set(np.full(world_size, global_batch_size / world_size))
        self._num_prefetched = 1
        self.begin_round()

    @property
    def equal_share_s(self) -> Array:
        """The seconds of its own that a step with an equal share would take each rank, shape (world_size,); 0: not known yet."""
        count = len(self._sizes)
        return self._balance.seconds(np.full(count, self._total / count)) if self._balance.is_ready else np.zeros(count)

    @property
    def steps_to_look(self) -> int:
        """Calls of :meth:`count` until one gives a window; 0: none will."""
        return self._to_skip + self._due - int(self._window.num_steps) if self._due else 0

    def begin_round(self, *, num_prefetched: int = 1) -> None:
        """Begins a round with the present shares.

        Args:
            num_prefetched: steps after the one in work whose batches may be on their way, the same on every rank.
        """
        self._num_prefetched = num_prefetched
        self._changes = [(0, self._list())]

    def shares_at(self, step: int) -> list[int]:
        """Returns the shares of a step of the round, if the last one before those prefetched and itself is over. Any thread."""
        return next(shares for first, shares in reversed(self._changes) if first <= step)

    def count(self, num_samples: Any, seconds: Any) -> StepWindow | None:
        """Counts a step with a whole global batch.

        Args:
            num_samples: of this rank; or of all, shape (world_size,), where one process plays them.
            seconds: its own, without those of waiting for other ranks.

        Returns:
            The steps since the last look, if it is time for one: after the same step on every rank.
        """
        if not self._due:
            return None
        if self._to_skip:
            self._to_skip -= 1
            return None
        self._window.add(num_samples, seconds)
        if self._window.num_steps < self._due:
            return None
        window, self._window = self._window, StepWindow()
        return window

    def observe(self, window: StepWindow, *, step: int) -> None:
        """Chooses the next shares, and when to look again, as ``config.size_rule`` says.

        Args:
            window: the windows of all ranks together, its fields of shape (world_size,).
            step: the last step in it.
        """
        self._balance.learn(window)
        if not self._balance.is_ready:
            return
        count = len(self._sizes)
        lower = np.full(count, float(self.lower))
        upper = np.full(count, math.inf if self._upper is None else float(self._upper))
        before = self._sizes
        if self._rule == "static":
            self._set(self._balance.target(self._total, lower, upper))
            self._due = 0
        else:
            self._set(self._balance.next(before, lower=lower, upper=upper))
            moved = float(np.abs(self._sizes - before).sum() / 2 / self._total)
            self._due = _LEAST_STEPS if moved > _SMALL_MOVE else min(2 * self._due, _MOST_STEPS)
            self._to_skip = self._num_prefetched if moved else 0
        self._changes.append((step + 1 + self._num_prefetched, self._list()))

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes; the same on every rank."""
        return {"sizes": self._sizes, "is_settled": not self._due, "balance": self._balance.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from the state of as many ranks, scaled to this global batch; before the first round."""
        self._balance.load_state_dict(state["balance"])
        if self._rule == "static" and state["is_settled"]:
            self._due = 0
        self._set(np.array(state["sizes"]) * (self._total / sum(state["sizes"])))

    def _set(self, sizes: Array) -> None:
        self._sizes = sizes
        unit = self._unit
        most = None if self._upper is None else [self._upper // unit] * len(sizes)
        # Processors may differ in the last bit of a size, but the ranks must not in their shares.
        shares = integer_shares(sizes.round(6).tolist(), self._total // unit, lower=self.lower // unit, upper=most)
        self.whole: Array = np.array(shares, dtype=np.float64) * unit

    def _list(self) -> list[int]:
        return [int(size) for size in self.whole]
