"""When a device gets to a place in the work that this process gives it: at once on a CPU, later on a GPU."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

# A place in the device's work. What it is, is the clock's business.
Moment = Any


class DeviceClock(Protocol):
    """Tells the seconds between places in a device's work. Any thread.

    Attributes:
        is_immediate: moments are seconds, and the device is there when :meth:`mark` returns.
    """

    is_immediate: bool

    def mark(self) -> Moment:
        """Returns the end of all work that this thread has given the device so far."""

    def is_past(self, moment: Moment) -> bool:
        """Returns whether the device has got there. Does not wait."""

    def wait(self, moment: Moment) -> None:
        """Waits until the device has got there, without using a core."""

    def seconds(self, start: Moment, stop: Moment) -> float:
        """Returns the seconds from one moment to another, both of them past."""


class HostClock:
    """See :class:`DeviceClock`: the device is this process, which computes before it goes on."""

    is_immediate = True
    mark = staticmethod(time.perf_counter)

    def is_past(self, moment: Moment) -> bool:
        """Returns True."""
        return True

    def wait(self, moment: Moment) -> None:
        """Returns at once."""

    def seconds(self, start: Moment, stop: Moment) -> float:
        """Returns the difference."""
        return float(stop - start)


class CudaClock:
    """See :class:`DeviceClock`: moments are events on the stream that is current when they are marked.

    A stream that is idle reaches an event as soon as it is recorded. So the seconds from the begin of a step to its end are those
    that the device computed, or waited for this process within the step.

    Args:
        device: the GPU.
    """

    is_immediate = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Moment:
        """Records an event."""
        # Blocking: who waits for it sleeps. Otherwise it would use a core, which ranks of the host need.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, moment: Moment) -> bool:
        """Asks the event."""
        return bool(moment.query())

    def wait(self, moment: Moment) -> None:
        """Waits for the event; other threads of this process go on."""
        moment.synchronize()

    def seconds(self, start: Moment, stop: Moment) -> float:
        """Returns the seconds between the events."""
        return float(start.elapsed_time(stop)) / 1e3


def device_clock(device: torch.device) -> DeviceClock:
    """Returns the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
