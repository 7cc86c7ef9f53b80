"""Ranks that wait for each other for too long: says which rank waits in what, and what to do.

A collective that only some ranks call makes them wait for ever. So does a script that decides by a count of samples what comes
next, with unequal shares: most such scripts are recognized before; this is for those that are not. No job is ended here: the
others may only compute for long.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvd_adaptive.cluster.host import may_hang_at_fork
from hvd_adaptive.cluster.output import say
from hvd_adaptive.comm.protocols import Store

# With unequal shares, which may be why.
_UNEQUAL_LIMIT_S = 60.0
_SEEN = "long-wait"
_NOWHERE = "no collective that is seen here"
_MOST_NAMED = 8


class LongWaits:
    """Watches this rank's waits, by a thread, from :meth:`start` on.

    Args:
        limit_s: seconds of a wait after which one rank tells of all that wait, once.
        say: tells it.
    """

    def __init__(self, limit_s: float, say: Callable[[str], None] = say) -> None:
        self._limit_s = limit_s
        self._say = say
        self._rank = 0
        self._num_ranks = 1
        self._store: Store | None = None
        self._are_unequal = False
        self._thread: threading.Thread | None = None
        # What is waited for and since when; replaced as a whole.
        self._wait: tuple[object, float] | None = None
        self._told: tuple[object, float] | None = None

    def start(self, rank: int, num_ranks: int, store: Store | None) -> None:
        """Begins to watch; a second call only renews the arguments.

        Args:
            rank: this rank.
            num_ranks: ranks that wait for each other.
            store: tells ranks where the others wait; None: each rank speaks for itself.
        """
        self._rank, self._num_ranks, self._store = rank, num_ranks, store
        if self._thread is None and num_ranks > 1:
            self._thread = threading.Thread(target=self._watch, name="hvd_adaptive.long_waits", daemon=True)
            self._thread.start()

    def shares_differ(self) -> None:
        """Takes note that shares are unequal from now on."""
        self._are_unequal, self._limit_s = True, min(self._limit_s, _UNEQUAL_LIMIT_S)

    @contextmanager
    def of(self, what: object) -> Iterator[None]:
        """A wait for other ranks, in a collective of that name.

        Raises:
            RuntimeError: as within; where unequal shares may be the cause, it says so.
        """
        self._wait = what, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not self._are_unequal or "Mismatched" not in str(error):
                raise
            raise RuntimeError(
                f"{error} [hvd_adaptive: in {what}. The ranks' shares of a batch are unequal; if this is as long as the "
                "batch, run the script with --shares equal]"
            ) from None
        finally:
            self._wait = None

    @property
    def _poll_s(self) -> float:
        return min(self._limit_s / 12, 5.0)

    def _watch(self) -> None:
        while True:
            time.sleep(self._poll_s)
            wait = self._wait
            # Without rank 0 there is no store, and the job ends.
            with contextlib.suppress(RuntimeError):
                if self._told is not None and wait is not self._told:
                    self._told = None
                    if self._store is not None:
                        self._store.forget(f"{_SEEN}.{self._rank}")
                        self._store.add(_SEEN, -1)
                elif wait is not None and wait is not self._told and time.monotonic() - wait[1] >= self._limit_s:
                    self._told = wait
                    self._tell(str(wait[0]))

    def _tell(self, place: str) -> None:
        by_place = {place: [self._rank]}
        if self._store is not None:
            self._store.compare_set(f"{_SEEN}.{self._rank}", "", place)
            if self._store.add(_SEEN, 1) > 1:
                return
            # Others that wait as long come here until then.
            time.sleep(2 * self._poll_s)
            by_place = {}
            for rank in range(self._num_ranks):
                seen = self._store.compare_set(f"{_SEEN}.{rank}", _NOWHERE, _NOWHERE) or _NOWHERE
                by_place.setdefault(seen, []).append(rank)
        places = "; ".join(f"{_ranks(ranks)} in {seen}" for seen, ranks in list(by_place.items())[:_MOST_NAMED])
        self._say(f"after {self._limit_s:.0f} s ranks still wait for each other: {places}. {self._advice(by_place)}")

    def _advice(self, by_place: dict[str, list[int]]) -> str:
        advice = "The others compute for long, or wait for something else. If it does not go on, look for a collective that only "
        if len(by_place) > 1 and _NOWHERE not in by_place:
            advice = "That can be for ever: all ranks must call the same collectives in the same order. Look for one that only "
        advice += "some ranks call, as under `if hvd.rank() == 0:`, or for a step that some leave out, as for a loss that is not "
        advice += "finite. The job goes on waiting until you end it"
        if self._are_unequal:
            advice += (
                ". The ranks' shares of a batch are unequal, too, and a script that goes by numbers of samples may then part "
                "them: to rule this out, run it with --shares equal"
            )
        return advice + _of_forks(platform.python_version())


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _of_forks(version: str) -> str:
    """Returns what else the reason may be."""
    if not may_hang_at_fork(version):
        return ""
    return f". If a DataLoader has workers, one may not have started: Python {version} has a fault there (docs/sharp-bits.md)"
