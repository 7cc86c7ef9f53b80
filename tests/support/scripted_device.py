"""A device beside this process that takes as long as it is told to, in real time."""

from __future__ import annotations

import time
from typing import Any

import torch

from hvd_adaptive.engine.device_clock import Moment


class ScriptedDevice:
    """See :class:`hvd_adaptive.engine.device_clock.DeviceClock`. A moment is the second at which the device will get there."""

    is_immediate = False

    def __init__(self, seconds_per_sample: float) -> None:
        self.seconds_per_sample = seconds_per_sample
        self.free_s = 0.0

    def launch(self, num_samples: int) -> None:
        """Gives the device work, and returns at once."""
        self.free_s = max(time.perf_counter(), self.free_s) + num_samples * self.seconds_per_sample

    def mark(self) -> Moment:
        return max(time.perf_counter(), self.free_s)

    def is_past(self, moment: Moment) -> bool:
        return time.perf_counter() >= moment

    def wait(self, moment: Moment) -> None:
        time.sleep(max(0.0, moment - time.perf_counter()))

    def seconds(self, start: Moment, stop: Moment) -> float:
        return stop - start


class Samples:
    """A data set of equal samples; says when a batch is made."""

    def __init__(self, num_samples: int, loaded: Any = lambda rows: None) -> None:
        self._num_samples = num_samples
        self._loaded = loaded

    def __len__(self) -> int:
        return self._num_samples

    def get_batch(self, rows: Any) -> Any:
        self._loaded(rows)
        return torch.ones(len(rows), 2), None
