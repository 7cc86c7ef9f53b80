"""Horovod's collectives over the world or a process set, in the background, for tensors on CPU or CUDA.

A CPU build of Horovod copies CUDA tensors without waiting for the stream that fills them: with such a build they go
through host memory here.

Horovod 0.28.1 casts numbers of elements to C ints, and larger ones are cut off without a word. Sums and broadcasts of more
elements go in parts.
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

# Of one sum or broadcast, whose bytes are elements where bytes are sent. Half of what an int holds: MPI libraries add to it.
MOST_ELEMENTS = 1 << 30
# Of all ranks together, in one gather or alltoall: Horovod's places in the result are ints too.
_MOST_GATHERED_BYTES = (1 << 31) - 1


def in_parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Cuts a contiguous tensor into flat views that one collective takes, each with a name; a small one is its only part."""
    if tensor.numel() <= MOST_ELEMENTS:
        return [(name, tensor)]
    # The first part keeps the name: ranks whose tensors have different sizes meet there, and Horovod tells them.
    return [(f"{name}.part{index}" if index else name, part) for index, part in enumerate(tensor.view(-1).split(MOST_ELEMENTS))]


def gathered_share(world_size: int) -> int:
    """Returns how many bytes each rank may give to one gather whose total no rank knows: a multiple of 8."""
    return max(MOST_ELEMENTS // world_size // 8 * 8, 8)


def _check_gathered(name: str, num_bytes: int) -> None:
    if num_bytes > _MOST_GATHERED_BYTES:
        raise ValueError(
            f"{name}: the ranks' parts must have at most {_MOST_GATHERED_BYTES} bytes together, which is all that Horovod "
            f"counts, got {num_bytes}: use backend 'torch', which counts further, or a smaller model"
        )


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

    Raises:
        ValueError: by a gather or an alltoall, before it begins, if it has more bytes together than a C int holds. A gather
            raises it on all ranks, which are given the same sizes; an alltoall only on the ranks that send or receive so
            much, and the others wait until the job ends. Where a gather's sizes are not known, nothing is checked, and each
            rank must give at most :func:`gathered_share`.
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
        handles = [
            self._hvd.allreduce_async_(part, name=self._prefix + part_name, op=op, process_set=self._process_set)
            for part_name, part in in_parts(name, host)
        ]

        def finish() -> Tensor:
            for handle in handles:
                self._synchronize(handle)
            return tensor if host is tensor else tensor.copy_(host, non_blocking=True)

        return _Pending(finish, lambda: all(map(self._hvd.poll, handles)), lambda: self._waiting(f"allreduce of {name}"))

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> _Pending:
        _check_gathered(name, max(sum(send_bytes), sum(receive_bytes)))
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
        if receive_bytes is not None:
            _check_gathered(name, sum(receive_bytes))
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
                if not flat.numel():
                    continue
                for name, part in in_parts(f"{self._prefix}broadcast.{index}", flat):
                    part.copy_(self._hvd.broadcast(part.cpu(), root_rank=0, name=name))
                # Else ``flat`` is the tensor's own memory.
                if not tensor.is_contiguous():
                    tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))

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
