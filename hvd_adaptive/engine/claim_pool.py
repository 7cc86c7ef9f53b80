"""Claims of several batches at once: by the ranks of a host together, or by one rank for its next steps.

A cursor is served by one thread, which thousands of ranks that claim one batch after the other would keep waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from hvd_adaptive.algorithm.ledger import ClaimRule, batches_ahead
from hvd_adaptive.comm.in_process_store import InProcessStore
from hvd_adaptive.comm.protocols import Store, Transport
from hvd_adaptive.engine.claims import Claim, Claims, ClaimSize, EqualClaims, SharedCursor, StepFrontier

# Between two looks at a pool that another rank fills: two operations on the world's store.
_FILLING_S = 2e-4


def open_claims(
    transport: Transport,
    round_id: int,
    *,
    total_work: int,
    start: int,
    rule_of: Callable[[Sequence[int]], ClaimRule],
    equal: tuple[int, int, int] | None = None,
) -> tuple[Claims, Callable[[], None]]:
    """Returns what this rank takes batches from, and what removes it when all ranks have ended the round.

    Args:
        transport: the world.
        round_id: names the round; never used twice.
        total_work: work of the round.
        start: work before it, which was settled; equal on all ranks.
        rule_of: how much some ranks claim together.
        equal: where ranks have equally many batches: work of a batch, the unit of what is left, and batches of a rank that it
            takes without asking.
    """
    key, rank = f"claim.{round_id}", transport.rank
    shared: EqualClaims | SharedCursor
    least = rule_of([rank]).least
    if equal is not None:
        size, unit, stretch = equal
        shared = EqualClaims(
            # One stretch is promised at a time, as it takes two seconds.
            StepFrontier(transport, key, num_steps=total_work), rank=rank, world_size=transport.world_size, size=size,
            total_work=total_work, start=start, unit=unit, stretch=stretch, least=least,
        )  # fmt: skip
        pool = None
    else:
        shared = SharedCursor(transport, key, total_work=total_work, start=start, least=least)
        pool = open_pool(shared, transport, f"pool.{round_id}", rule_of=rule_of)

    def forget() -> None:
        if rank == 0:
            shared.forget()
        if pool is not None and transport.local_rank == 0:
            pool.forget()

    return pool or shared, forget


def open_pool(
    cursor: SharedCursor, transport: Transport, key: str, *, rule_of: Callable[[Sequence[int]], ClaimRule]
) -> PooledCursor | None:
    """Returns what this rank claims from in place of the cursor; None where that has time for every rank's every claim.

    Args:
        cursor: all ranks'.
        transport: the world.
        key: names the pool; never used twice.
        rule_of: how much some ranks claim together.
    """
    host = transport.host_store
    num_ahead = batches_ahead(transport.world_size if host is None else host.num_hosts)
    if host is None and num_ahead == 1:
        return None
    return PooledCursor(
        cursor,
        host or InProcessStore(),
        key,
        rank=transport.rank,
        rule=rule_of([transport.rank] if host is None else host.ranks),
        num_ahead=num_ahead,
    )


class PooledCursor:
    """Pieces of the shared cursor that several ranks take at once and hand out among themselves, or one rank for its next steps.

    A rank that finds the pool empty fills it from the cursor, while the others of its pool wait for it. So the cursor is asked
    seldom, however many ranks there are. Every piece that was taken from the cursor is handed out, also after it was closed.

    Args:
        cursor: all ranks'.
        store: shared by the ranks of the pool.
        key: names the pool there; never used twice.
        rank: this rank.
        rule: how much the ranks of the pool claim together.
        num_ahead: the most batches for each of them at once.

    Attributes:
        end: as in :class:`Claims`.
    """

    def __init__(
        self,
        cursor: SharedCursor,
        store: Store,
        key: str,
        *,
        rank: int,
        rule: ClaimRule,
        num_ahead: int = 1,
    ) -> None:
        self._cursor = cursor
        self._store = store
        self._key = key
        self._rank = rank
        self._rule = rule
        self._num_ahead = num_ahead
        self._seen = ""
        self._num_moves = 0
        self.end: int | None = None

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes a piece from the pool, which it fills first if it is empty."""
        while True:
            state, _, numbers = self._seen.partition(" ")
            if state == "filling":
                time.sleep(_FILLING_S)
                self._seen = self._store.compare_set(self._key, self._seen, self._seen)
            elif state == "over":
                end = numbers.split()[0]
                self.end = None if end == "-" else int(end)
                return None
            elif self._seen and (pool := [int(number) for number in numbers.split()[:3]])[0] < pool[1]:
                start, stop, left = pool
                wanted = self._cut(stop - start, left, size)
                if not wanted:
                    return None
                if self._move(f"pool {start + wanted} {stop} {left}"):
                    return start, start + wanted
            elif self._move("filling"):
                claim = self._fill(size)
                if claim is not None or self._seen.startswith("pool"):
                    return claim

    def close(self) -> None:
        """Ends the round at the cursor; what the pools hold is still handed out."""
        self._cursor.close()

    def forget(self) -> None:
        """Deletes the pool, which no rank will use again."""
        self._store.forget(self._key)

    def _fill(self, size: ClaimSize) -> Claim | None:
        """Takes a piece from the cursor, keeps this rank's part and leaves the rest in the pool."""
        left, leaves = 0, False

        def amount(remaining: int) -> int:
            nonlocal left, leaves
            leaves = not size(remaining)
            taken = 0 if leaves else self._rule.size_together(remaining, num_ahead=self._num_ahead)
            left = remaining - taken
            return taken

        piece = self._cursor.claim(amount)
        if piece is None:
            end = self._cursor.end
            self._move("pool 0 0 0" if leaves else f"over {'-' if end is None else end}")
            return None
        start, stop = piece[:2]
        left = self._rule.left_beside(left, stop - start)
        wanted = self._cut(stop - start, left, size)
        self._move(f"pool {start + wanted} {stop} {left}")
        return (start, start + wanted) if wanted else None

    def _cut(self, held: int, left: int, size: ClaimSize) -> int:
        # Other pools hold as much for their speed.
        wanted = min(size(left + math.ceil(held / self._rule.speed_share)), held)
        return held if wanted and held - wanted < self._rule.least else wanted

    def _move(self, state: str) -> bool:
        """Changes the pool from what this rank has seen of it; returns whether no other rank was quicker."""
        self._num_moves += 1
        # Unlike any other rank's move.
        desired = f"{state} {self._rank} {self._num_moves}"
        self._seen = self._store.compare_set(self._key, self._seen, desired)
        return self._seen == desired
