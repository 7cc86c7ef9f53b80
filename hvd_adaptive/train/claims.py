"""Where a rank's next piece of a mega-batch comes from: a cursor that all ranks share, or a part of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hvd_adaptive.transport.base import Transport

# How much to claim of so much remaining work.
ClaimSize = Callable[[int], int]


class Claims(Protocol):
    """Work of one round, handed out piece by piece."""

    def claim(self, size: ClaimSize) -> tuple[int, int] | None:
        """Takes a piece: the work in [start, stop), never given to anyone else; None when nothing is left."""


class SharedCursor:
    """Whoever is free takes the next piece.

    Args:
        transport: the world.
        key: names the cursor; never used twice.
        total_work: work of the mega-batch.
    """

    def __init__(self, transport: Transport, key: str, *, total_work: int) -> None:
        self._transport = transport
        self._key = key
        self._total_work = total_work
        self._seen = ""

    def claim(self, size: ClaimSize) -> tuple[int, int] | None:
        """Takes a piece from the cursor.

        A compare-and-set, not an atomic add: a claim's size depends on the cursor, and only then can no claim be cut to a
        sliver.
        """
        while (position := int(self._seen.partition(":")[0] or 0)) < self._total_work:
            stop = position + size(self._total_work - position)
            # The rank makes the value unique: two ranks may want to move the cursor to the same place.
            wanted = f"{stop}:{self._transport.rank}"
            self._seen = self._transport.compare_set(self._key, self._seen, wanted)
            if self._seen == wanted:
                return position, stop
        return None


class OwnPart:
    """The rank takes the pieces of its own part, however long the others need for theirs.

    Args:
        start: where the part begins, in work.
        stop: where it ends.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._position = start
        self._stop = stop

    def claim(self, size: ClaimSize) -> tuple[int, int] | None:
        """Takes a piece from the part."""
        if self._position == self._stop:
            return None
        start = self._position
        self._position += size(self._stop - start)
        return start, self._position
