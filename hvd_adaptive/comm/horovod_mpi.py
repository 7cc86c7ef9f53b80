"""The real world of ranks: tensors through Horovod, statistics through mpi4py, claims and heartbeats beside them.

mpi4py comes first: MPI then belongs to it, and Horovod neither initializes nor finalizes it.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.cluster.binding import LauncherInfo, check_world
from hvd_adaptive.cluster.host import is_crowded
from hvd_adaptive.comm.heartbeat import Heartbeat
from hvd_adaptive.comm.horovod_collectives import HorovodCollectives
from hvd_adaptive.comm.horovod_wait import waits_asleep
from hvd_adaptive.comm.job_end import end_job
from hvd_adaptive.comm.mpi_library import check_one_mpi, hold_back_mpi
from hvd_adaptive.comm.protocols import AgreedError, Pending
from hvd_adaptive.comm.side_channel import SideChannel

_ABORT_PATIENCE_S = 5.0
_ABORT_HEAD_START_S = 1.0
_WORKER_END_S = 0.5


def start_mpi(info: LauncherInfo) -> Any:
    """Starts MPI through mpi4py, before Horovod could; returns a communicator of all ranks. COLLECTIVE.

    An uncaught exception on any rank then prints its traceback and ends the job.

    Args:
        info: what the launcher's environment says.

    Raises:
        RuntimeError: if Horovod and mpi4py use different MPI libraries, the launcher's world is not MPI's, or MPI gives no
            MPI_THREAD_MULTIPLE.
    """
    hold_back_mpi()
    import horovod.torch  # noqa: F401  # loads its MPI library, for the check
    from mpi4py import MPI

    check_one_mpi()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    check_world(info, MPI.COMM_WORLD.Get_size())
    comm = MPI.COMM_WORLD.Dup()
    _install_abort(comm, comm.Get_rank())
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "this MPI library gives no MPI_THREAD_MULTIPLE, which Horovod's thread and mpi4py need to share it; "
            "use another build of it, or scripts/setup.sh --mpi pypi"
        )
    return comm


class HorovodMpiTransport:
    """One real rank; see :class:`hvd_adaptive.comm.protocols.Transport`.

    Construction is COLLECTIVE. An uncaught exception on any rank then prints its traceback and ends the job.

    Args:
        info: what the launcher's environment says.
        stall_limit_s: seconds after which a dead, frozen or stuck rank ends the job.
        groups: whether `split` will be called.
        met: called with the hosts by rank as soon as they are known; the start goes on after it.

    Raises:
        RuntimeError: if Horovod and mpi4py use different MPI libraries, or the launcher's world is not MPI's.
    """

    def __init__(
        self,
        info: LauncherInfo,
        *,
        stall_limit_s: float,
        groups: bool = False,
        met: Callable[[Sequence[str]], None] = lambda hosts: None,
    ) -> None:
        self._comm = start_mpi(info)
        self.rank = self._comm.Get_rank()
        self.world_size = self._comm.Get_size()
        import horovod.torch as hvd

        hvd.init(process_sets="dynamic" if groups else None)
        if hvd.size() != self.world_size:
            raise RuntimeError(
                f"Horovod has {hvd.size()} ranks and MPI has {self.world_size}: Horovod is not using MPI. "
                "Start with `horovodrun --mpi` or `mpirun`, and unset HOROVOD_CONTROLLER."
            )
        self._hvd = hvd
        self.host = socket.gethostname()
        hosts: list[str] = self._comm.allgather(self.host)
        met(hosts)
        self.local_rank = hosts[: self.rank].count(self.host)
        self.local_size = hosts.count(self.host)
        self._world = HorovodCollectives(hvd, hvd.global_process_set, self.waiting)
        self.groups = groups
        self._process_sets: dict[tuple[int, ...], Any] = {}
        self._closed = False
        self.last_words: Callable[[], str] = lambda: ""
        self.side = SideChannel(
            rank=self.rank,
            world_size=self.world_size,
            gather=self._comm.allgather,
            same_host=len(set(hosts)) == 1,
            stall_limit_s=stall_limit_s,
        )
        self.heartbeat = Heartbeat(
            self.side,
            rank=self.rank,
            host=self.host,
            pid=os.getpid(),
            limit_s=stall_limit_s,
            abort=lambda: self._comm.Abort(14),
            last_words=lambda: self.last_words(),
        )
        self.heartbeat.start()
        atexit.register(self._leave)

    def describe(self) -> dict[str, Any]:
        """Returns, for people, the worlds' sizes, MPI's thread level, and who negotiates Horovod's collectives."""
        from mpi4py import MPI

        levels = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
        names = {getattr(MPI, name): f"MPI_{name}" for name in levels}
        return {
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

    def allgather_object(self, value: Any) -> list[Any]:
        with self.waiting("agreement"):
            gathered: list[Any] = self._comm.allgather(value)
        return gathered

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        self._world.allreduce_sum_(tensor, name)

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> Pending:
        return self._world.allreduce_sum_async_(tensor, name)

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> Pending:
        return self._world.alltoall_bytes_async(
            tensor, send_bytes=send_bytes, receive_bytes=receive_bytes, name=name
        )

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> Pending:
        return self._world.allgather_bytes_async(tensor, receive_bytes=receive_bytes, name=name)

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
        return HorovodCollectives(self._hvd, mine, self.waiting)

    def allreduce_max_(self, tensor: Tensor, name: str) -> None:
        self._world.allreduce_max_(tensor, name)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        self._world.broadcast_(tensors)

    def add(self, key: str, amount: int) -> int:
        return self.side.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self.side.compare_set(key, expected, desired)

    def forget(self, key: str) -> None:
        self.side.delete(key)

    def rendezvous(self, name: str) -> float:
        with self.waiting(f"rendezvous {name}"):
            return self.side.arrive(name)

    def waiting(self, what: str = "") -> AbstractContextManager[None]:
        return self.heartbeat.waiting(what)

    def progress(self, what: str = "") -> None:
        self.heartbeat.progress(what)

    def take_turns(self, name: str, action: Callable[[], Any]) -> Any:
        result = None
        for turn in range(self.world_size):
            if turn == self.rank:
                result = action()
                self.progress(name)
            self.rendezvous(f"{name}.{turn}")
        return result

    def distributed_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        average: bool = True,
        backward_passes_per_step: int = 1,
        may_sleep: bool = False,
    ) -> Optimizer:
        wrapped: Any = self._hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            op=self._hvd.Average if average else self._hvd.Sum,
            backward_passes_per_step=backward_passes_per_step,
        )
        if may_sleep and is_crowded(self.local_size):
            wrapped.synchronize = waits_asleep(self._hvd.mpi_ops.mpi_lib)(wrapped.synchronize)
        result: Optimizer = wrapped
        return result

    def abort(self, text: str, code: int) -> None:
        end_job(text, lambda: self._comm.Abort(code), code=code)

    def close(self) -> None:
        if not self._closed:
            self.rendezvous("close")
            self._leave()
            self._comm.Barrier()
            self._hvd.shutdown()

    def _leave(self) -> None:
        if not self._closed:
            self._closed = True
            self.heartbeat.leave()
            self.side.close()


def _dead_worker(error: BaseException) -> str:
    """Says that a worker of a DataLoader was killed, where the error may only be what came of it: a connection to nowhere."""
    if not isinstance(error, (OSError, EOFError)):
        return ""
    # The connection ends before the process does.
    deadline = time.monotonic() + _WORKER_END_S
    try:
        # Children that ended well are waited for on the way, which is nobody's loss: this process ends as well.
        while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is None or child.si_code == os.CLD_EXITED:
            if child is None:
                if time.monotonic() > deadline:
                    return ""
                time.sleep(0.01)
    except ChildProcessError:
        return ""
    return f"A worker (pid {child.si_pid}) was killed by signal: {signal.strsignal(child.si_status)}\n"


def _install_abort(comm: Any, rank: int) -> None:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # PyTorch's handler would raise the death of a worker out of here, and nothing would be said.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if isinstance(error, AgreedError) and rank:
            # Rank 0 says it for all, and ends the job.
            time.sleep(_ABORT_PATIENCE_S)
        text = "".join(traceback.format_exception(kind, error, trace)) + _dead_worker(error)
        sys.stdout.flush()
        sys.stderr.write(f"rank {rank} failed:\n{text}")
        sys.stderr.flush()
        # The launcher's notice of the abort comes another way, and shall not overtake the reason.
        time.sleep(_ABORT_HEAD_START_S)
        comm.Abort(1)

    sys.excepthook = hook
