"""Counters, small values and sleeping rendezvous between ranks, outside MPI and Horovod, on torch's TCPStore.

Rank 0 holds the store; a C++ thread serves it while that rank computes, so a claim costs one short round trip
and no rank has to be inside MPI for it. A TCPStore client serialises its calls, so each rank opens one
connection for claims (any thread may use it), one for rendezvous and one for heartbeats. Where many ranks meet, they do so in
stores of hosts and districts first (:mod:`hvd_adaptive.comm.host_store`), and the last one there goes on to rank 0's.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined,unused-ignore]

from hvd_adaptive.comm.host_store import Hall, HostStore, SharedStore, district, has_host_stores
from hvd_adaptive.comm.in_process_store import InProcessStore
from hvd_adaptive.comm.protocols import Store
from hvd_adaptive.comm.store_address import PROBE_S

_COUNT_BITS = 20


class SideChannel:
    """Talks to the other ranks beside MPI. Construction is COLLECTIVE.

    Args:
        rank: this rank, in [0, world_size).
        world_size: number of ranks, >= 1. A single rank needs no server: its counters are in this process.
        gather: gathers a small object from every rank, in rank order, on a way that strangers cannot reach. COLLECTIVE.
        same_host: all ranks are on one host; the store then listens on the loopback interface only.
        hosts: by rank; many ranks meet in stores of hosts and districts first. None: they do not.

    Attributes:
        store: of all ranks' claims; what it raises where rank 0 is gone is a RuntimeError.
        host: the store that the ranks of this host share; None where they do not.
        stall_limit_s: how long `close` and the first meeting of the ranks wait before they raise, in
            seconds.

    Raises:
        ValueError: world_size or stall_limit_s is out of range.
        RuntimeError: rank 0 cannot be reached, some rank did not come, or rank 0 may not open enough files.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        gather: Callable[[Any], list[Any]],
        same_host: bool,
        stall_limit_s: float,
        hosts: Sequence[str] | None = None,
    ) -> None:
        if not 0 <= rank < world_size < 1 << _COUNT_BITS:
            raise ValueError(
                f"need 0 <= rank < world_size < {1 << _COUNT_BITS}, got rank {rank} of {world_size}"
            )
        if not stall_limit_s > 0:
            raise ValueError(f"stall_limit_s must be > 0, got {stall_limit_s}")
        self.rank = rank
        self.world_size = world_size
        self._stall_limit_s = stall_limit_s
        self._num_arrivals = 0
        self.host: HostStore | None = None
        # From the smallest to the largest, where a rank meets others before it comes to rank 0's.
        self._halls: list[Hall] = []
        self.store: Store = InProcessStore()
        if world_size == 1:
            return
        self._world = self.store = SharedStore(rank=rank, ranks=range(world_size), gather=gather, same_host=same_host)
        self._halls = [self._world]
        self.seal = self._world.seal
        self._meet_first()
        shared: dict[str, Any] = {"rank": rank, "gather": gather, "seal": self.seal}
        if hosts is not None and has_host_stores(hosts):
            self.host = HostStore(hosts=hosts, **shared)
            self._halls.insert(0, self.host)
        if hosts is not None and (ranks := district(rank, hosts)) is not None:
            self._halls.insert(-1, Hall(ranks=ranks, same_host=same_host, **shared))

    def connect(self) -> TCPStore:
        """Opens another connection to rank 0's store; see :meth:`Hall.connect`. Not where there is one rank."""
        return self._world.connect()

    def open_lifeline(self) -> socket.socket:
        """Opens a silent TCP connection to rank 0's store, which ends at the moment when that process does.

        Raises:
            OSError: rank 0 cannot be reached.
        """
        return socket.create_connection(self._world.address, timeout=PROBE_S)

    def arrive(self, name: str) -> float:
        """Waits, asleep, until every rank has arrived; returns the seconds waited. COLLECTIVE.

        A rank that waits in MPI spins and takes the core of the rank that it waits for; here it sleeps and
        wakes within about a millisecond of the last arrival. Has no time limit of its own: that is the
        heartbeats' task.

        Args:
            name: where the ranks meet; equal on all ranks.

        Raises:
            RuntimeError: on every rank, if the names differ; or rank 0 is gone.
        """
        begin = time.monotonic()
        if not self._halls:
            return 0.0
        self._num_arrivals += 1
        if self._meet(self._num_arrivals, name) != b"together":
            raise RuntimeError(
                f"rank {self.rank} arrived at {name!r} while another rank arrived elsewhere: all ranks must "
                "take the same steps in the same order (did they get the same configuration and data?)"
            )
        return time.monotonic() - begin

    def close(self, *, waits: bool = True) -> None:
        """Ends the channel in good order. COLLECTIVE, but only rank 0, which holds the store, waits.

        Repeated calls do nothing. Stop heartbeats first.

        Args:
            waits: else rank 0 holds the store until its process ends.

        Raises:
            RuntimeError: on rank 0, if a rank did not close within the stall limit.
        """
        for hall in self._halls:
            hall.close(self._stall_limit_s, waits=waits)

    def _meet_first(self) -> None:
        try:
            self._meet(0, "start", timedelta(seconds=max(self._stall_limit_s, 2 * PROBE_S)))
        except DistStoreError as error:
            here = self._world.count_in("arrive/0", 0) % (1 << _COUNT_BITS)
            host, port = self._world.address
            raise RuntimeError(
                f"only {here} of {self.world_size} ranks reached rank 0's side channel at {host}:{port}; see the other ranks' "
                "messages"
            ) from error

    def _meet(self, number: int, name: str, limit: timedelta | None = None) -> bytes:
        # The counter's low bits count ranks, the high ones add up a checksum of the names: equal names give N
        # times it.
        key, checksum = f"arrive/{number}", zlib.crc32(name.encode()) & 0x3FFFFF
        go, before = key + "/go", [f"arrive/{number - 1}", f"arrive/{number - 1}/go"]
        own, last_of = 1 + (checksum << _COUNT_BITS), []
        for hall in self._halls:
            # The last rank in a hall counts for all of them in the next one.
            own = hall.count_in(key, own)
            if own % (1 << _COUNT_BITS) < len(hall.ranks):
                verdict = hall.hear(go, limit)
                break
            last_of.append(hall)
        else:
            verdict = b"together" if own >> _COUNT_BITS == checksum * self.world_size else b"apart"
        # Every rank that reads there is here, so none still reads the previous rendezvous.
        for hall in reversed(last_of):
            hall.tell(go, verdict, forget=before)
        return verdict
