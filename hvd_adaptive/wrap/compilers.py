"""torch.compile, intercepted in place: what it makes is called with nobody watching, and reported.

Dynamo reads the Python that it compiles, hooks and function modes included, and compiles again when they are gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def is_reading() -> bool:
    """Whether Dynamo, the jit's tracer or an export reads this code rather than to run it."""
    return bool(torch.compiler.is_compiling()) or torch._C._get_tracing_state() is not None


def intercept_compile(unwatched: Callable[[], AbstractContextManager[None]], called: Callable[[], None]) -> None:
    """Replaces ``torch.compile``, which ``nn.Module.compile`` uses as well.

    Args:
        unwatched: nothing is watched within it.
        called: is told of each call of what was compiled.
    """
    own = torch.compile

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def outside(*args: Any, **options: Any) -> Any:
            if is_reading():
                return call(*args, **options)
            called()
            with unwatched():
                return call(*args, **options)

        return outside

    def seen(compiled: Any) -> Any:
        if not isinstance(compiled, nn.Module):
            return around(compiled)
        cls: Any = type(compiled)
        if not hasattr(cls.__call__, "__wrapped__"):
            cls.__call__ = around(cls.__call__)
        return compiled

    @functools.wraps(own)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        compiled = own(model, **options)
        return compiled if compiled is model else seen(compiled)

    torch.compile = compile
