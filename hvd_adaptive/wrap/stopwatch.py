"""Seconds that this rank computes between batch and step, without what it waits for others, and emulated slowness."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Emulation(Protocol):
    """Emulated slowness: each rank's factor >= 1 on its compute, by seconds since the first step."""

    def factors(self, train_s: float) -> NDArray[np.float64]:
        """Returns the factors, shape (world_size,)."""


class Stopwatch:
    """Runs from the moment a batch is asked for until the gradients are waited for, and on until the step is done.

    Args:
        clock: seconds of this process: wall clock or, where ranks share cores and slowness is emulated, computing time.

    Attributes:
        waiting_s: wall seconds that this rank has waited for other ranks so far.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.waiting_s = 0.0
        self._clock = clock
        self._waiting_clock_s = 0.0
        # Where the present stretch began, by the clock, and what had been waited until then.
        self._begin: tuple[float, float] | None = None
        self._emulation: Emulation | None = None
        self._rank = 0
        self._first_s: float | None = None

    def emulate(self, emulation: Emulation, rank: int) -> None:
        """Stretches all that is measured from now on by this rank's factor."""
        self._emulation, self._rank = emulation, rank

    def start(self) -> None:
        """Begins a stretch of computing; one that had begun does not count."""
        self._begin = self._clock(), self._waiting_clock_s

    def drop(self) -> None:
        """Ends a stretch that does not count."""
        self._begin = None

    def stop(self) -> float:
        """Ends the stretch; returns its seconds, emulated ones included; 0 if none had begun."""
        if self._begin is None:
            return 0.0
        begin, waited_before = self._begin
        self._begin = None
        seconds = max(self._clock() - begin - (self._waiting_clock_s - waited_before), 0.0)
        if self._first_s is None:
            self._first_s = time.monotonic()
        if self._emulation is not None:
            factor = float(self._emulation.factors(time.monotonic() - self._first_s)[self._rank])
            time.sleep((factor - 1.0) * seconds)
            seconds *= factor
        return seconds

    def waited(self, action: Callable[[], Any]) -> Any:
        """Runs an action that waits for other ranks."""
        begin_s, begin = time.perf_counter(), self._clock()
        try:
            return action()
        finally:
            self.waiting_s += time.perf_counter() - begin_s
            self._waiting_clock_s += self._clock() - begin
