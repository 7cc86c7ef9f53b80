"""Waiting for Horovod's operations: over as soon as they are, without a core, and only where it is asked for."""

from __future__ import annotations

import threading
import time

import pytest

from hvd_adaptive.comm.horovod_wait import wait_asleep, waits_asleep


class Library:
    """Operations that end when they are told to; its own wait returns what it was asked for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.num_polls = 0

    def horovod_torch_poll(self, handle: int) -> int:
        assert handle == 7
        self.num_polls += 1
        return int(self.done.is_set())

    def horovod_torch_wait_and_clear(self, handle: int) -> tuple[str, int]:
        return "cleared", handle


def test_a_wait_uses_no_core_and_ends_when_the_operation_does() -> None:
    library = Library()
    own = library.horovod_torch_wait_and_clear
    ended: list[float] = []

    def end() -> None:
        ended.append(time.perf_counter())
        library.done.set()

    wall, used = time.perf_counter(), time.thread_time()
    threading.Timer(0.3, end).start()
    with waits_asleep(library):
        assert library.horovod_torch_wait_and_clear(7) == ("cleared", 7)
    over, used = time.perf_counter(), time.thread_time() - used
    # How late the wait may be over is for the test of its naps: a busy machine wakes nobody in time.
    assert ended and used < 0.33 * (over - wall) and 1 < library.num_polls < 10_000 * (over - wall)
    assert library.horovod_torch_wait_and_clear == own


def test_what_is_over_is_not_waited_for_and_an_error_ends_the_exchange() -> None:
    library = Library()
    library.done.set()
    with pytest.raises(AssertionError), waits_asleep(library):
        library.horovod_torch_wait_and_clear(8)
    with waits_asleep(library):
        library.horovod_torch_wait_and_clear(7)
    assert library.num_polls == 1 and library.horovod_torch_wait_and_clear(7) == ("cleared", 7)
    assert library.num_polls == 1


def test_short_waits_are_asked_for_often_and_long_ones_seldom() -> None:
    now, naps = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        naps.append(seconds)
        now += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", sleep)
        wait_asleep(lambda: now > 1.0, lambda: now)
    assert naps[0] < 5e-5 and max(naps) <= 1e-3 and now < 1.002
