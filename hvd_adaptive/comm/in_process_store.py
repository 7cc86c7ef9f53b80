"""The side channel's store for a world of one rank: the same counters and values, without a server."""

from __future__ import annotations

import threading


class InProcessStore:
    """The counters and values of a world of one rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._values: dict[str, str] = {}

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
