"""Waiting for Horovod's operations asleep.

Horovod's own wait asks and calls sched_yield in turns, with Python's lock taken each time. That is as quick as any where each
rank has a core. With more ranks than cores it takes one from ranks that still compute, and from the threads that move the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# The kernel adds about 50 us to each sleep.
_SHORTEST_S, _LONGEST_S = 2e-5, 5e-4
# Of what has been waited: how much later than the end the wait may be over.
_LATE = 0.05


def wait_asleep(is_done: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> None:
    """Returns once ``is_done()``: at once, or after sleeps that are longer the longer it takes."""
    if is_done():
        return
    start = clock()
    while True:
        time.sleep(min(max(_SHORTEST_S, _LATE * (clock() - start)), _LONGEST_S))
        if is_done():
            return


def sleeping_wait(mpi_lib: Any) -> Callable[[int], Any]:
    """Returns what does the same as ``horovod_torch_wait_and_clear`` of Horovod's library, asleep."""
    wait, poll = mpi_lib.horovod_torch_wait_and_clear, mpi_lib.horovod_torch_poll

    def wait_and_clear(handle: int) -> Any:
        wait_asleep(lambda: poll(handle))
        return wait(handle)

    return wait_and_clear


@contextmanager
def waits_asleep(mpi_lib: Any) -> Iterator[None]:
    """Within it, Horovod's functions wait asleep.

    Args:
        mpi_lib: the library, where they look their wait up.
    """
    before = mpi_lib.horovod_torch_wait_and_clear
    mpi_lib.horovod_torch_wait_and_clear = sleeping_wait(mpi_lib)
    try:
        yield
    finally:
        mpi_lib.horovod_torch_wait_and_clear = before
