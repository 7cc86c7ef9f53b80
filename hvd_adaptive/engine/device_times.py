"""What the steps of a round took the device, and their losses, read when the device is through with them.

A process can give a GPU far more work than it has done. Its own seconds then say how fast it launches, and a rank whose GPU
is slow would claim as many batches as one whose GPU is fast. So seconds are the device's, and a rank claims a batch only when
the step but one before it is over on the device: one step is under way, and the next one is ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.engine.device_clock import DeviceClock, HostClock, Moment
from hvd_adaptive.engine.records import RoundStats

# What adds the seconds between two moments up; without moments, what is to be done when all before it is known.
_Entry = tuple[Moment, Moment, Callable[[float], None]]


class DeviceTimes:
    """Adds up a device's seconds, in the order of its work.

    Args:
        clock: the device's; by default one of a device that is this process.

    Attributes:
        mark: marks the present place in the device's work, for :meth:`add`.
        last_step: the end of the last step; None where steps are over when the loop goes on.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = clock or HostClock()
        self._is_immediate = self._clock.is_immediate
        self.mark = self._clock.mark
        self.last_step: Moment | None = None
        self._unread: deque[_Entry] = deque()
        self._loss: Tensor | None = None

    def add(self, target: Any, name: str, start: Moment) -> Moment:
        """Adds the seconds from ``start`` until now to an attribute, now or once the device is through; returns the end.

        Args:
            target: has the attribute.
            name: of the attribute.
            start: from :attr:`mark`.
        """
        stop = self.mark()

        def count(seconds: float) -> None:
            setattr(target, name, getattr(target, name) + seconds)

        if self._is_immediate:
            count(stop - start)
        else:
            self._unread.append((start, stop, count))
            self.collect()
        return stop

    def then(self, action: Callable[[], None]) -> None:
        """Calls ``action`` when all seconds added so far are known."""
        if self._unread:
            self._unread.append((None, None, lambda _: action()))
        else:
            action()

    @contextmanager
    def waiting(self, stats: RoundStats) -> Iterator[None]:
        """Counts the time in it as waiting for a claim and its batch; on a GPU only as far as the GPU waits as well."""
        start = self.mark()
        yield
        self.add(stats, "claim_s", start)

    def end_step(
        self, stats: RoundStats, start: Moment, num_samples: int, work: int, loss: Any, loss_weight: float | None = None
    ) -> None:
        """Counts a step.

        Args:
            stats: of the round.
            start: of the step.
            num_samples: of its batch.
            work: their work.
            loss: the batch's mean loss, a number or a tensor with one element; None where it is not reported.
            loss_weight: what the loss is a mean over, the targets; None: the samples.
        """
        if loss_weight is None:
            loss_weight = num_samples
        elif loss_weight == 0:
            # A mean over no targets is no number.
            loss = None
        if loss is not None:
            loss = loss.detach() if isinstance(loss, Tensor) else loss
            if isinstance(loss, Tensor) and loss.is_cuda:
                self._add_loss(loss, loss_weight)
                stats.loss_samples += loss_weight
                loss = None
            else:
                loss = float(loss)
        stats.add_step(num_samples, work, loss, loss_weight)
        stop = self.add(stats, "busy_s", start)
        self.last_step = None if self._is_immediate else stop

    @torch.no_grad()
    def _add_loss(self, loss: Tensor, weight: float) -> None:
        # To read it would wait for the GPU.
        if self._loss is None:
            self._loss = torch.zeros((), dtype=torch.float64, device=loss.device)
        self._loss.add_(loss.reshape(()), alpha=weight)

    def wait(self, moment: Moment | None) -> None:
        """Waits until the device has got to a moment; None: at once. Any thread."""
        if moment is not None:
            self._clock.wait(moment)

    def collect(self) -> None:
        """Reads the seconds that are known by now."""
        unread, clock = self._unread, self._clock
        while unread:
            start, stop, count = unread[0]
            if stop is None:
                seconds = 0.0
            elif clock.is_past(stop) and clock.is_past(start):
                seconds = clock.seconds(start, stop)
            else:
                return
            unread.popleft()
            count(seconds)

    def settle(self) -> None:
        """Waits for the device, and reads all seconds."""
        for start, stop, _ in self._unread:
            # A loop may change streams.
            self.wait(start)
            self.wait(stop)
        self.collect()

    def end_round(self, stats: RoundStats) -> None:
        """Waits for the device, and reads all seconds and losses of the round.

        Args:
            stats: of the round.
        """
        self.settle()
        if self._loss is not None:
            stats.loss_sum += float(self._loss)
            self._loss.zero_()
