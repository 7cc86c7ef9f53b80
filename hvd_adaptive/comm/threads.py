"""A world inside one process: one rank without MPI, or N ranks as threads for unit tests."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.comm.in_process_store import InProcessStore
from hvd_adaptive.comm.job_end import end_job
from hvd_adaptive.comm.protocols import HostStore, InOrder


def joined(parts: Sequence[Tensor], receive_bytes: Sequence[int] | None, name: str) -> Tensor:
    """Returns the parts as one tensor, after a check of their sizes; for `LocalTransport`."""
    sizes = [part.numel() for part in parts]
    if receive_bytes is not None and sizes != list(receive_bytes):
        raise RuntimeError(f"{name}: the ranks sent {sizes} bytes, but {list(receive_bytes)} were expected")
    return torch.cat(list(parts))


class LocalWorld:
    """The state that the ranks of one process share; ranks follow each other on pretended hosts.

    Args:
        world_size: number of ranks.
        num_hosts: pretended hosts.
        host_stores: whether these have stores of their own.
    """

    def __init__(self, world_size: int = 1, *, num_hosts: int = 1, host_stores: bool = False) -> None:
        self.world_size = world_size
        self.host_stores = host_stores
        self.num_hosts = num_hosts
        self.barrier = threading.Barrier(world_size)
        self.lock = threading.Lock()
        self.store = InProcessStore()
        self.slots: list[Any] = [None] * world_size
        self.groups: dict[tuple[int, ...], LocalWorld] = {}
        self.stores_of_hosts: dict[int, InProcessStore] = {}

    def run(self, function: Callable[[LocalTransport], Any], timeout_s: float = 120.0) -> list[Any]:
        """Runs ``function`` on one thread a rank; returns the results in rank order.

        Raises:
            BaseException: the first rank's exception; the others' barrier is broken, so none waits for ever.
            TimeoutError: if a rank does not end in time.
        """
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = function(LocalTransport(self, rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [
            threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"a simulated rank did not end within {timeout_s} s")
        return results


class _HostStore(InProcessStore):
    """A pretended host's store; see :class:`hvd_adaptive.comm.protocols.HostStore`."""

    def __init__(self, world: LocalWorld, ranks: list[int], num_hosts: int) -> None:
        with world.lock:
            super().__init__(world.stores_of_hosts.setdefault(ranks[0], InProcessStore()))
        self.ranks: Sequence[int] = ranks
        self.num_hosts = num_hosts


def _over(result: Tensor) -> InOrder:
    """A collective that is over when it is started. Simulated ranks meet in barriers, so what follows comes where all wait."""
    return InOrder(lambda: result)


class LocalTransport(InProcessStore):
    """One rank of a :class:`LocalWorld`; see :class:`hvd_adaptive.comm.protocols.Transport`."""

    backend = "none"

    def __init__(self, world: LocalWorld | None = None, rank: int = 0) -> None:
        self._world = world or LocalWorld()
        super().__init__(self._world.store)
        self.rank = rank
        self.speaks = rank == 0
        self.world_size = self._world.world_size
        num_hosts = self._world.num_hosts
        hosts = [other * num_hosts // self.world_size for other in range(self.world_size)]
        mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self.local_rank, self.local_size = mine.index(rank), len(mine)
        self.groups = True
        self.host_store: HostStore | None = _HostStore(self._world, mine, num_hosts) if self._world.host_stores else None
        self.last_words: Callable[[], str] = lambda: ""
        self.host = socket.gethostname() if num_hosts == 1 else f"host{hosts[rank]}"

    def describe(self) -> dict[str, Any]:
        return {"carrier": ""}

    def allgather_object(self, value: Any) -> list[Any]:
        self._world.slots[self.rank] = value
        self._world.barrier.wait()
        gathered = list(self._world.slots)
        self._world.barrier.wait()
        return gathered

    def allgather_array(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.stack(self.allgather_object(values.copy()))

    allgather_stats = allgather_array

    def allreduce_or_(self, bits: NDArray[np.uint8]) -> None:
        bits[:] = np.bitwise_or.reduce(self.allgather_object(bits.copy()))

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        if self.world_size == 1:
            return
        gathered = self.allgather_object(tensor.clone())
        total = gathered[0].clone()
        for other in gathered[1:]:
            total += other
        tensor.copy_(total)

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> InOrder:
        self.allreduce_sum_(tensor, name)
        return _over(tensor)

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> InOrder:
        gathered = self.allgather_object([part.clone() for part in tensor.split(list(send_bytes))])
        return _over(joined([parts[self.rank] for parts in gathered], receive_bytes, name))

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> InOrder:
        return _over(joined(self.allgather_object(tensor.clone()), receive_bytes, name))

    def split(self, color: int) -> LocalTransport:
        colors = self.allgather_object(color)
        ranks = tuple(rank for rank, other in enumerate(colors) if other == color)
        with self._world.lock:
            group = self._world.groups.setdefault(ranks, LocalWorld(len(ranks)))
        return LocalTransport(group, ranks.index(self.rank))

    def allreduce_max_async_(self, tensor: Tensor, name: str) -> InOrder:
        return _over(tensor.copy_(torch.stack(self.allgather_object(tensor.clone())).amax(0)))

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        source = self.allgather_object([t.detach().clone() for t in tensors] if self.rank == 0 else None)[0]
        with torch.no_grad():
            for tensor, value in zip(tensors, source, strict=True):
                tensor.copy_(value)

    def rendezvous(self, name: str) -> float:
        start = time.perf_counter()
        self._world.barrier.wait()
        return time.perf_counter() - start

    @contextmanager
    def waiting(self, what: str = "") -> Iterator[None]:
        yield

    def progress(self, what: str = "") -> None:
        pass

    def distributed_optimizer(
        self, optimizer: Optimizer, model: nn.Module, *, average: bool = True, may_sleep: bool = False
    ) -> Optimizer:
        if self.world_size > 1:
            raise RuntimeError("simulated ranks have no Horovod: strategy 'horovod' needs real ranks (mpirun)")
        return optimizer

    def exchange_through_host(self) -> bool:
        return False

    def abort(self, text: str, code: int) -> None:
        end_job(text, lambda: os._exit(code), code=code)

    def close(self) -> None:
        pass
