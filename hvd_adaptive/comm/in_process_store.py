"""The side channel's store for a world of one rank: the same counters and values, without a server."""

from __future__ import annotations

import threading


def not_set(key: str, limit_s: float) -> RuntimeError:
    """Makes the error for a key that did not come within limit_s seconds."""
    return RuntimeError(
        f"no rank set {key!r} within {limit_s} s (stall_limit_s): another rank failed or is late"
    )


class InProcessStore:
    """The counters and values of a world of one rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counters: dict[str, int] = {}
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which starts at 0, and returns its new value."""
        with self._changed:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def set(self, key: str, value: bytes) -> None:
        """Stores a value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, limit_s: float) -> bytes:
        """Returns a value, waiting for it up to limit_s seconds; else RuntimeError."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, limit_s):
                raise not_set(key, limit_s)
            return self._values[key]

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a value if it is the expected one ("" for none), and returns what it is then."""
        with self._changed:
            if self._values.get(key, b"").decode() == expected:
                self._values[key] = desired.encode()
            return self._values[key].decode()

    def delete(self, key: str) -> None:
        """Forgets a counter or value."""
        with self._changed:
            self._counters.pop(key, None)
            self._values.pop(key, None)
