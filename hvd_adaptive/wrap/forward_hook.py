"""A hook after every module's forward that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hvd_adaptive.wrap.compilers import is_reading
from hvd_adaptive.wrap.tensors import tensors_in


class ForwardHook:
    """Calls a function after every module's forward, with its keyword arguments too.

    Args:
        hook: gets the module, its arguments and keyword arguments, and its result.
        always_call: also after a forward that has failed.
    """

    def __init__(self, hook: Callable[..., Any], *, always_call: bool = False) -> None:
        self._handle: Any = modules.register_module_forward_hook(hook, with_kwargs=True, always_call=always_call)

    def remove(self) -> None:
        """Ends that."""
        self._handle.remove()
        # torch leaves this entry, and then warns of hooks at every call of a compiled module.
        modules._global_forward_hooks_with_kwargs.pop(self._handle.id, None)


class WatchedForwards:
    """Has every forward looked at, from when that is asked for.

    Args:
        check: is called for each forward with gradients, with the module and what finds the tensors in its arguments.
        evaluates: is called for each without, with the module.
    """

    def __init__(
        self, check: Callable[[nn.Module, Callable[[], list[Tensor]]], None], evaluates: Callable[[nn.Module], None]
    ) -> None:
        self._check = check
        self._evaluates = evaluates
        self._hook: ForwardHook | None = None

    def watch(self) -> None:
        """Begins that; may be called again."""
        if self._hook is None:
            self._hook = ForwardHook(self._after)

    def stop(self) -> None:
        """Ends it."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """None is looked at within."""
        is_watched = self._hook is not None
        self.stop()
        try:
            yield
        finally:
            if is_watched:
                self.watch()

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if is_reading() or torch._C._current_graph_task_id() != -1:
            return
        if not torch.is_grad_enabled():
            self._evaluates(module)
        else:
            self._check(module, lambda: list(tensors_in([args, kwargs])))
