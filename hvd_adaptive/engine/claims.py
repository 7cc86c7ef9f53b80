"""Where a rank's next piece of a mega-batch comes from: a cursor that all ranks share, or a part of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hvd_adaptive.algorithm.ledger import own_parts, steps_ahead
from hvd_adaptive.comm.protocols import Store

# The work [start, stop) of a claim; then, where it did not fit into memory, the samples of each batch that it was cut into.
Claim = tuple[int, ...]
# How much to claim of so much remaining work; 0: leave it to others.
ClaimSize = Callable[[int], int]


class Claims(Protocol):
    """Work of one round, handed out piece by piece."""

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes a piece: the work in [start, stop), never given to anyone else; None when nothing is left, or nothing wanted."""

    def close(self) -> None:
        """Ends the round where it is, for all ranks, if what was taken so far is the first part of it; else does nothing. What
        was taken is to be computed. Any rank, any thread, any time."""

    @property
    def end(self) -> int | None:
        """The work before which all has been taken, where the round was closed early; else None. Once `claim` gave None."""


# Added to a cursor by each rank that closes it; no mega-batch has so much work, and half a million ranks do not overflow it.
_CLOSED = 1 << 44

# Between two looks for a claim of an island's first rank, at first and at most: it asks at about the same time.
_HEARING_S, _MOST_HEARING_S = 2e-4, 2e-3


def _last_start(start: int, total_work: int, least: int) -> int:
    """Returns where the last claim of [start, total_work) begins at the latest. One that ends behind it takes the rest as well,
    so that no rest is smaller than the least claim."""
    return total_work - max(1, min(least, total_work - start))


class SharedCursor:
    """Whoever is free takes the next piece, until all is taken or one rank closes the cursor.

    Args:
        transport: the world.
        key: names the cursor; never used twice.
        total_work: work of the mega-batch.
        start: work before it, which was settled without it; equal on all ranks.
        least: no claim is smaller, where there is so much work; >= 1, equal on all ranks.

    Attributes:
        end: as in :class:`Claims`.
    """

    def __init__(self, transport: Store, key: str, *, total_work: int, start: int = 0, least: int = 1) -> None:
        self._transport = transport
        self._start = start
        self._key = key
        self._total_work = total_work
        self._last_start = _last_start(start, total_work, least)
        self.end: int | None = None
        self._is_closing = self._is_over = False

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes a piece from the cursor.

        Reads it and adds to it: two operations, however many ranks claim at once. A compare-and-set fails for all of them but
        one, so that N ranks which begin a round together need N^2 / 2. What others claim between the two makes a claim
        somewhat larger than its fair part of the rest.
        """
        if self._is_over:
            return None
        position = self._start + self._transport.add(self._key, 0)
        if position <= self._last_start:
            wanted = size(self._total_work - position)
            if not wanted:
                return None
            position = self._start + self._transport.add(self._key, wanted) - wanted
            if position <= self._last_start:
                stop = position + wanted
                return position, stop if stop <= self._last_start else self._total_work
        self._is_over = True
        if position >= _CLOSED:
            self.end = self._closed_at()
        return None

    def close(self) -> None:
        """Ends the round at the cursor."""
        if self._is_closing:
            return
        self._is_closing = True
        position = self._start + self._transport.add(self._key, _CLOSED) - _CLOSED
        if position < _CLOSED:
            self._transport.add(self._end_key, min(position, self._total_work) + 1)

    def forget(self) -> None:
        """Deletes the cursor, which no rank will use again."""
        self._transport.forget(self._key)
        self._transport.forget(self._end_key)

    def _closed_at(self) -> int | None:
        # Who closed the cursor is about to say where: others may have added to it meanwhile.
        while not (end := self._transport.add(self._end_key, 0)):
            time.sleep(1e-3)
        return end - 1 if end - 1 <= self._last_start else None

    @property
    def _end_key(self) -> str:
        return f"{self._key}.end"


class StepFrontier:
    """How far the ranks have come in a round of equal numbers of steps: it ends after the last step that some rank has promised.

    A rank promises as many steps at once as take about 0.2 s (:func:`hvd_adaptive.algorithm.ledger.steps_ahead`), so that it asks
    the store a few times a second and not at every step.

    Args:
        transport: the world.
        key: names it; never used twice.
        num_steps: steps of the round.
        num_prefetched: steps that a rank begins before it has made the first of them; infinite: it promises one at a time.
        clock: seconds.
    """

    def __init__(
        self,
        transport: Store,
        key: str,
        *,
        num_steps: int,
        num_prefetched: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._transport = transport
        self._key = key
        self._num_steps = num_steps
        self._num_prefetched = num_prefetched
        self._clock = clock
        self._seen = ""
        self._asked_step, self._asked_s = 0, 0.0

    def begin(self, step: int) -> bool:
        """Returns whether this rank may begin a step, which then every rank will make.

        Args:
            step: its number in the round, from 0; each rank begins them in order.
        """
        if self._position(self._seen) < step and not self._is_closed(self._seen):
            last = min(step + self._ahead(step), self._num_steps) - 1
            while self._position(self._seen) < step and not self._is_closed(self._seen):
                self._seen = self._transport.compare_set(self._key, self._seen, f"{last}:")
        return self._position(self._seen) >= step

    def _ahead(self, step: int) -> int:
        now, ahead = self._clock(), 1
        # The first ones are asked for together, before any was made.
        if step > self._asked_step >= self._num_prefetched:
            ahead = steps_ahead((now - self._asked_s) / (step - self._asked_step))
        self._asked_step, self._asked_s = step, now
        return ahead

    def close(self) -> None:
        """Ends the round after the last step that some rank has promised. Any rank, any thread, any time."""
        seen = self._seen
        while not self._is_closed(seen) and (position := self._position(seen)) < self._num_steps - 1:
            seen = self._transport.compare_set(self._key, seen, f"{position}:closed")

    def forget(self) -> None:
        """Deletes what was promised, for which no rank will ask again."""
        self._transport.forget(self._key)

    @property
    def end(self) -> int | None:
        """The last step, where the round was closed, else None; final once a rank was refused to begin a step."""
        return self._position(self._seen) if self._is_closed(self._seen) else None

    @staticmethod
    def _position(value: str) -> int:
        return int(value.partition(":")[0]) if value else -1

    @staticmethod
    def _is_closed(value: str) -> bool:
        return value.endswith("closed")


class EqualClaims:
    """Each rank takes as many batches as every other one, in turns with them. On a busy link a claim of each would wait.

    A rank asks whether the round goes on only before each stretch of batches, except for the first one. A round that is closed
    ends after the last stretch that some rank has begun.

    Args:
        frontier: of stretches.
        rank: this rank.
        world_size: number of ranks.
        size: work of a batch.
        total_work: work of the mega-batch. What is left after the last whole batches is divided among the ranks.
        start: work before it, which was settled.
        unit: a rank's part of what is left is a whole number of so much work.
        stretch: batches of a rank.
        least: no claim is smaller, where there is so much work: what is left of less belongs to the batch before it.

    Attributes:
        end: as in :class:`Claims`.
    """

    def __init__(
        self,
        frontier: StepFrontier,
        *,
        rank: int,
        world_size: int,
        size: int,
        total_work: int,
        start: int,
        unit: int,
        stretch: int,
        least: int = 1,
    ) -> None:
        self._frontier = frontier
        self._rank = rank
        self._size = size
        self._together = world_size * size
        self._start = start
        self._total_work = total_work
        self._last_start = _last_start(start, total_work, least)
        self._num_whole, left = divmod(total_work - start, self._together)
        self._num_turns = -(-(self._last_start + 1 - start) // self._together)
        self._edges = own_parts(np.ones(world_size), left, unit=unit)
        self._stretch = stretch
        self._num_taken = 0
        self.end: int | None = None

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes the next batch, whatever size is asked for."""
        number = self._num_taken
        first = self._start + number * self._together
        if number == self._num_turns or self.end is not None:
            return None
        if number and number % self._stretch == 0 and not self._frontier.begin(number // self._stretch):
            self.end = first
            return None
        self._num_taken += 1
        if number < self._num_whole:
            start = first + self._rank * self._size
            stop = start + self._size
        else:
            start, stop = first + int(self._edges[self._rank]), first + int(self._edges[self._rank + 1])
        if start == stop or start > self._last_start:
            return None
        return start, stop if stop <= self._last_start else self._total_work

    def close(self) -> None:
        """Ends the round after the last stretch that some rank has begun."""
        self._frontier.close()

    def forget(self) -> None:
        """Deletes the frontier."""
        self._frontier.forget()


class OwnPart:
    """The rank takes the pieces of its own part, however long the others need for theirs.

    Args:
        start: where the part begins, in work.
        stop: where it ends.

    Attributes:
        end: None: it cannot be closed, as the ranks' parts so far would not be the first part of the round.
    """

    end = None

    def __init__(self, start: int, stop: int) -> None:
        self._position = start
        self._stop = stop

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes a piece from the part."""
        if self._position == self._stop:
            return None
        start = self._position
        self._position += size(self._stop - start)
        return start, self._position

    def close(self) -> None:
        """Goes on to the part's end."""


class IslandClaims:
    """What the first rank of an island claims, for each of its ranks, in the same order.

    Each rank asks from the thread that loads its batches, and so they meet in the store and not in a collective.

    Args:
        claims: where the first rank takes pieces; the others only close it.
        store: of all ranks.
        key: names the island's round there; never used twice.
        leads: whether this rank is the island's first.

    Attributes:
        end: as in :class:`Claims`.
    """

    def __init__(self, claims: Claims, store: Store, key: str, *, leads: bool) -> None:
        self._claims = claims
        self._store = store
        self._key = key
        self._leads = leads
        self._num_claims = 0
        self.end: int | None = None

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes the island's next piece; only the first rank's ``size`` counts."""
        key = f"{self._key}.{self._num_claims}"
        self._num_claims += 1
        words = (self._take(key, size) if self._leads else self._hear(key)).split()
        if words[0] == "none":
            self.end = None if words[1] == "-" else int(words[1])
            return None
        return int(words[0]), int(words[1])

    def close(self) -> None:
        """Closes what the first rank claims from."""
        self._claims.close()

    def forget(self) -> None:
        """Deletes the claims, which no rank of the island will ask for again."""
        for number in range(self._num_claims):
            self._store.forget(f"{self._key}.{number}")

    def _take(self, key: str, size: ClaimSize) -> str:
        claim = self._claims.claim(size)
        end = self._claims.end
        told = f"none {'-' if end is None else end}" if claim is None else f"{claim[0]} {claim[1]}"
        return self._store.compare_set(key, "", told)

    def _hear(self, key: str) -> str:
        pause = _HEARING_S
        # A value that is never set: the store answers with what there is, or with one of these.
        while (told := self._store.compare_set(key, "-", "-")) in ("", "-"):
            time.sleep(pause)
            pause = min(2 * pause, _MOST_HEARING_S)
        return told
