"""Horovod's collectives over the world or a process set, in the background, for tensors on CPU or CUDA.

A CPU build of Horovod copies CUDA tensors without waiting for the stream that fills them: with such a build they go
through host memory here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.comm.horovod_wait import wait_asleep
from hvd_adaptive.comm.host_staging import to_device, to_host

log = logging.getLogger(__name__)


class _Pending:
    """A Horovod operation under way; see :class:`hvd_adaptive.comm.protocols.Pending`."""

    def __init__(
        self,
        finish: Callable[[], Tensor],
        poll: Callable[[], bool],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._finish = finish
        self._poll = poll
        self._waiting = waiting

    def done(self) -> bool:
        return self._poll()

    def wait(self) -> Tensor:
        with self._waiting():
            return self._finish()


class HorovodCollectives:
    """The ranks of a process set; see :class:`hvd_adaptive.comm.protocols.Collectives`.

    Args:
        hvd: the module ``horovod.torch``, initialized.
        process_set: Horovod's own object for the group.
        waiting: marks this rank as waiting, for the heartbeats.
        prefix: of all names, where others in this process use Horovod as well.
    """

    def __init__(
        self, hvd: Any, process_set: Any, waiting: Callable[[str], AbstractContextManager[None]], *, prefix: str = ""
    ) -> None:
        self._hvd = hvd
        self._process_set = process_set
        self._waiting = waiting
        self._prefix = prefix
        self.rank: int = process_set.rank()
        self.world_size: int = process_set.size()
        self._gpu_built = bool(hvd.nccl_built() or hvd.cuda_built())
        self._warned = False

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        self.allreduce_sum_async_(tensor, name).wait()

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> _Pending:
        return self._allreduce_async_(tensor, self._to_host(tensor), name, self._hvd.Sum)

    def allreduce_max_async_(self, tensor: Tensor, name: str) -> _Pending:
        return self._allreduce_async_(tensor, to_host(tensor) if tensor.is_cuda else tensor, name, self._hvd.Max)

    def _allreduce_async_(self, tensor: Tensor, host: Tensor, name: str, op: Any) -> _Pending:
        handle = self._hvd.allreduce_async_(host, name=self._prefix + name, op=op, process_set=self._process_set)

        def finish() -> Tensor:
            self._synchronize(handle)
            return tensor if host is tensor else tensor.copy_(host, non_blocking=True)

        return _Pending(finish, lambda: self._hvd.poll(handle), lambda: self._waiting(f"allreduce of {name}"))

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> _Pending:
        host = self._to_host(tensor)
        splits = torch.tensor(send_bytes, dtype=torch.int32)
        handle = self._hvd.alltoall_async(host, splits=splits, name=self._prefix + name, process_set=self._process_set)

        def finish() -> Tensor:
            received, received_splits = self._synchronize(handle)
            if received_splits.tolist() != list(receive_bytes):
                raise RuntimeError(
                    f"{name}: the ranks sent {received_splits.tolist()} bytes, but {list(receive_bytes)} were expected"
                )
            return to_device(received, tensor.device)

        return _Pending(finish, lambda: self._hvd.poll(handle), lambda: self._waiting(f"alltoall of {name}"))

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> _Pending:
        host = self._to_host(tensor)
        handle = self._hvd.allgather_async(host, name=self._prefix + name, process_set=self._process_set)

        def finish() -> Tensor:
            received: Tensor = self._synchronize(handle)
            if receive_bytes is not None and received.numel() != sum(receive_bytes):
                raise RuntimeError(
                    f"{name}: the ranks sent {received.numel()} bytes, but {sum(receive_bytes)} were expected"
                )
            return to_device(received, tensor.device)

        return _Pending(finish, lambda: self._hvd.poll(handle), lambda: self._waiting(f"allgather of {name}"))

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        with self._waiting("broadcast"), torch.no_grad():
            for index, tensor in enumerate(tensors):
                # Horovod takes neither bf16 nor bool nor 0-dim tensors; bytes carry them all.
                flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
                if flat.numel():
                    value = self._hvd.broadcast(flat.cpu(), root_rank=0, name=f"{self._prefix}broadcast.{index}")
                    tensor.copy_(value.view(tensor.dtype).reshape(tensor.shape))

    def _synchronize(self, handle: int) -> Any:
        wait_asleep(lambda: self._hvd.poll(handle))
        return self._hvd.synchronize(handle)

    def _must_stage(self, tensor: Tensor) -> bool:
        if not tensor.is_cuda or self._gpu_built:
            return False
        if not self._warned:
            self._warned = True
            log.warning(
                "this Horovod was built without GPU operations: merges go through host memory. "
                "Run scripts/setup.sh with the CUDA toolkit and NCCL installed for the direct way."
            )
        return True

    def _to_host(self, tensor: Tensor) -> Tensor:
        return to_host(tensor) if self._must_stage(tensor) else tensor
