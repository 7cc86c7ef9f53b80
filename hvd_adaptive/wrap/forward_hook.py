"""A hook after every module's forward that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules import module as modules


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
