"""What every world of real ranks has in common: tensors through its carrier; claims, rendezvous and heartbeats on one wiring."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hvd_adaptive.comm.heartbeat import Heartbeat
from hvd_adaptive.comm.job_end import end_job
from hvd_adaptive.comm.protocols import HostStore, Pending
from hvd_adaptive.comm.side_channel import SideChannel
from hvd_adaptive.exit_codes import EXIT_FAULT

if TYPE_CHECKING:
    from torch import Tensor

    from hvd_adaptive.comm.horovod_collectives import HorovodCollectives
    from hvd_adaptive.comm.torch_collectives import TorchCollectives


class WatchedWorld:
    """A rank's side channel and heartbeat; see :class:`hvd_adaptive.comm.protocols.Transport`.

    Construction is COLLECTIVE. The heartbeat begins with `start`. A derived class sets ``_world``, which carries tensors.

    Args:
        rank: this rank.
        hosts: by rank.
        gather: gathers a small object from every rank, in rank order, as :class:`SideChannel` needs it.
        end: ends the whole job with an exit code; called from any thread.
        stall_limit_s: seconds after which a dead, frozen or stuck rank ends the job.

    Attributes:
        host_store: what the ranks of this host share; None where rank 0's store has time for all.

    Raises:
        RuntimeError: the ranks cannot reach rank 0's store.
    """

    _world: HorovodCollectives | TorchCollectives

    def __init__(
        self,
        *,
        rank: int,
        hosts: Sequence[str],
        gather: Callable[[Any], list[Any]],
        end: Callable[[int], object],
        stall_limit_s: float,
    ) -> None:
        self.rank = rank
        self.speaks = rank == 0
        self.world_size = len(hosts)
        self.host = hosts[rank]
        self.local_rank = hosts[:rank].count(self.host)
        self.local_size = hosts.count(self.host)
        self.last_words: Callable[[], str] = lambda: ""
        self._end = end
        self._pid = os.getpid()
        self.side = SideChannel(
            rank=rank,
            world_size=self.world_size,
            gather=gather,
            same_host=len(set(hosts)) == 1,
            stall_limit_s=stall_limit_s,
            hosts=hosts,
        )
        self.host_store: HostStore | None = self.side.host
        self.heartbeat = Heartbeat(
            self.side,
            rank=rank,
            host=self.host,
            pid=self._pid,
            limit_s=stall_limit_s,
            abort=lambda: end(EXIT_FAULT),
            last_words=lambda: self.last_words(),
        )
        self._has_left = False

    def start(self) -> None:
        """Begins to beat and to watch. COLLECTIVE."""
        self.heartbeat.start()

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        self._world.allreduce_sum_(tensor, name)

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> Pending:
        return self._world.allreduce_sum_async_(tensor, name)

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> Pending:
        return self._world.alltoall_bytes_async(tensor, send_bytes=send_bytes, receive_bytes=receive_bytes, name=name)

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> Pending:
        return self._world.allgather_bytes_async(tensor, receive_bytes=receive_bytes, name=name)

    def allreduce_max_async_(self, tensor: Tensor, name: str) -> Pending:
        return self._world.allreduce_max_async_(tensor, name)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        self._world.broadcast_(tensors)

    def add(self, key: str, amount: int) -> int:
        return self.side.store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self.side.store.compare_set(key, expected, desired)

    def forget(self, key: str) -> None:
        self.side.store.forget(key)

    def rendezvous(self, name: str) -> float:
        with self.waiting(f"rendezvous {name}"):
            return self.side.arrive(name)

    def waiting(self, what: str = "") -> AbstractContextManager[None]:
        return self.heartbeat.waiting(what)

    def waiting_in_group(self, what: str = "") -> AbstractContextManager[None]:
        """As `waiting`, for some of the ranks only."""
        return self.heartbeat.waiting(what, for_all=False)

    def progress(self, what: str = "") -> None:
        self.heartbeat.progress(what)

    def abort(self, text: str, code: int) -> None:
        end_job(text, lambda: self._end(code), code=code)

    def leave(self) -> None:
        """Ends the heartbeat when all ranks have come here, and the side channel. COLLECTIVE.

        Repeated calls do nothing, nor do those in a forked child, which would talk over its parent's connections.
        """
        if not self._has_left and os.getpid() == self._pid:
            self._has_left = True
            self.heartbeat.leave()
            self.side.close()

    def abandon(self) -> None:
        """Ends the heartbeat and the side channel of a rank that ends in failure, which waits for no other."""
        self._has_left = True
        # Else the store does not answer, or this is a forked child.
        if self.heartbeat.abandon():
            self.side.close(waits=False)
