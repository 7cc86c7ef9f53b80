"""Samples that a script takes out of its batches by their number (``images[3]``), which a smaller batch may not have.

A script that logs the first pictures of a batch works with any batch that has so many. A rank's share is then no smaller. One
that goes through all samples by number may do so for each batch as long as it is, or up to a fixed number: its source says which.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from hvd_adaptive.wrap.decisions import assignments, is_at, parse, scope_of, value_of
from hvd_adaptive.wrap.sizes import first_of


def number_of_pick(func: Any, args: tuple[Any, ...]) -> int:
    """Returns how many samples a batch must have for a function that takes one of them by its number; 0: it takes none so."""
    if func is Tensor.__getitem__:
        index = first_of(args[1])
    elif func is Tensor.select and len(args) > 2 and args[1] == 0:
        index = args[2]
    else:
        return 0
    if isinstance(index, bool) or not isinstance(index, int):
        return 0
    return index + 1 if index >= 0 else -index


def goes_through_batch(frame: FrameType | None, is_of_batch: Callable[[Tensor], bool]) -> bool:
    """Whether the line that runs in a frame is within a loop that is as long as something of the script's (``range(len(x))``), or
    over what the batch has for each sample (``enumerate(lengths)``).

    Args:
        frame: the script's own code.
        is_of_batch: whether a tensor is made of the batch.
    """
    if frame is None:
        return False
    path, line = frame.f_code.co_filename, frame.f_lineno
    if _is_in_long_loop(path, line):
        return True
    known = {**frame.f_globals, **frame.f_locals}
    values = [value_of(node, known) for node in _gone_through(path, line)]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    return any(bool(parts) and all(isinstance(part, Tensor) and is_of_batch(part) for part in parts) for parts in lists)


@functools.lru_cache(maxsize=256)
def _gone_through(path: str, line: int) -> list[ast.expr]:
    """What the loops around a line go through, also counted or side by side."""
    tree, found = parse(path), []
    todo = [] if tree is None else list(_loops_around(scope_of(tree, line), line))
    for node in todo:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("enumerate", "zip", "reversed"):
            todo += node.args
        else:
            found.append(node)
    return found


# Asked for each sample that is taken.
@functools.lru_cache(maxsize=256)
def _is_in_long_loop(path: str, line: int) -> bool:
    tree = parse(path)
    if tree is None:
        return False
    scope = scope_of(tree, line)
    names = {
        name.id
        for target, value in assignments(scope)
        if _asks_length(value, set())
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    return any(_asks_length(iterable, names) for iterable in _loops_around(scope, line))


def _loops_around(scope: ast.AST, line: int) -> Iterator[ast.expr]:
    for node in ast.walk(scope):
        if not is_at(node, line):
            continue
        if isinstance(node, (ast.For, ast.AsyncFor)):
            yield node.iter
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            yield from (generator.iter for generator in node.generators)


def _asks_length(value: ast.expr, names: set[str]) -> bool:
    """Whether an expression holds a length or a size, or a name that one was given to."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("shape", "size"):
            return True
        if isinstance(node, ast.Name) and node.id in names:
            return True
    return False
