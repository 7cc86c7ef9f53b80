"""What the ranks of one host share beside the world's store, so that thousands of ranks do not all ask rank 0's.

The host's first rank serves it, on the loopback interface only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, TCPStore  # type: ignore[attr-defined,unused-ignore]

from hvd_adaptive.comm.seal import Seal
from hvd_adaptive.comm.store_address import Offer, find_server, serve

# One thread serves a store: below so many ranks it has time for all of them.
_FROM_RANKS = 65


def wants_host_stores(hosts: Sequence[str]) -> bool:
    """Returns whether hosts shall have stores of their own: many ranks, several on a host.

    Args:
        hosts: by rank.
    """
    return len(hosts) >= _FROM_RANKS and 1 < len(set(hosts)) <= len(hosts) // 2


class HostStore:
    """A rank's connections to its host's store; see :class:`hvd_adaptive.comm.protocols.HostStore`. Construction is COLLECTIVE
    over all ranks of the world.

    Args:
        rank: this rank.
        hosts: by rank.
        gather: gathers a small object from every rank, in rank order, on a way that strangers cannot reach. COLLECTIVE.
        seal: of the job.
        timeout: of calls that wait.

    Attributes:
        ranks: those of this host, ascending.
        num_hosts: of the world.

    Raises:
        RuntimeError: on all ranks, if some host's first rank cannot serve; or it cannot be reached.
    """

    def __init__(
        self, *, rank: int, hosts: Sequence[str], gather: Callable[[Any], list[Any]], seal: Seal, timeout: timedelta
    ) -> None:
        self.ranks: Sequence[int] = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self.num_hosts = len(set(hosts))
        self._rank = rank
        self._seal = seal
        self._server: TCPStore | None = None
        answer: Offer | str | None = None
        if rank == self.ranks[0]:
            try:
                server, answer = serve(same_host=True, world_size=len(self.ranks))
                self._server = server.store
            except RuntimeError as error:
                answer = f"rank {rank}: {error}"
        answers = gather(answer)
        if errors := [text for text in answers if isinstance(text, str)]:
            raise RuntimeError(errors[0])
        offer = Offer(*answers[self.ranks[0]])
        address = find_server(offer, rank, server="its host's store")

        def connect() -> TCPStore:
            return TCPStore(address, offer.port, is_master=False, timeout=timeout, wait_for_workers=False)

        with self._translated():
            self._claims, self._arrivals = connect(), connect()

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

    def count_in(self, key: str, amount: int) -> int:
        """Adds this rank to those of the host that have arrived; returns the sum of their amounts."""
        with self._translated():
            return int(self._arrivals.add(key, amount))

    def hear(self, key: str) -> bytes:
        """Waits, asleep, for what :meth:`tell` says."""
        with self._translated():
            return self._seal.open(key, bytes(self._arrivals.get(key)))

    def tell(self, key: str, value: bytes, *, forget: Sequence[str]) -> None:
        """Tells the ranks of the host that wait for it, and deletes what none of them reads any more."""
        with self._translated():
            self._arrivals.set(key, self._seal.close(key, value))  # type: ignore[arg-type]
            for old in forget:
                self._arrivals.delete_key(old)

    def close(self, limit_s: float) -> None:
        """Ends the connections. The rank that serves waits for the others of its host; repeated calls do nothing.

        Raises:
            RuntimeError: on that rank, if one of them does not end within so many seconds.
        """
        with contextlib.suppress(DistError):
            last = self._arrivals.add("closed", 1) == len(self.ranks)
            if last:
                self._arrivals.set("all closed", "")
            elif self._server is not None:
                try:
                    self._arrivals.wait(["all closed"], timedelta(seconds=limit_s))
                except DistStoreError as error:
                    raise RuntimeError(f"not all ranks of rank {self._rank}'s host closed its store in {limit_s} s") from error
        self._server = None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DistStoreError:
            raise
        except DistError as error:
            raise RuntimeError(
                f"rank {self._rank} lost the store that rank {self.ranks[0]} serves on the same host: that rank has ended; look "
                "at its output first"
            ) from error


def sealed_compare_set(store: TCPStore, seal: Seal, name: str, expected: str, desired: str) -> str:
    """Sets a sealed value of a store if it is the expected one, and returns what it is then, unsealed."""
    sealed = [seal.close(name, text.encode()).decode() if text else "" for text in (expected, desired)]
    return seal.open(name, bytes(store.compare_set(name, *sealed))).decode()
