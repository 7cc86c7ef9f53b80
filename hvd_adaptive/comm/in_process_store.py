"""The side channel's store for a world of one process: the same counters and values, without a server."""

from __future__ import annotations

import threading


class InProcessStore:
    """The counters and values of a world of one process.

    Args:
        shared: another rank's, for the same counters and values; None: new ones.
    """

    def __init__(self, shared: InProcessStore | None = None) -> None:
        self._lock: threading.Lock = shared._lock if shared else threading.Lock()
        self._counters: dict[str, int] = shared._counters if shared else {}
        self._values: dict[str, str] = shared._values if shared else {}

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which starts at 0, and returns its new value."""
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a value if it is the expected one ("" for none), and returns what it is then."""
        with self._lock:
            if self._values.get(key, "") == expected:
                self._values[key] = desired
            return self._values.get(key, "")

    def forget(self, key: str) -> None:
        """Forgets a counter or value."""
        with self._lock:
            self._counters.pop(key, None)
            self._values.pop(key, None)
