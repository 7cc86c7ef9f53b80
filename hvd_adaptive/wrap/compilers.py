"""torch.compile and CUDA graphs, intercepted in place: what they make is called with nobody watching, and reported.

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


# Calls a compiled module: it, the Python that it was made of, what was made of it, and arguments.
CallModule = Callable[[nn.Module, Callable[..., Any], Callable[..., Any], Any, Any], Any]


def intercept_compile(
    unwatched: Callable[[], AbstractContextManager[None]], called: Callable[[], None], call_module: CallModule | None = None
) -> None:
    """Replaces ``torch.compile``, which ``nn.Module.compile`` uses as well.

    Args:
        unwatched: nothing is watched within it.
        called: is told of each call of what was compiled.
        call_module: calls a module that was compiled; None: as any other function.
    """
    own = torch.compile

    def around(call: Callable[..., Any], source: Any = None) -> Callable[..., Any]:
        @functools.wraps(call)
        def outside(*args: Any, **options: Any) -> Any:
            if is_reading():
                return call(*args, **options)
            if call_module is not None and args and isinstance(getattr(args[0], "_orig_mod", None), nn.Module):
                compiled, *others = args
                return call_module(compiled._orig_mod, compiled._orig_mod, functools.partial(call, compiled), others, options)
            module = getattr(source, "__self__", None)
            if call_module is not None and isinstance(module, nn.Module) and source == module._call_impl:
                return call_module(module, source, call, args, options)
            called()
            with unwatched():
                return call(*args, **options)

        return outside

    def seen(compiled: Any, source: Any) -> Any:
        if not isinstance(compiled, nn.Module):
            return around(compiled, source)
        cls: Any = type(compiled)
        if not hasattr(cls.__call__, "__wrapped__"):
            cls.__call__ = around(cls.__call__)
        return compiled

    @functools.wraps(own)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        compiled = own(model, **options)
        return compiled if compiled is model else seen(compiled, model)

    torch.compile = compile


def intercept_graphs(unwatched: Callable[[], AbstractContextManager[None]], called: Callable[[], None]) -> None:
    """Replaces ``torch.cuda.make_graphed_callables`` and ``torch.cuda.CUDAGraph.replay``: a graph has one batch size.

    Args:
        unwatched: nothing is watched within it.
        called: is told of each call of what was captured.
    """
    graph_class: Any = torch.cuda.CUDAGraph
    own, replay = torch.cuda.make_graphed_callables, graph_class.replay

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def outside(*args: Any, **options: Any) -> Any:
            called()
            with unwatched():
                return call(*args, **options)

        return outside

    def seen(graphed: Any) -> Any:
        if isinstance(graphed, nn.Module):
            graphed.forward = around(graphed.forward)
            return graphed
        return around(graphed)

    @functools.wraps(own)
    def make_graphed_callables(*args: Any, **options: Any) -> Any:
        with unwatched():
            made = own(*args, **options)
        return tuple(map(seen, made)) if isinstance(made, tuple) else seen(made)

    @functools.wraps(replay)
    def replay_and_tell(graph: Any) -> Any:
        called()
        return replay(graph)

    torch.cuda.make_graphed_callables = make_graphed_callables
    graph_class.replay = replay_and_tell
