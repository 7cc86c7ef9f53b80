"""Seconds that this rank computes between batch and step, without what it waits for others, and emulated slowness."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_adaptive.algorithm.slowdown import Slowdown


class Stretch(NamedTuple):
    """A stretch of computing that has ended for this process, but on a GPU perhaps not yet."""

    process_s: float
    waited_s: float
    events: tuple[Any, Any] | None

    def is_over(self) -> bool:
        """Whether the device is through with it, too. Does not wait."""
        return self.events is None or all(event.query() for event in self.events)

    def seconds(self) -> float:
        """Returns its seconds; on a GPU waits for its end unless :meth:`is_over`."""
        if self.events is None:
            return self.process_s
        self.events[1].synchronize()
        # From event to event, with the idle time in which this process waited for others.
        return max(self.process_s, self.events[0].elapsed_time(self.events[1]) / 1e3 - self.waited_s)


class Stopwatch:
    """Runs from the moment a batch is asked for until the gradients are waited for, and on until the step is done.

    Args:
        clock: seconds of this process: wall clock or, where ranks share cores and slowness is emulated, computing time.

    Attributes:
        waiting_s: wall seconds that this rank has waited for other ranks so far.
        is_waiting: this rank is within :meth:`waiting`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.waiting_s = 0.0
        self._clock = clock
        self.is_waiting = False
        self._waiting_clock_s = 0.0
        # Where the present stretch began, by the clock, and what had been waited until then.
        self._begin: tuple[float, float, Any] | None = None
        self._emulation: Slowdown | None = None
        self._rank = 0
        self._first_s: float | None = None
        self._device: torch.device | None = None

    def emulate(self, emulation: Slowdown, rank: int) -> None:
        """Stretches all that is measured from now on by this rank's factor, whose schedule begins with the first step."""
        self._emulation, self._rank = emulation, rank

    def trains(self, parameters: Sequence[Tensor]) -> None:
        """Adds parameters that are trained: the device of the first one on a GPU is the one whose seconds count."""
        device = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
        if self._device is None and device is not None:
            self._device = device
            # It may have begun on another one.
            self.drop()

    def start(self) -> None:
        """Begins a stretch of computing; one that had begun does not count."""
        self._begin = self._clock(), self._waiting_clock_s, self._record_event()

    def drop(self) -> None:
        """Ends a stretch that does not count."""
        self._begin = None

    def stop(self) -> Stretch | None:
        """Ends the stretch, stretched further by the emulated factor; None if none had begun."""
        if self._begin is None:
            return None
        begin, waited_before, event = self._begin
        self._begin = None
        waited_s = self._waiting_clock_s - waited_before
        end_event = None if event is None else self._record_event()
        stretch = Stretch(
            max(self._clock() - begin - waited_s, 0.0), waited_s, None if end_event is None else (event, end_event)
        )
        if self._first_s is None:
            self._first_s = time.monotonic()
        if self._emulation is None:
            return stretch
        factor = float(self._emulation.factors(time.monotonic() - self._first_s)[self._rank])
        seconds = stretch.seconds()
        time.sleep((factor - 1.0) * seconds)
        return Stretch(factor * seconds, 0.0, None)

    @contextmanager
    def waiting(self, what: str = "") -> Iterator[None]:
        """Marks a wait for other ranks, which does not count as computing; may be nested."""
        if self.is_waiting:
            yield
            return
        self.is_waiting = True
        begin_s, begin = time.perf_counter(), self._clock()
        try:
            yield
        finally:
            self.is_waiting = False
            self.waiting_s += time.perf_counter() - begin_s
            self._waiting_clock_s += self._clock() - begin

    def _record_event(self) -> Any:
        # A process that does not compute on a GPU must not begin to use one here.
        if not torch.cuda.is_initialized():
            return None
        event = torch.cuda.Event(enable_timing=True)
        # Not of this thread's current device: a script may leave that at the first one, and train on another.
        event.record(torch.cuda.current_stream(self._device))
        return event
