"""Horovod's collectives of CUDA tensors by way of host memory, where ranks share a GPU: NCCL refuses two ranks on one GPU.

All of Horovod's functions for PyTorch, its optimizer's among them, begin and end in a few functions of ``horovod.torch.mpi_ops``.
These are replaced in place: a collective gets copies in pinned host memory, and who waits for it copies the result back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.comm.host_staging import to_host

# Functions that begin a collective, and where the tensors stand that they fill; the first argument is what they send.
_FUNCTIONS = {
    "_allreduce_async": (1,),
    "_grouped_allreduce_async": (1,),
    "_allgather_async": (1,),
    "_grouped_allgather_async": (1,),
    "_broadcast_async": (1,),
    "_alltoall_async": (2, 3),
    "_reducescatter_async": (1,),
    "_grouped_reducescatter_async": (1,),
}
_GLOBAL_SET = 0


class HostRoute:
    """The way of this process's collectives of CUDA tensors. One instance a process, made by :func:`host_route`.

    Attributes:
        is_taken: whether they go through host memory.
        first_use: called before the first collective of CUDA tensors over all ranks: every rank is there.
    """

    def __init__(self, mpi_ops: Any) -> None:
        self.is_taken = False
        self.first_use: Callable[[Tensor], None] | None = None
        self._mpi_ops = mpi_ops
        self._copy_back: dict[int, Callable[[], None]] = {}
        for name, outputs in _FUNCTIONS.items():
            own = getattr(mpi_ops, name, None)
            if own is not None:
                setattr(mpi_ops, name, self._beginning(own, outputs))
        library = mpi_ops.mpi_lib
        wait = library.horovod_torch_wait_and_clear

        def wait_and_clear(handle: int) -> Any:
            result = wait(handle)
            copy_back = self._copy_back.pop(handle, None)
            if copy_back is not None:
                copy_back()
            return result

        library.horovod_torch_wait_and_clear = wait_and_clear

    def _beginning(self, own: Callable[..., Any], outputs: Sequence[int]) -> Callable[..., Any]:
        @functools.wraps(own)
        def begin(*args: Any) -> Any:
            sent = _tensors(args[0])
            if not sent or not sent[0].is_cuda:
                return own(*args)
            is_of_all = any(getattr(value, "process_set_id", None) == _GLOBAL_SET for value in args)
            if self.first_use is not None and is_of_all:
                first_use, self.first_use = self.first_use, None
                first_use(sent[0])
            return self._through_host(own, args, outputs) if self.is_taken else own(*args)

        return begin

    def _through_host(self, own: Callable[..., Any], args: tuple[Any, ...], outputs: Sequence[int]) -> Any:
        staged = list(args)
        hosts: dict[int, Tensor] = {}
        filled: list[tuple[Tensor, Tensor]] = []
        for place, value in enumerate(args):
            for tensor in _tensors(value):
                if tensor.is_cuda and id(tensor) not in hosts:
                    is_filled = place in outputs
                    hosts[id(tensor)] = _like(tensor) if is_filled else to_host(tensor)
                if place in outputs and id(tensor) in hosts:
                    filled.append((tensor, hosts[id(tensor)]))
            staged[place] = _mapped(value, hosts)
        handle = own(*staged)

        def copy_back() -> None:
            with torch.no_grad():
                for tensor, host in filled:
                    if tensor.shape != host.shape:
                        tensor.resize_(host.shape)
                    tensor.copy_(host if host.is_pinned() else host.pin_memory(), non_blocking=True)

        self._copy_back[handle] = copy_back
        # What Horovod's synchronize returns.
        results = [tuple(args[place]) if isinstance(args[place], (list, tuple)) else args[place] for place in outputs]
        self._mpi_ops._handle_map[handle] = (args[0], results[0] if len(results) == 1 else tuple(results))
        return handle


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, (list, tuple)) else []


def _mapped(value: Any, hosts: dict[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([hosts.get(id(one), one) for one in value])
    return hosts.get(id(value), value)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.numel() > 0)


@functools.cache
def host_route() -> HostRoute:
    """Returns this process's way; the first call replaces Horovod's functions, for good."""
    from horovod.torch import mpi_ops

    return HostRoute(mpi_ops)
