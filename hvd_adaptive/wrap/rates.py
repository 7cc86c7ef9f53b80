"""Whether a script sets its learning rate by the samples that it has seen, or by the words in them: read in its source.

Looked at is the code in which a batch's size was asked for, or something in it was counted: the numbers that it goes into, also
in other functions of the same file that are given one or share it, and whether one of those becomes a learning rate
(``group["lr"] = ...``).
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hvd_adaptive.wrap.decisions import assignments, functions_of, is_at, parse, scope_of

_NUMERIC = {"min", "max", "float", "int", "round", "abs", "sum", "pow"}
# Of a tensor's methods.
_CONVERTING = {"item", "tolist", "float", "double", "long", "int", "cpu", "detach"}
_EXCHANGING = {"allreduce_", "allreduce_async_", "all_reduce", "broadcast_", "broadcast_async_", "broadcast"}
_MOST_CALLS = 3


@functools.lru_cache(maxsize=256)
def sets_rate_by_size(path: str, line: int, *, is_count: bool = False) -> bool:
    """Whether a batch's size that is asked for in a line goes into a learning rate; False where there is no source.

    Args:
        path: the source.
        line: in it.
        is_count: not the size is asked for, but a count of what is in the batch.
    """
    tree = parse(path)
    if tree is None:
        return False
    scope = scope_of(tree, line)
    asked = {id(node) for node in ast.walk(scope) if (_counts if is_count else _asks_size)(node) and is_at(node, line)}
    return bool(asked) and _sets_rate(tree, scope, asked)


def _sets_rate(tree: ast.Module, scope: Any, asked: set[int]) -> bool:
    """Whether one of the numbers goes into a learning rate in a function, or in others that it is handed on to."""
    functions = functions_of(tree)
    level: dict[Any, set[str]] = {scope: set()}
    # What each function was looked at with: at most once a level, as many may share a number.
    known: dict[Any, set[str]] = defaultdict(set)
    for _ in range(_MOST_CALLS + 1):
        given: list[tuple[Any, set[str]]] = []
        shared: set[str] = set()
        for function, names in level.items():
            values = list(assignments(function))
            of_all = set(_exchanged(function))
            while True:
                found = {
                    ast.unparse(target)
                    for target, value in values
                    if _is_made_of(value, names, asked) and not _is_rate(target)
                } - of_all
                if found <= names:
                    break
                names = names | found
            if any(_is_rate(target) and _is_made_of(value, names, asked) for target, value in values):
                return True
            given += _called(functions, function, names, asked)
            shared |= _shared(function, names)
        level, asked = {}, set()
        for function, names in [*given, *((function, shared) for function in functions)]:
            if not names <= known[function]:
                level[function] = known[function] = known[function] | names
    return False


def _exchanged(scope: Any) -> Iterator[str]:
    """Yields what a function has the ranks add up in place, or tell each other: that is the same on all of them."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and node.args and _name_of(node.func) in _EXCHANGING:
            yield ast.unparse(node.args[0])


def _called(functions: list[Any], scope: Any, names: set[str], asked: set[int]) -> Iterator[tuple[Any, set[str]]]:
    """Yields functions that a function gives one of the numbers, and what they call it."""
    by_name = {function.name: function for function in functions if function is not scope}
    for node in ast.walk(scope):
        function = by_name.get(_name_of(node.func)) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and function is not None:
            parameters = [argument.arg for argument in function.args.args]
            parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
            given = {name for name, value in zip(parameters, node.args, strict=False) if _is_made_of(value, names, asked)}
            given |= {keyword.arg for keyword in node.keywords if keyword.arg and _is_made_of(keyword.value, names, asked)}
            if given:
                yield function, given


def _shared(scope: Any, names: set[str]) -> set[str]:
    """Returns which of a function's names all functions know: attributes and globals."""
    if isinstance(scope, ast.Module):
        return names
    declared = {name for node in ast.walk(scope) if isinstance(node, ast.Global) for name in node.names}
    return {name for name in names if "." in name or name in declared}


def _is_made_of(node: ast.AST, names: set[str], asked: set[int]) -> bool:
    """Whether an expression is one of the numbers, or arithmetic with one."""
    if id(node) in asked:
        return True
    if isinstance(node, (ast.Name, ast.Attribute)):
        return ast.unparse(node) in names
    if isinstance(node, ast.BinOp):
        return any(_is_made_of(side, names, asked) for side in (node.left, node.right))
    if isinstance(node, ast.UnaryOp):
        return _is_made_of(node.operand, names, asked)
    if isinstance(node, ast.IfExp):
        return any(_is_made_of(part, names, asked) for part in (node.test, node.body, node.orelse))
    if isinstance(node, ast.Compare):
        return any(_is_made_of(side, names, asked) for side in (node.left, *node.comparators))
    if isinstance(node, ast.Subscript):
        return _is_made_of(node.value, names, asked)
    if isinstance(node, ast.Call):
        module = node.func.value if isinstance(node.func, ast.Attribute) else None
        if module is not None and _name_of(node.func) in _CONVERTING:
            return _is_made_of(module, names, asked)
        is_numeric = _name_of(node.func) in _NUMERIC or (isinstance(module, ast.Name) and module.id in ("math", "np", "numpy"))
        return is_numeric and any(_is_made_of(argument, names, asked) for argument in node.args)
    return False


def _is_rate(target: ast.AST) -> bool:
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == "lr"


def _asks_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _name_of(node.func) in ("len", "size", "numel")
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _counts(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) in ("sum", "count_nonzero")


def _name_of(func: ast.AST) -> str:
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
