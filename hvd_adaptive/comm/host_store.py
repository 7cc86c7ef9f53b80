"""Stores of a part of the ranks, so that thousands of them do not all ask rank 0's.

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
    """Where some ranks meet before the last of them goes on to a larger hall. Construction is COLLECTIVE over all ranks.

    Args:
        rank: this rank.
        ranks: that share it, ascending, this rank among them.
        gather: gathers a small object from every rank of the world, in rank order, on a way that strangers cannot reach.
        seal: of the job.
        timeout: of calls that wait.
        same_host: its ranks are on one host; the store then listens on the loopback interface only.

    Attributes:
        ranks: as given.

    Raises:
        RuntimeError: on all ranks, if some hall's first rank cannot serve; or it cannot be reached.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: Sequence[int],
        gather: Callable[[Any], list[Any]],
        seal: Seal,
        timeout: timedelta,
        same_host: bool,
    ) -> None:
        self.ranks: Sequence[int] = ranks
        self._rank = rank
        self._seal = seal
        self._server: TCPStore | None = None
        answer: Offer | str | None = None
        if rank == ranks[0]:
            try:
                self._server, answer = serve(same_host=same_host, world_size=len(ranks))
            except RuntimeError as error:
                answer = f"rank {rank}: {error}"
        answers = gather(answer)
        if errors := [text for text in answers if isinstance(text, str)]:
            raise RuntimeError(errors[0])
        offer = Offer(*answers[ranks[0]])
        address = find_server(offer, rank, server=f"rank {ranks[0]}'s store")

        def connect() -> TCPStore:
            return TCPStore(address, offer.port, is_master=False, timeout=timeout, wait_for_workers=False)

        self._connect = connect
        with self._translated():
            self._arrivals = connect()

    def count_in(self, key: str, amount: int) -> int:
        """Adds this rank to those that have arrived; returns the sum of their amounts."""
        with self._translated():
            return int(self._arrivals.add(key, amount))

    def hear(self, key: str) -> bytes:
        """Waits, asleep, for what :meth:`tell` says."""
        with self._translated():
            return self._seal.open(key, bytes(self._arrivals.get(key)))

    def tell(self, key: str, value: bytes, *, forget: Sequence[str]) -> None:
        """Tells the ranks that wait for it, and deletes what none of them reads any more."""
        with self._translated():
            self._arrivals.set(key, self._seal.close(key, value))  # type: ignore[arg-type]
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
        with contextlib.suppress(DistError):
            last = self._arrivals.add("closed", 1) == len(self.ranks)
            if last:
                self._arrivals.set("all closed", "")
            elif self._server is not None:
                if not waits:
                    return
                try:
                    self._arrivals.wait(["all closed"], timedelta(seconds=limit_s))
                except DistStoreError as error:
                    raise RuntimeError(f"not all ranks closed the store that rank {self._rank} serves in {limit_s} s") from error
        self._server = None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DistStoreError:
            raise
        except DistError as error:
            raise RuntimeError(
                f"rank {self._rank} lost the store that rank {self.ranks[0]} serves: that rank has ended, or the network to it "
                "is down; look at its output first"
            ) from error


class HostStore(Hall):
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
        with self._translated():
            # A rank may claim while it waits for others.
            self._claims = self._connect()

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at 0 and returns its new value. Any thread."""
        with self._translated():
            return int(self._claims.add(f"user/{key}", amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a value if it is the expected one, and returns what it is then. Any thread."""
        with self._translated():
            return sealed_compare_set(self._claims, self._seal, f"user/{key}", expected, desired)

    def forget(self, key: str) -> None:
        """Deletes a counter or value. Any thread."""
        with self._translated():
            self._claims.delete_key(f"user/{key}")


def sealed_compare_set(store: TCPStore, seal: Seal, name: str, expected: str, desired: str) -> str:
    """Sets a sealed value of a store if it is the expected one, and returns what it is then, unsealed."""
    sealed = [seal.close(name, text.encode()).decode() if text else "" for text in (expected, desired)]
    return seal.open(name, bytes(store.compare_set(name, *sealed))).decode()
