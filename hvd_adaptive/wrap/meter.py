"""What a rank did since the last exchange, and the seconds that it took, read without making a device wait."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvd_adaptive.wrap.index_lists import Handed
from hvd_adaptive.wrap.share_rules import Window
from hvd_adaptive.wrap.stopwatch import Stretch

# A step counts as at most so many usual ones: a rank that was stopped, or a disk that stalled, says nothing of the shares.
_MOST_USUAL = 4.0


def usual_seconds(seconds: Sequence[float]) -> float:
    """Returns the sum of steps' seconds, of which each counts as at most four usual ones."""
    most_s = _MOST_USUAL * statistics.median(seconds)
    return sum(min(step_s, most_s) for step_s in seconds)


class _Step(NamedTuple):
    """A step whose seconds are not known yet; ``batches`` is None where no loader fed it."""

    stretches: Sequence[Stretch]
    batches: Sequence[Handed] | None
    tell: Callable[[float], None] | None


class Meter:
    """Counts this rank's steps.

    A step's seconds count once its device is through with it. To wait for that would hold up a script that runs ahead of its
    GPU, so there they count a step or so later, and in the window of that time.
    """

    def __init__(self) -> None:
        self._window = Window()
        self._pending: deque[_Step] = deque()
        # Seconds of the last batch that counted, so far.
        self._last_s = 0.0
        self._began_s: float | None = None
        # Of the steps since the last exchange, from asking for the batch to its gradients.
        self._walls_s: list[float] = []

    def begins(self, *, counts: bool) -> None:
        """A step begins, by the script's asking for its batch."""
        self._began_s = time.perf_counter() if counts else None

    def ends(self) -> None:
        """The step's gradients are there."""
        if self._began_s is not None:
            self._walls_s.append(time.perf_counter() - self._began_s)
            self._began_s = None

    def step(
        self,
        batches: Sequence[Handed] | None,
        stretches: Sequence[Stretch],
        tell: Callable[[float], None] | None = None,
    ) -> None:
        """Counts a step.

        Args:
            batches: those that led to it; None: no loader's.
            stretches: of its computing; none: it says nothing of speed.
            tell: is told its seconds, now or at a later step.
        """
        self._window.num_steps += 1
        if batches is not None:
            # Equal shares are the script's own batches, which need not be equally long.
            self._window.num_samples += sum(handed.num_samples for handed in batches if handed.is_unequal)
            self._window.global_samples += sum(handed.global_samples for handed in batches if handed.is_unequal)
        if stretches:
            self._pending.append(_Step(stretches, batches, tell))
        self._collect()

    def waited(self, seconds: float) -> None:
        """Counts a wait for other ranks."""
        self._window.wait_s += seconds

    def take(self) -> Window:
        """Returns what was counted since the last call."""
        self._collect()
        window, self._window = self._window, Window()
        walls_s, self._walls_s = self._walls_s, []
        if walls_s:
            window.wall_steps, window.wall_s = len(walls_s), usual_seconds(walls_s)
        return window

    def _collect(self) -> None:
        while self._pending and all(stretch.is_over() for stretch in self._pending[0].stretches):
            stretches, batches, tell = self._pending.popleft()
            seconds = sum(stretch.seconds() for stretch in stretches)
            if batches is not None and seconds:
                self._time(batches, seconds)
            if tell is not None:
                tell(seconds)

    def _time(self, batches: Sequence[Handed], seconds: float) -> None:
        window = self._window
        if batches:
            window.timed_steps += 1
            window.timed_samples += sum(handed.num_samples for handed in batches)
            window.timed_global_samples += sum(handed.global_samples for handed in batches)
            self._last_s = 0.0
        elif not window.timed_steps:
            return
        # A further optimizer's step on the same batches, as of a GAN, goes to theirs: else two kinds of steps look like noise.
        total_s = self._last_s + seconds
        window.compute_s += seconds
        window.compute_sq += total_s * total_s - self._last_s * self._last_s
        self._last_s = total_s
