"""Horovod's collectives, intercepted in place: their names, for who waits in one, and what the script itself exchanges."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from hvd_adaptive.wrap.wrapped_run import Engine

# Horovod's functions through which all of one kind go, and where a name stands among their arguments; after it the op, if any.
_FUNCTIONS = {
    "_allreduce_async": 2,
    "_grouped_allreduce_async": 2,
    "_allgather_async": 2,
    "_grouped_allgather_async": 2,
    "_broadcast_async": 3,
    "_alltoall_async": 4,
    "_reducescatter_async": 2,
    "_grouped_reducescatter_async": 2,
}
_OWN = "hvd_adaptive."


class CollectiveName(NamedTuple):
    """What a handle stands for; made into words only where a rank waits too long, as each gradient has one."""

    kind: str
    name: str | None
    whose: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.whose})" if self.name else f"{self.kind} ({self.whose})"


class _ByOptimizer(threading.local):
    is_here = False
    # Within a collective that consists of others, and was told.
    is_told = False


_by_optimizer = _ByOptimizer()
_names: dict[int, CollectiveName] = {}


def of_optimizer(action: Callable[..., Any], *args: Any) -> None:
    """Calls what exchanges something that belongs to a wrapped optimizer, in this thread."""
    before, _by_optimizer.is_here = _by_optimizer.is_here, True
    try:
        action(*args)
    finally:
        _by_optimizer.is_here = before


def take_name(handle: Any) -> CollectiveName | str:
    """Returns what a handle stands for, and forgets it."""
    return _names.pop(handle, "a collective") if isinstance(handle, int) else "a collective"


def intercept_collectives(listener: Engine) -> None:
    """Replaces the functions of ``horovod.torch.mpi_ops`` that begin a collective."""
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    for function, place in _FUNCTIONS.items():
        own = getattr(mpi_ops, function, None)
        if own is not None:
            setattr(mpi_ops, function, _around(own, function.strip("_").removesuffix("_async"), place, listener))
    # A sparse gradient is not a value for each sample, though the numbers of its rows may be the batch itself.
    own_sparse = mpi_ops.sparse_allreduce_async

    @functools.wraps(own_sparse)
    def sparse_allreduce_async(tensor: Any, name: Any, op: Any, *args: Any, **options: Any) -> Any:
        listener.exchanged(f"sparse_allreduce {name!r}", [tensor], is_sum=op == mpi_ops.Sum)
        _by_optimizer.is_told = True
        try:
            return own_sparse(tensor, name, op, *args, **options)
        finally:
            _by_optimizer.is_told = False

    mpi_ops.sparse_allreduce_async = hvd.sparse_allreduce_async = sparse_allreduce_async


def _around(own: Callable[..., Any], kind: str, place: int, listener: Engine) -> Callable[..., Any]:
    from horovod.torch import mpi_ops

    @functools.wraps(own)
    def begin(*args: Any, **options: Any) -> Any:
        name = args[place] if len(args) > place else options.get("name")
        if _by_optimizer.is_here:
            whose = "of the optimizer's gradients"
        elif isinstance(name, str) and name.startswith(_OWN):
            whose = "between steps"
        else:
            whose = "of the script's"
            given = args[0] if args else None
            if not _by_optimizer.is_told:
                listener.exchanged(
                    f"{kind} {name!r}" if name else kind,
                    [given] if isinstance(given, Tensor) else list(given or []),
                    is_sum="reduce" in kind and (args[place + 1] if len(args) > place + 1 else options.get("op")) == mpi_ops.Sum,
                )
        handle = own(*args, **options)
        if isinstance(handle, int):
            _names[handle] = CollectiveName(kind, name, whose)
        return handle

    return begin
