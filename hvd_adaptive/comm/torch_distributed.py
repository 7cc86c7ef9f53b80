"""A world of ranks over torch.distributed, without Horovod and without MPI: Gloo on CPUs, NCCL where each rank has a GPU.

Claims, rendezvous and heartbeats are those of every world. What ends the job is the launcher, once one rank has ended.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.cluster.binding import LauncherInfo, check_world
from hvd_adaptive.cluster.device import visible_gpus
from hvd_adaptive.comm.failures import ENDED, process_state
from hvd_adaptive.comm.job_end import end_on_exceptions
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.torch_collectives import BrokenWorldError, TorchCollectives
from hvd_adaptive.comm.torch_groups import FOREVER, leave_process_group
from hvd_adaptive.comm.watched_world import WatchedWorld
from hvd_adaptive.exit_codes import EXIT_FAULT

# Whoever started the ranks sees the end of one first, and ends the others.
_LAUNCHER_S = 3.0


def start_process_group(info: LauncherInfo) -> None:
    """Makes the process's default group of all ranks, unless the process has one. COLLECTIVE.

    It stays until the process ends: torchrun's store knows it by its name, and a second one would read the first one's addresses.

    Args:
        info: what the launcher's environment says.

    Raises:
        RuntimeError: nothing says where the ranks meet, or rank 0's port is taken.
    """
    if dist.is_initialized():
        return
    if info.name == "torchrun":
        # torch reads what torchrun says, and whether torchrun itself serves the store.
        dist.init_process_group("gloo", timeout=FOREVER)
    else:
        store = _join(info)
        assert info.rank is not None and info.world_size is not None, "_join has refused"
        dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.world_size, timeout=FOREVER)
    atexit.register(leave_process_group)


def _join(info: LauncherInfo) -> dist.TCPStore:
    """Returns the store where ranks of another launcher meet."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing or info.rank is None or info.world_size is None:
        raise RuntimeError(
            f"backend 'torch' under {info.name} needs {' and '.join(missing) or 'rank and world size'}: say where the ranks "
            "meet by MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) on all ranks, or start them by "
            "`hvd-adaptive ... -np N` or torchrun, which do"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal():
        raise RuntimeError(f"MASTER_PORT must be the number of a port, got {port!r}")
    if info.rank == 0:
        return _serve(address, int(port))
    return dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=FOREVER)


def _serve(address: str, port: int) -> dist.TCPStore:
    """Opens the store where the ranks meet; on this host only, if its address is."""
    is_local = address == "localhost" or address.startswith("127.")
    dual = not is_local and socket.has_dualstack_ipv6()
    try:
        # Whoever started the ranks may hold the port for them.
        listener = socket.create_server(
            (address if is_local else "", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
            reuse_port=True,
        )
    except OSError as error:
        raise RuntimeError(f"rank 0 cannot listen at port {port} (MASTER_PORT): {error}; name a free one") from None
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=FOREVER, master_listen_fd=listener.detach()
    )


class TorchTransport(WatchedWorld):
    """One real rank; see :class:`hvd_adaptive.comm.protocols.Transport`. Claims and heartbeats are those of every world.

    Construction is COLLECTIVE. An uncaught exception on any rank then prints its traceback and ends the job.

    Args:
        info: what the launcher's environment says.
        stall_limit_s: seconds after which a dead, frozen or stuck rank ends the job.
        met: called with the hosts by rank as soon as they are known; the start goes on after it.

    Raises:
        RuntimeError: the ranks cannot meet, or the launcher's world is not torch.distributed's.
    """

    backend = "torch"
    groups = True
    _world: TorchCollectives

    def __init__(
        self,
        info: LauncherInfo,
        *,
        stall_limit_s: float,
        met: Callable[[Sequence[str]], None] = lambda hosts: None,
    ) -> None:
        is_ours = not dist.is_initialized()
        start_process_group(info)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        check_world(info, world_size)
        end_on_exceptions(rank, lambda: os._exit(1))
        # Others in this process may use the default group at the same time.
        host_group = dist.group.WORLD if is_ours else dist.new_group(backend="gloo", timeout=FOREVER)

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * world_size
            dist.all_gather_object(values, value, group=host_group)
            return values

        places = gather((socket.gethostname(), os.getpid(), visible_gpus()))
        hosts = self._hosts = [host for host, _, _ in places]
        met(hosts)
        self._pids = [pid for _, pid, _ in places]
        self._is_through_host = False
        self._on_gpus = dist.is_nccl_available() and _have_own_gpus([(host, gpus) for host, _, gpus in places])
        super().__init__(rank=rank, hosts=hosts, gather=gather, end=os._exit, stall_limit_s=stall_limit_s)
        self._workers = [_worker()]
        group = dist.new_group(backend=self._backends, timeout=FOREVER) if self._on_gpus else host_group
        self._gather = gather
        self._own_groups = [own for own in {host_group, group} if own is not dist.group.WORLD]
        self._world = self._collectives(group, self.waiting)
        self.start()
        atexit.register(self.leave)

    @property
    def _backends(self) -> str:
        return "cpu:gloo,cuda:nccl" if self._on_gpus else "gloo"

    def _collectives(self, group: Any, waiting: Callable[[str], AbstractContextManager[None]]) -> TorchCollectives:
        return TorchCollectives(group, self._workers[-1], waiting, self._end_broken, on_gpus=self._on_gpus)

    def describe(self) -> dict[str, Any]:
        """Returns, for people, the world's size and what carries its tensors."""
        names = "Gloo on CPUs, NCCL on GPUs" if self._on_gpus else "Gloo"
        return {"carrier": f"torch.distributed ({names})", "torch_size": self.world_size}

    def allgather_stats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.allgather_array(np.ascontiguousarray(values, dtype=np.float64))

    def allgather_array(self, values: NDArray[Any]) -> NDArray[Any]:
        values = np.ascontiguousarray(values)
        own = torch.from_numpy(values.reshape(-1).view(np.uint8).copy())
        received = self._world.allgather_bytes_async(own, receive_bytes=[own.numel()] * self.world_size, name="array").wait()
        return received.numpy().view(values.dtype).reshape(self.world_size, *values.shape)

    def allreduce_or_(self, bits: NDArray[np.uint8]) -> None:
        self._world.allreduce_or_(torch.from_numpy(bits))

    def allgather_object(self, value: Any) -> list[Any]:
        return self._world.call("agreement", lambda: self._gather(value))

    def split(self, color: int) -> TorchCollectives:
        colors: list[int] = self.allgather_object(color)
        mine: Any = None
        for other in sorted(set(colors)):
            # Every rank takes part in making every group, in the same order.
            members = [rank for rank, value in enumerate(colors) if value == other]
            group = self._world.call("groups", lambda members=members: dist.new_group(  # type: ignore[misc]
                members, backend=self._backends, timeout=FOREVER
            ))  # fmt: skip
            if other == color:
                mine = group
        self._own_groups.append(mine)
        if not self._on_gpus:
            # What waits for another island must not hold up what is inside this one. NCCL's groups are to take turns.
            self._workers.append(_worker())
        return self._collectives(mine, self.waiting_in_group)

    def distributed_optimizer(
        self, optimizer: Optimizer, model: nn.Module, *, average: bool = True, may_sleep: bool = False
    ) -> Optimizer:
        if self.world_size == 1:
            return optimizer
        raise AgreedError(
            "strategy 'horovod' is Horovod's own DistributedOptimizer, and torch.distributed carries this job's tensors: use "
            "strategy 'sync', 'local' or 'sma'; or start the ranks by mpirun or -np with backend 'horovod'"
        )

    def exchange_through_host(self) -> bool:
        was_told, self._is_through_host = self._is_through_host, True
        self._on_gpus = self._world.on_gpus = False
        return not was_told

    def close(self) -> None:
        if not self._has_left:
            self.rendezvous("close")
            for worker in self._workers:
                worker.shutdown()
            self.leave()
            atexit.unregister(self.leave)
            # Each has threads of its own, which end with the last reference, and this process may connect again.
            for group in self._own_groups if dist.is_initialized() else ():
                dist.destroy_process_group(group)

    def _end_broken(self, error: BrokenWorldError) -> None:
        """Ends this rank after a collective that failed, and names the rank that has died if it is on this host.

        Raises:
            BrokenWorldError: if none is found, and nobody else has ended this rank meanwhile.
        """
        time.sleep(_LAUNCHER_S)
        for rank, (host, pid) in enumerate(zip(self._hosts, self._pids, strict=True)):
            if rank != self.rank and host == self.host and process_state(pid) in ENDED:
                self.abort(
                    f"hvd_adaptive: rank {rank} on {host} (pid {pid}) is dead: rank {self.rank} has lost it in {error}. Look for "
                    f"its last output, and for the out-of-memory killer (`dmesg`). {self.last_words()}".rstrip(),
                    EXIT_FAULT,
                )
        raise BrokenWorldError(
            f"{error}. Another rank has ended, or the network to it is down: look for ranks that say something else"
        )


def _worker() -> ThreadPoolExecutor:
    """Runs collectives of one group, in the order in which they were started."""
    return ThreadPoolExecutor(1, thread_name_prefix="hvd_adaptive-collectives")


def _have_own_gpus(places: Sequence[tuple[str, Sequence[str]]]) -> bool:
    """Whether each rank can have a GPU of its own, which NCCL needs: places are each rank's host and the GPUs it sees."""
    hosts = [host for host, _ in places]
    seen = {host: {gpu for other, gpus in places if other == host for gpu in gpus} for host in hosts}
    return all(gpus for _, gpus in places) and all(len(seen[host]) >= hosts.count(host) for host in hosts)
