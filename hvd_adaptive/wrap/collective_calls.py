"""Horovod's collectives, intercepted in place: their names, for who waits in one, and what the script itself exchanges."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

# Horovod's functions through which all of one kind go, and where a name stands among their arguments.
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
_by_optimizer = threading.local()
_names: dict[int, str] = {}


class Listener(Protocol):
    """What is told of collectives."""

    def exchanged(self, what: str, tensors: list[Tensor]) -> None:
        """The script gives tensors to a collective."""


@contextmanager
def of_optimizer() -> Iterator[None]:
    """What is exchanged within belongs to a wrapped optimizer, in this thread."""
    before = getattr(_by_optimizer, "is_here", False)
    _by_optimizer.is_here = True
    try:
        yield
    finally:
        _by_optimizer.is_here = before


def take_name(handle: Any) -> str:
    """Returns what a handle stands for, and forgets it."""
    return _names.pop(handle, "a collective") if isinstance(handle, int) else "a collective"


def intercept_collectives(listener: Listener) -> None:
    """Replaces the functions of ``horovod.torch.mpi_ops`` that begin a collective."""
    from horovod.torch import mpi_ops

    for function, place in _FUNCTIONS.items():
        own = getattr(mpi_ops, function, None)
        if own is not None:
            setattr(mpi_ops, function, _around(own, function.strip("_").removesuffix("_async"), place, listener))


def _around(own: Callable[..., Any], kind: str, place: int, listener: Listener) -> Callable[..., Any]:
    @functools.wraps(own)
    def begin(*args: Any, **options: Any) -> Any:
        name = options.get("name", args[place] if len(args) > place else None)
        is_own = isinstance(name, str) and name.startswith(_OWN)
        is_optimizers = getattr(_by_optimizer, "is_here", False)
        if not is_own and not is_optimizers:
            given = args[0] if args else None
            listener.exchanged(f"{kind} {name!r}" if name else kind, [given] if isinstance(given, Tensor) else list(given or []))
        handle = own(*args, **options)
        if isinstance(handle, int):
            of = "of the optimizer's gradients" if is_optimizers else "of the script's" if not is_own else "between steps"
            _names[handle] = f"{kind} {name!r} ({of})" if name else f"{kind} ({of})"
        return handle

    return begin
