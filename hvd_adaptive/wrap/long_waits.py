"""Ranks that wait for each other for too long while their shares are unequal: says for what, and how to run without them.

A script that decides by a count of samples what comes next sends ranks with unequal shares to different exchanges, in which
each waits for the others for ever. Most such scripts are recognized before; this is for those that are not.
"""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvd_adaptive.cluster.host import may_hang_at_fork

_LIMIT_S = 60.0


def _say(text: str) -> None:
    sys.stderr.write(f"hvd-adaptive: {text}\n")
    sys.stderr.flush()


class LongWaits:
    """Watches this rank's waits, by a thread, from :meth:`start` on.

    Args:
        limit_s: seconds of a wait after which it is told of, once.
        say: tells it.
    """

    def __init__(self, limit_s: float = _LIMIT_S, say: Callable[[str], None] = _say) -> None:
        self._limit_s = limit_s
        self._say = say
        self._rank = 0
        self._num_ranks = 1
        self._thread: threading.Thread | None = None
        # What is waited for and since when; replaced as a whole.
        self._wait: tuple[object, float] | None = None
        self._told: tuple[object, float] | None = None

    def start(self, rank: int, num_ranks: int) -> None:
        """Begins to watch, as shares are unequal from now on; a second call does nothing."""
        if self._thread is None:
            self._rank, self._num_ranks = rank, num_ranks
            self._thread = threading.Thread(target=self._watch, name="hvd_adaptive.long_waits", daemon=True)
            self._thread.start()

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
            if "Mismatched" not in str(error):
                raise
            raise RuntimeError(
                f"{error} [hvd_adaptive: in {what}. The ranks' shares of a batch are unequal; if this is as long as the "
                f"batch, run the script with {equal_shares(self._num_ranks)}]"
            ) from None
        finally:
            self._wait = None

    def _watch(self) -> None:
        while True:
            time.sleep(self._limit_s / 12)
            wait = self._wait
            if wait is None or wait is self._told or time.monotonic() - wait[1] < self._limit_s:
                continue
            self._told = wait
            self._say(
                f"rank {self._rank} has waited {self._limit_s:.0f} s for other ranks in {wait[0]}. Another rank is slow, or "
                "the ranks wait in different places: their shares of a batch are unequal, and a script that goes by numbers of "
                f"samples may then part them. If it does not go on, run it with {equal_shares(self._num_ranks)}"
                + _of_forks(platform.python_version())
            )


def _of_forks(version: str) -> str:
    """Returns what else the reason may be."""
    if not may_hang_at_fork(version):
        return ""
    return f". If a DataLoader has workers, one may not have started: Python {version} has a fault there (docs/sharp-bits.md)"


def equal_shares(num_ranks: int) -> str:
    """Returns the option for equal shares."""
    return f"--shares {','.join(['1'] * num_ranks)}"
