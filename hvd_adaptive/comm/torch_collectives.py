"""torch.distributed's collectives over a process group, in the background, for tensors on CPU or CUDA.

torch.distributed tells collectives apart by their order alone, and Gloo ends the process where sizes do not fit. So one thread
runs all of a rank's collectives in the order in which they were started, and compares names and sizes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hvd_adaptive.comm.protocols import InOrder
from hvd_adaptive.comm.size_check import MismatchError, balance, check_sizes, fingerprint, is_balanced

Result = TypeVar("Result")
_NAME_BYTES = 64  # of a collective's name that are compared, its last ones


class BrokenWorldError(RuntimeError):
    """A collective failed: another rank has ended, or the network to it is down."""


class TorchCollectives:
    """The ranks of a process group; see :class:`hvd_adaptive.comm.protocols.Group`.

    Args:
        group: the process group.
        worker: runs this rank's collectives, one at a time; of this group alone, or of others as well.
        waiting: marks this rank as waiting, for the heartbeats.
        broken: called on the main thread when a collective has failed; raises.
        on_gpus: whether the group takes CUDA tensors; else they go through host memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        worker: ThreadPoolExecutor,
        waiting: Callable[[str], AbstractContextManager[None]],
        broken: Callable[[BrokenWorldError], Any],
        *,
        on_gpus: bool,
    ) -> None:
        self._group = group
        self._worker = worker
        self._waiting = waiting
        self._broken = broken
        self.on_gpus = on_gpus
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)

    def allreduce_sum_(self, tensor: Tensor, name: str) -> None:
        self.allreduce_sum_async_(tensor, name).wait()

    def allreduce_sum_async_(self, tensor: Tensor, name: str) -> InOrder:
        return self._reduce(f"allreduce of {name}", tensor, dist.ReduceOp.SUM)

    def alltoall_bytes_async(
        self, tensor: Tensor, *, send_bytes: Sequence[int], receive_bytes: Sequence[int], name: str
    ) -> InOrder:
        sent, expected = list(send_bytes), list(receive_bytes)

        def run() -> Tensor:
            balances = self._gather_numbers(f"alltoall of {name}", balance(self.rank, sent=sent, expected=expected))[:, 0]
            if not is_balanced(balances):
                table = self._gather([*sent, *expected])
                check_sizes(name, table[:, : self.world_size].T, table[:, self.world_size :], self.rank)
            source = self._to_wire(tensor)
            received = source.new_empty(sum(expected))
            dist.all_to_all_single(received, source, expected, sent, group=self._group)
            return received.to(tensor.device)

        return self._start(f"alltoall of {name}", tensor, run)

    def allgather_bytes_async(self, tensor: Tensor, *, receive_bytes: Sequence[int] | None, name: str) -> InOrder:
        expected = [-1] * self.world_size if receive_bytes is None else list(receive_bytes)

        def run() -> Tensor:
            table = self._gather_numbers(
                f"allgather of {name}", tensor.numel(), int(receive_bytes is not None), fingerprint(expected)
            )
            sizes, knows, wanted = table.T
            if (wanted[knows > 0] != fingerprint(sizes.tolist())).any():
                check_sizes(name, sizes.expand(self.world_size, -1), self._gather(expected), self.rank)
            most = int(sizes.max())
            if not most:
                return tensor.new_empty(0)
            wire = self._to_wire(tensor)
            # Gloo gathers parts of one size only.
            padded = wire.new_zeros(most)
            padded[: wire.numel()] = wire
            gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(gathered, padded, group=self._group)
            parts = [part[:size] for part, size in zip(gathered, sizes.tolist(), strict=True)]
            return torch.cat(parts).to(tensor.device)

        return self._start(f"allgather of {name}", tensor, run)

    def allreduce_max_async_(self, tensor: Tensor, name: str) -> InOrder:
        return self._reduce(f"allreduce of {name}", tensor, dist.ReduceOp.MAX)

    def allreduce_or_(self, bits: Tensor) -> None:
        self._reduce("OR of bits", bits, dist.ReduceOp.BOR).wait()

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                self._start("broadcast", tensor, lambda tensor=tensor: self._broadcast_(tensor)).wait()  # type: ignore[misc]

    def call(self, what: str, action: Callable[[], Result]) -> Result:
        """Runs what consists of collectives on host memory, after all that was started before; returns its result. COLLECTIVE."""
        return self._finish(what, self._worker.submit(_translated, action))

    def _start(self, what: str, tensor: Tensor, action: Callable[[], Tensor]) -> InOrder:
        filled = None
        if tensor.is_cuda:
            filled = torch.cuda.Event()
            filled.record(torch.cuda.current_stream(tensor.device))

        def run() -> Tensor:
            # This thread's stream knows nothing of the one that fills the tensor, nor that one of this.
            with torch.no_grad(), torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
                if filled is not None:
                    filled.synchronize()
                result = action()
                if filled is not None:
                    torch.cuda.current_stream(tensor.device).synchronize()
                return result

        future = self._worker.submit(_translated, run)
        return InOrder(lambda: self._finish(what, future))

    def _finish(self, what: str, future: Future[Result]) -> Result:
        with self._waiting(what):
            try:
                return future.result()
            except BrokenWorldError as error:
                self._broken(BrokenWorldError(f"{what}: {error}"))
                raise

    def _reduce(self, what: str, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> InOrder:
        def run() -> Tensor:
            sizes = self._gather_numbers(what, tensor.numel())[:, 0]
            if (sizes != sizes[0]).any():
                raise MismatchError(f"{what}: the ranks' tensors have {sizes.tolist()} elements, and must have equally many")
            wire = self._to_wire(tensor)
            dist.all_reduce(wire, operation, group=self._group)
            return tensor if wire is tensor else tensor.copy_(wire)

        return self._start(what, tensor, run)

    def _broadcast_(self, tensor: Tensor) -> Tensor:
        # Not every backend takes every type; bytes carry them all.
        wire = self._to_wire(tensor.detach().reshape(-1).contiguous().view(torch.uint8)).clone()
        dist.broadcast(wire, dist.get_global_rank(self._group, 0), group=self._group)
        return tensor.copy_(wire.view(tensor.dtype).reshape(tensor.shape))

    def _gather_numbers(self, what: str, *numbers: int) -> Tensor:
        """Every rank's numbers, shape (world_size, 3), with zeros where there are fewer. COLLECTIVE.

        Args:
            what: the collective that they belong to, the same on every rank.
            numbers: this rank's, int64; at most three.

        Raises:
            MismatchError: on every rank, if they have come to different collectives.
        """
        name = np.frombuffer(what.encode()[-_NAME_BYTES:].ljust(_NAME_BYTES), dtype=np.int64).tolist()
        table = self._gather([*name, *numbers, *[0] * (3 - len(numbers))])
        names = [bytes(row.numpy()).decode(errors="replace").strip() for row in table[:, : len(name)]]
        if len(set(names)) > 1:
            raise MismatchError(
                f"the ranks must start collectives in one order, but came to {dict(enumerate(names))}: with backend 'torch' use "
                "sessions and exchanges in the same order on every rank, or take Horovod, which tells them apart by name"
            )
        return table[:, len(name) :]

    def _gather(self, numbers: Sequence[int]) -> Tensor:
        """Every rank's numbers, equally many, shape (world_size, len(numbers)). COLLECTIVE."""
        own = torch.tensor(numbers, dtype=torch.int64)
        table = torch.empty(self.world_size, len(numbers), dtype=torch.int64)
        dist.all_gather(list(table), own, group=self._group)
        return table

    def _to_wire(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if tensor.is_cuda and not self.on_gpus else tensor


def _translated(action: Callable[[], Result]) -> Result:
    try:
        return action()
    except MismatchError:
        raise
    except RuntimeError as error:
        raise BrokenWorldError(str(error)) from None
