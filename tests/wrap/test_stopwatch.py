"""Seconds of computing, on the GPU that trains."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from hvd_adaptive.wrap.stopwatch import Stopwatch


class Event:
    """As torch.cuda.Event: it can be compared with those of its own device only."""

    def __init__(self, enable_timing: bool) -> None:
        self.device: torch.device | None = None

    def record(self, stream: torch.device | None = None) -> None:
        self.device = stream

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        assert self.device == end.device
        return 2000.0


class OnGpu(nn.Parameter):
    """Says that it is on a GPU."""

    is_cuda, device = True, torch.device("cuda", 1)  # type: ignore[assignment]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    # A stream is its device here; the current one is the first.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device or torch.device("cuda", 0))


def test_the_device_that_trains_is_timed_and_not_the_current_one(cuda: None) -> None:
    watch = Stopwatch(time.perf_counter)
    watch.start()
    # What began on another device does not count.
    watch.trains([nn.Parameter(torch.ones(1)), OnGpu(torch.ones(1))])
    assert watch.stop() is None
    watch.start()
    # A second optimizer, of a part elsewhere, changes nothing.
    other: Any = OnGpu(torch.ones(1))
    other.device = torch.device("cuda", 2)
    watch.trains([other])
    stretch = watch.stop()
    assert stretch is not None and stretch.events is not None
    assert [event.device for event in stretch.events] == [torch.device("cuda", 1)] * 2
    assert stretch.seconds() == 2.0


def test_a_model_on_the_cpu_beside_a_gpu_in_use(cuda: None) -> None:
    watch = Stopwatch(time.perf_counter)
    watch.trains([nn.Parameter(torch.ones(1))])
    watch.start()
    stretch = watch.stop()
    assert stretch is not None and stretch.seconds() == 2.0
