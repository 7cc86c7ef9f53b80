"""The real world of ranks: tensors through Horovod, statistics through mpi4py, claims and heartbeats beside them.

mpi4py comes first: MPI then belongs to it, and Horovod neither initializes nor finalizes it.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.cluster.binding import LauncherInfo, check_world
from hvd_adaptive.cluster.host import is_crowded
from hvd_adaptive.cluster.patience import wait_patiently
from hvd_adaptive.comm.horovod_collectives import HorovodCollectives
from hvd_adaptive.comm.horovod_wait import waits_asleep
from hvd_adaptive.comm.job_end import end_on_exceptions
from hvd_adaptive.comm.mpi_library import check_one_mpi, hold_back_mpi
from hvd_adaptive.comm.protocols import AgreedError, has_equal_hosts
from hvd_adaptive.comm.through_host import host_route
from hvd_adaptive.comm.watched_world import WatchedWorld

# Process sets that can be added later, for which Horovod's ranks send each other a message in every cycle.
_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def start_mpi(info: LauncherInfo, *, seldom: bool = False) -> Any:
    """Starts MPI through mpi4py, before Horovod could; returns a communicator of all ranks. COLLECTIVE.

    An uncaught exception on any rank then prints its traceback and ends the job.

    Args:
        info: what the launcher's environment says.
        seldom: ranks exchange something only after several steps.

    Raises:
        RuntimeError: if Horovod and mpi4py use different MPI libraries, the launcher's world is not MPI's, or MPI gives no
            MPI_THREAD_MULTIPLE.
    """
    hold_back_mpi()
    import horovod.torch  # noqa: F401  # loads its MPI library, for the check
    from mpi4py import MPI

    check_one_mpi()
    wait_patiently(info, seldom=seldom)
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    check_world(info, MPI.COMM_WORLD.Get_size())
    comm = MPI.COMM_WORLD.Dup()
    # The hook outlives the communicator, which goes with its world.
    end_on_exceptions(comm.Get_rank(), lambda: MPI.COMM_WORLD.Abort(1))
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "this MPI library gives no MPI_THREAD_MULTIPLE, which Horovod's thread and mpi4py need to share it; "
            "use another build of it, or scripts/setup.sh --mpi pypi"
        )
    return comm


class HorovodMpiTransport(WatchedWorld):
    """One real rank; see :class:`hvd_adaptive.comm.protocols.Transport`. Claims and heartbeats are those of every world.

    Construction is COLLECTIVE. An uncaught exception on any rank then prints its traceback and ends the job.

    Args:
        info: what the launcher's environment says.
        stall_limit_s: seconds after which a dead, frozen or stuck rank ends the job.
        groups: whether `split` will be called; None: only if :func:`has_equal_hosts`.
        seldom: ranks exchange something only after several steps.
        met: called with the hosts by rank as soon as they are known; the start goes on after it.

    Raises:
        RuntimeError: if Horovod and mpi4py use different MPI libraries, or the launcher's world is not MPI's.
    """

    backend = "horovod"

    def __init__(
        self,
        info: LauncherInfo,
        *,
        stall_limit_s: float,
        groups: bool | None = False,
        seldom: bool = False,
        met: Callable[[Sequence[str]], None] = lambda hosts: None,
    ) -> None:
        self._comm = start_mpi(info, seldom=seldom)
        from mpi4py import MPI

        world_size = self._comm.Get_size()
        hosts: list[str] = self._comm.allgather(socket.gethostname())
        groups = has_equal_hosts(hosts) if groups is None else groups
        import horovod.torch as hvd

        preset = os.environ.get(_DYNAMIC)
        hvd.init(process_sets="dynamic" if groups else None)
        # Horovod has set it, and has read it; a later world of this process may be without groups.
        if preset is None:
            os.environ.pop(_DYNAMIC, None)
        else:
            os.environ[_DYNAMIC] = preset
        if hvd.size() != world_size:
            raise RuntimeError(
                f"Horovod has {hvd.size()} ranks and MPI has {world_size}: Horovod is not using MPI. "
                "Start with `horovodrun --mpi` or `mpirun`, and unset HOROVOD_CONTROLLER."
            )
        self._hvd = hvd
        met(hosts)
        super().__init__(
            rank=self._comm.Get_rank(),
            hosts=hosts,
            gather=self._comm.allgather,
            end=MPI.COMM_WORLD.Abort,
            stall_limit_s=stall_limit_s,
        )
        self._world = HorovodCollectives(hvd, hvd.global_process_set, self.waiting)
        self.groups = groups
        self._process_sets: dict[tuple[int, ...], Any] = {}
        self.start()
        atexit.register(self.leave)

    def describe(self) -> dict[str, Any]:
        """Returns, for people, the worlds' sizes, MPI's thread level, and who negotiates Horovod's collectives."""
        from mpi4py import MPI

        levels = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
        names = {getattr(MPI, name): f"MPI_{name}" for name in levels}
        return {
            "carrier": "Horovod with MPI",
            "mpi_size": self.world_size,
            "horovod_size": self._hvd.size(),
            "thread_level": names[MPI.Query_thread()],
            "controller": "MPI" if self._hvd.mpi_enabled() else "Gloo",
        }

    def allgather_stats(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        gathered = np.empty((self.world_size, len(values)))
        with self.waiting("statistics"):
            self._comm.Allgather(np.ascontiguousarray(values, dtype=np.float64), gathered)
        return gathered

    def allgather_array(self, values: NDArray[Any]) -> NDArray[Any]:
        values = np.ascontiguousarray(values)
        gathered = np.empty((self.world_size, *values.shape), dtype=values.dtype)
        with self.waiting("gathering"):
            self._comm.Allgather(values, gathered)
        return gathered

    def allreduce_or_(self, bits: NDArray[np.uint8]) -> None:
        from mpi4py import MPI

        with self.waiting("row marks"):
            self._comm.Allreduce(MPI.IN_PLACE, bits, op=MPI.BOR)

    def allgather_object(self, value: Any) -> list[Any]:
        with self.waiting("agreement"):
            gathered: list[Any] = self._comm.allgather(value)
        return gathered

    def split(self, color: int) -> HorovodCollectives:
        if not self.groups:
            raise RuntimeError(
                "groups of ranks need Horovod's dynamic process sets, which cost a message a cycle: connect with groups=True"
            )
        colors: list[int] = self.allgather_object(color)
        mine = None
        for other in sorted(set(colors)):
            # Every rank adds every set, in the same order, also those that it is not in; equal sets are one.
            members = tuple(rank for rank, value in enumerate(colors) if value == other)
            if members not in self._process_sets:
                everyone = len(members) == self.world_size
                with self.waiting("process sets"):
                    self._process_sets[members] = (
                        self._hvd.global_process_set if everyone else self._hvd.add_process_set(list(members))
                    )
            if other == color:
                mine = self._process_sets[members]
        return HorovodCollectives(self._hvd, mine, self.waiting_in_group)

    def distributed_optimizer(
        self, optimizer: Optimizer, model: nn.Module, *, average: bool = True, may_sleep: bool = False
    ) -> Optimizer:
        try:
            wrapped: Any = self._hvd.DistributedOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                op=self._hvd.Average if average else self._hvd.Sum,
            )
        except (TypeError, AttributeError) as error:
            # Every rank has the same optimizer, so every rank is here.
            raise AgreedError(
                f"Horovod makes {type(optimizer).__name__} anew from its parameter groups alone, and fails: {error}. Give its "
                "other arguments defaults, or use strategy 'sync'"
            ) from error
        if may_sleep and is_crowded(self.local_size):
            wrapped.synchronize = waits_asleep(self._hvd.mpi_ops.mpi_lib)(wrapped.synchronize)
        result: Optimizer = wrapped
        return result

    def exchange_through_host(self) -> bool:
        route = host_route()
        was_taken, route.is_taken = route.is_taken, True
        return not was_taken

    def close(self) -> None:
        if not self._has_left:
            self.rendezvous("close")
            self.leave()
            atexit.unregister(self.leave)
            self._comm.Barrier()
            self._hvd.shutdown()
            self._comm.Free()
