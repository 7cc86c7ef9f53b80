"""Whether all ranks have come to the same point of a script, without waiting for a rank that does not come.

A script may validate or save on all ranks or on rank 0 alone, and only the first is a place for a merge. So ranks tell where
they are in a store beside Horovod: the farthest position of any, which rises before every optimizer step and before every wait
for other ranks. A rank that stands at a point waits until all others stand there or one of them has gone further.
"""

from __future__ import annotations

import time

from hvd_adaptive.comm.protocols import Store

_POLL_S = 0.5e-3
# Positions since the last merge count in the low bits, so that ranks that count differently agree again after a merge.
_MERGE_BITS = 32
# Calls of hvd.join(), which each rank makes as often as the others, count above the merges, of which it misses some.
_JOIN_BITS = 64
_FARTHEST = "position.farthest"
# Beyond all positions: a rank whose script is over.
_OVER = 1 << 128


class Meetings:
    """The ranks' positions.

    Args:
        store: shared by all ranks.
        world_size: number of ranks.
        patience_s: seconds after which a rank gives up a point, for all ranks: another one may wait for it in a way that is not
            seen here (MPI's own calls).
    """

    def __init__(self, store: Store, *, world_size: int, patience_s: float) -> None:
        self._store = store
        self._world_size = world_size
        self._patience_s = patience_s
        self._position = 0
        self._num_joins = 0
        self._asked_at = -1
        # The farthest position of any rank, as far as this rank knows.
        self._farthest = ""

    def advance(self) -> None:
        """Takes note that this rank goes on: to a step, or to a wait for others."""
        self._move(self._position + 1)

    def merged(self, num_merges: int) -> None:
        """Takes note of a merge, after which all ranks are at the same point.

        Args:
            num_merges: merges so far, or since the last hvd.join(); the same on every rank.
        """
        self._move(max(self._position, (self._num_joins << _JOIN_BITS) + (num_merges << _MERGE_BITS)))

    def joining(self) -> None:
        """Takes note that this rank calls hvd.join(), beyond all points where the others may stand before theirs."""
        self._num_joins += 1
        self._move(self._num_joins << _JOIN_BITS)

    def over(self) -> None:
        """Takes note that this rank's script is over."""
        self._move(max(self._position, _OVER))

    def all_here(self) -> bool:
        """Returns whether all ranks stand at this point, the same on all that ask; False when asked there again.

        Waits for ranks that are not as far yet.
        """
        if self._asked_at == self._position:
            return False
        self._asked_at = self._position
        here, verdict = f"meet.{self._position}", f"meet.{self._position}.verdict"
        self._store.add(here, 1)
        end = time.monotonic() + self._patience_s
        while True:
            # In this order: who has gone further after it stood here has seen that all stood here.
            gone = self._look() > self._position
            if self._store.add(here, 0) == self._world_size:
                return self._store.compare_set(verdict, "", "all") == "all"
            if gone:
                return False
            if time.monotonic() > end:
                return self._store.compare_set(verdict, "", "late") == "all"
            time.sleep(_POLL_S)

    def _move(self, position: int) -> None:
        self._position = position
        while int(self._farthest or "0") < position:
            # One operation, unless another rank has come to a place between since this one looked.
            self._farthest = self._store.compare_set(_FARTHEST, self._farthest, str(position))

    def _look(self) -> int:
        """Returns the farthest position of any rank: one operation, however many ranks there are."""
        self._farthest = self._store.compare_set(_FARTHEST, self._farthest, self._farthest or "0")
        return int(self._farthest)
