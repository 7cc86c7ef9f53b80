"""Waiting for what a thread or a process does."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns when something holds.

    Raises:
        TimeoutError: if it does not within a minute.
    """
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"what the test waits for has not come within {LIMIT_S:.0f} s")
        time.sleep(0.005)
