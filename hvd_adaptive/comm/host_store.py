"""Stores that ranks share: one of all of them, and where they are thousands, stores of some, so that not all ask rank 0's.

Where there are many ranks, those of a host share a store, where they meet and claim together. Where there are many hosts,
districts of them have one each, where the last ranks of the hosts meet. Only the last one of a district goes on to rank 0's. So a
meeting of 4096 ranks on 512 hosts takes 8, 23 and 23 turns of a thread one after the other in place of 4096. The first rank of a
host or district serves its store, that of a host on the loopback interface only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, TCPStore  # type: ignore[attr-defined,unused-ignore]

from hvd_adaptive.comm.seal import Seal
from hvd_adaptive.comm.store_address import Offer, find_server, serve

# One thread serves a store: below so many ranks, and up to so many hosts, it has time for all of them.
_FROM_RANKS = 65
_MOST_HOSTS = 32
# How long a rendezvous may last is for the heartbeats to judge: they know whether the others still make progress.
FOREVER = timedelta(days=7)


def has_host_stores(hosts: Sequence[str]) -> bool:
    """Returns whether hosts shall have stores of their own: many ranks, several on a host.

    Args:
        hosts: by rank.
    """
    return len(hosts) >= _FROM_RANKS and 1 < len(set(hosts)) <= len(hosts) // 2


def district(rank: int, hosts: Sequence[str]) -> list[int] | None:
    """Returns the ranks of this rank's district, ascending; None where there are no districts.

    Args:
        rank: this rank.
        hosts: by rank.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) <= _MOST_HOSTS:
        return None
    size = math.ceil(math.sqrt(len(names)))
    first = names.index(hosts[rank]) // size * size
    mine = set(names[first : first + size])
    return [other for other, host in enumerate(hosts) if host in mine]


class Hall:
    """Where some ranks meet before the last of them goes on to a larger hall; the largest is that of all ranks. Construction is
    COLLECTIVE over all ranks.

    Args:
        rank: this rank.
        ranks: that share it, ascending, this rank among them.
        gather: gathers a small object from every rank of the world, in rank order, on a way that strangers cannot reach.
        same_host: its ranks are on one host; the store then listens on the loopback interface only.
        seal: of the job; None: the one that the first rank of this hall makes.

    Attributes:
        ranks: as given.
        seal: of the job.
        address: where its store answers, by host and port.

    Raises:
        RuntimeError: on all ranks, if some hall's first rank cannot serve; or it cannot be reached.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: Sequence[int],
        gather: Callable[[Any], list[Any]],
        same_host: bool,
        seal: Seal | None = None,
    ) -> None:
        self.ranks: Sequence[int] = ranks
        self._rank = rank
        self._is_closed = False
        self._server: TCPStore | None = None
        answer: Offer | str | None = None
        if rank == ranks[0]:
            try:
                self._server, answer = serve(same_host=same_host, world_size=len(ranks))
            except RuntimeError as error:
                # What rank 0's says names that rank itself.
                answer = f"rank {rank}: {error}" if rank else str(error)
        answers = gather(answer)
        if errors := [text for text in answers if isinstance(text, str)]:
            raise RuntimeError(errors[0])
        offer = Offer(*answers[ranks[0]])
        self.seal = seal or Seal(offer.secret)
        self.address = find_server(offer, rank, server=f"rank {ranks[0]}'s side channel"), offer.port
        self._arrivals = self.connect()

    def connect(self) -> TCPStore:
        """Opens another connection to the store; calls on one connection wait for each other.

        Raises:
            RuntimeError: the rank that serves it cannot be reached.
        """
        with self._translated():
            return TCPStore(*self.address, is_master=False, timeout=FOREVER, wait_for_workers=False)

    def count_in(self, key: str, amount: int) -> int:
        """Adds this rank to those that have arrived; returns the sum of their amounts."""
        with self._translated():
            return int(self._arrivals.add(key, amount))

    def hear(self, key: str, limit: timedelta | None = None) -> bytes:
        """Waits, asleep, for what :meth:`tell` says; without a limit as long as the connection may."""
        with self._translated():
            if limit is not None:
                # Not always, as it is another message from every rank at once.
                self._arrivals.wait([key], limit)
            return self.seal.open(key, bytes(self._arrivals.get(key)))

    def tell(self, key: str, value: bytes, *, forget: Sequence[str]) -> None:
        """Tells the ranks that wait for it, and deletes what none of them reads any more."""
        with self._translated():
            self._arrivals.set(key, self.seal.close(key, value))  # type: ignore[arg-type]
            for old in forget:
                self._arrivals.delete_key(old)

    def close(self, limit_s: float, *, waits: bool = True) -> None:
        """Ends the connections. The rank that serves waits for the others; repeated calls do nothing.

        Args:
            limit_s: for how many seconds.
            waits: else it serves until its process ends.

        Raises:
            RuntimeError: on that rank, if one of them does not end within so many seconds.
        """
        if self._is_closed:
            return
        self._is_closed = True
        # Who serves may be gone, and then there is nobody to say goodbye to.
        with contextlib.suppress(DistError):
            if self._arrivals.add("closed", 1) == len(self.ranks):
                self._arrivals.set("all closed", "")
            elif self._server is not None:
                if not waits:
                    return
                try:
                    self._arrivals.wait(["all closed"], timedelta(seconds=limit_s))
                except DistStoreError as error:
                    closed = self._arrivals.add("closed", 0)
                    raise RuntimeError(
                        f"only {closed} of {len(self.ranks)} ranks closed the side channel within {limit_s} s: the others ended "
                        "without close() or are still busy"
                    ) from error
        del self._arrivals
        self._server = None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self._is_closed:
            raise RuntimeError("the side channel is closed")
        try:
            yield
        except DistStoreError:
            raise
        except DistError as error:
            first, (host, port) = f"rank {self.ranks[0]}", self.address
            raise RuntimeError(
                f"rank {self._rank} lost the side channel that {first} serves at {host}:{port}: {first} has ended or the network "
                f"to it is down; look at {first}'s output first"
            ) from error


class SharedStore(Hall):
    """A hall with counters and values, see :class:`hvd_adaptive.comm.protocols.Store`. Options as for :class:`Hall`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # A rank may claim while it waits for others.
        self._claims = self.connect()

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at 0 and returns its new value. Any thread."""
        with self._translated():
            return int(self._claims.add(f"user/{key}", amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a value if it is the expected one, and returns what it is then. Any thread."""
        name = f"user/{key}"
        sealed = [self.seal.close(name, text.encode()).decode() if text else "" for text in (expected, desired)]
        with self._translated():
            return self.seal.open(name, bytes(self._claims.compare_set(name, *sealed))).decode()

    def forget(self, key: str) -> None:
        """Deletes a counter or value; one that is not there is no error. Any thread."""
        with self._translated():
            self._claims.delete_key(f"user/{key}")


class HostStore(SharedStore):
    """A host's hall and store; see :class:`hvd_adaptive.comm.protocols.HostStore`.

    Args:
        rank: this rank.
        hosts: by rank.
        options: as for :class:`Hall`.

    Attributes:
        num_hosts: of the world.
    """

    def __init__(self, *, rank: int, hosts: Sequence[str], **options: Any) -> None:
        ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        super().__init__(rank=rank, ranks=ranks, same_host=True, **options)
        self.num_hosts = len(set(hosts))
