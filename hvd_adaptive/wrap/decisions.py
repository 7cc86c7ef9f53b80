"""Whether a script decides by ``len(batch)``: read in its source, as Python makes a plain integer of a length.

Looked at is the function (or the module's own code) in which ``len`` was called on a batch: the names that its result goes into,
by assignments and sums, and the comparisons of those with anything that does not come from it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import linecache
import operator
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_SCALING = {"mul", "multiply", "div", "divide", "true_divide"}
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


def decides_by_length(frame: FrameType, value: Any) -> bool:
    """Whether the code that runs in a frame, which has called ``len(value)`` in its present line, decides by the result.

    False where there is no source.
    """
    tree = parse(frame.f_code.co_filename)
    if tree is None:
        return False
    line = frame.f_lineno
    scope = scope_of(tree, line)
    lengths = {
        id(node)
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
        and _is_length(node)
        and is_at(node, line)
        and _may_be(node.args[0], value, frame)
    }
    names = _names_of(scope, lengths)
    shared = {name for name in names if "." in name or _is_global(scope, name)}
    return any(_decides(node, names, lengths) for node in ast.walk(scope)) or any(
        _decides(node, shared, set()) for node in (ast.walk(tree) if shared else ())
    )


def divides_by_length(frame: FrameType, is_batch: Callable[[Any], bool]) -> bool:
    """Whether all quotients in the line that runs in a frame are by the length of a batch: ``loss.sum() / len(x)``.

    False where there is no source, or where a name may hold something else as well.

    Args:
        frame: the script's own code.
        is_batch: whether a value holds the batch's samples, a row each.
    """
    tree = parse(frame.f_code.co_filename)
    if tree is None:
        return False
    scope, line = scope_of(tree, frame.f_lineno), frame.f_lineno
    lengths = _lengths(scope, {**frame.f_globals, **frame.f_locals}, is_batch)
    values: dict[str, list[ast.expr]] = {}
    for target, value in assignments(scope):
        values.setdefault(ast.unparse(target), []).append(value)
    divisors = [divisor for node in ast.walk(scope) if (divisor := _divisor(node, line)) is not None]
    return bool(divisors) and all(
        id(divisor) in lengths
        or (isinstance(divisor, ast.Name) and all(id(value) in lengths for value in values.get(divisor.id, [divisor])))
        for divisor in divisors
    )


def scales_by_length(frame: FrameType, number: float, is_batch: Callable[[Any], bool]) -> bool:
    """Whether a product or a quotient in the line that runs in a frame is by this number, and that comes from a batch's length:
    ``loss * (len(x) / batch_size)``.

    False where there is no source, or where the number comes from other calls as well.

    Args:
        frame: the script's own code.
        number: the factor or divisor.
        is_batch: whether a value holds the batch's samples, a row each.
    """
    tree = parse(frame.f_code.co_filename)
    if tree is None:
        return False
    scope, line = scope_of(tree, frame.f_lineno), frame.f_lineno
    known = {**frame.f_globals, **frame.f_locals}
    lengths = _lengths(scope, known, is_batch)
    names = _names_of(scope, lengths, quotients=True) if lengths else set()
    factors: list[ast.expr] = []
    for node in ast.walk(scope) if lengths else ():
        is_scaled = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Mult, ast.Div))
        is_scaled |= isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.strip("_") in _SCALING
        if is_scaled and is_at(node, line):
            factors += [value for value in ast.iter_child_nodes(node) if isinstance(value, ast.expr)]
    values = [value_of(node, known) for node in factors if _comes_from(node, names, lengths, quotients=True)]
    return any(isinstance(value, (int, float)) and value == number for value in values)


def is_constant(frame: FrameType, number: float) -> bool:
    """Whether a number in the statement that runs in a frame is a constant: it is written there, or is an option of argparse's, a
    global that is given once, as a number, or an attribute that only ``__init__`` sets.

    False where there is no source, or where something else in the statement is the same number.
    """
    path = frame.f_code.co_filename
    statement, given = _innermost(path, frame.f_lineno), _given(path)
    known, fixed, others = {**frame.f_globals, **frame.f_locals}, set[float](), set[float]()
    for node in ast.walk(statement):
        if not isinstance(node, (ast.Constant, ast.Name, ast.Attribute)):
            continue
        value, is_fixed = value_of(node, known), isinstance(node, ast.Constant)
        if isinstance(node, ast.Attribute):
            holder = value_of(node.value, known)
            # They are no attributes of a class, which could be properties.
            value = getattr(holder, "__dict__", {}).get(node.attr, value)
            is_fixed = isinstance(holder, argparse.Namespace) or bool(given.get(f".{node.attr}"))
            is_fixed &= all(function == "__init__" for function, _ in given.get(f".{node.attr}", []))
        elif isinstance(node, ast.Name):
            is_local = node.id in frame.f_locals and frame.f_locals is not frame.f_globals
            values = [value for _, value in given.get(node.id, [])]
            is_fixed = not is_local and len(values) == 1 and isinstance(values[0], ast.Constant)
        if isinstance(value, (int, float)):
            (fixed if is_fixed else others).add(abs(value))
    return abs(number) in fixed - others


@functools.lru_cache(maxsize=256)
def _innermost(path: str, line: int) -> ast.AST:
    """The innermost statement or lambda around a line."""
    nodes = (node for node in ast.walk(parse(path) or ast.Module([], [])) if isinstance(node, (ast.stmt, ast.Lambda)))
    return max((node for node in nodes if is_at(node, line)), key=lambda node: node.lineno, default=ast.Pass())


@functools.lru_cache(maxsize=64)
def _given(path: str) -> dict[str, list[tuple[str, ast.expr]]]:
    """What is assigned in a file, by name or ``.attribute``: in which function, and the value."""
    given: dict[str, list[tuple[str, ast.expr]]] = {}
    tree = parse(path)
    if tree is None:
        return given
    for target, value in assignments(tree):
        name = f".{target.attr}" if isinstance(target, ast.Attribute) else ast.unparse(target)
        given.setdefault(name, []).append((getattr(scope_of(tree, target.lineno), "name", ""), value))
    return given


def _lengths(scope: _Scope, known: dict[str, Any], is_batch: Callable[[Any], bool]) -> set[int]:
    """The calls of ``len`` on a batch, by id."""
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call) and _is_length(node))
    return {id(node) for node in calls if is_batch(value_of(node.args[0], known))}


def value_of(node: ast.expr, known: dict[str, Any]) -> Any:
    """Computes an expression of names, numbers and lengths; None where it is made of anything else.

    Args:
        node: the expression.
        known: values by name.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        # Without running code of the script, such as a property's.
        return inspect.getattr_static(value_of(node.value, known), node.attr, None)
    if isinstance(node, ast.Call) and _is_length(node):
        value = value_of(node.args[0], known)
        return len(value) if hasattr(value, "__len__") else None
    if isinstance(node, ast.BinOp) and (compute := _ARITHMETIC.get(type(node.op))) is not None:
        left, right = value_of(node.left, known), value_of(node.right, known)
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        with contextlib.suppress(ArithmeticError):
            return compute(left, right) if numbers else None
    return None


def _divisor(node: ast.AST, line: int) -> ast.expr | None:
    if not is_at(node, line):
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.value
    is_div = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("div", "div_")
    return node.args[0] if is_div and node.args else None  # type: ignore[attr-defined]


def leaves_out_samples(collate: Any) -> bool:
    """Whether a loader's ``collate_fn`` makes batches of some of its samples only, as without those that are None.

    False where there is no source.
    """
    while isinstance(collate, functools.partial):
        collate = collate.func
    function = inspect.unwrap(getattr(collate, "__func__", collate))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or str(getattr(function, "__module__", "")).split(".")[0] == "torch":
        return False
    tree, names = parse(code.co_filename), set(code.co_varnames)
    return tree is not None and any(_filters(node, names) for node in ast.walk(scope_of(tree, code.co_firstlineno)))


def _filters(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "filter":
        return any(isinstance(argument, ast.Name) and argument.id in names for argument in node.args[1:])
    return isinstance(node, (ast.ListComp, ast.GeneratorExp)) and any(
        generator.ifs and isinstance(generator.iter, ast.Name) and generator.iter.id in names for generator in node.generators
    )


@functools.lru_cache(maxsize=64)
def parse(path: str) -> ast.Module | None:
    """Returns the source of a file as a tree; None where there is none."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def is_at(node: ast.AST, line: int) -> bool:
    """Whether a line is one of a piece of source; none is of what has no place of its own, as a whole file."""
    return bool(getattr(node, "lineno", line + 1) <= line <= getattr(node, "end_lineno", line))


def scope_of(tree: ast.Module, line: int) -> _Scope:
    """The innermost function around a line."""
    around = [function for function in functions_of(tree) if is_at(function, line)]
    # Of two that begin in one line, the later one is within the other.
    return max(enumerate(around), key=lambda item: (item[1].lineno, item[0]))[1] if around else tree


@functools.lru_cache(maxsize=64)
def functions_of(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions in a file, the outer ones first."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _is_length(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1


def _may_be(node: ast.expr, value: Any, frame: FrameType) -> bool:
    """Whether an argument stands for the value; what is no plain name may."""
    if not isinstance(node, ast.Name):
        return not isinstance(node, ast.Attribute)
    return frame.f_locals.get(node.id, frame.f_globals.get(node.id)) is value


def _names_of(scope: _Scope, lengths: set[int], *, quotients: bool = False) -> set[str]:
    """The names that hold one of the lengths, or what was computed with it by adding and the like."""
    names: set[str] = set()
    given = list(assignments(scope))
    while True:
        found = {
            ast.unparse(target)
            for target, value in given
            if _comes_from(value, names, lengths, quotients=quotients) and isinstance(target, (ast.Name, ast.Attribute))
        }
        if found <= names:
            return names
        names |= found


def assignments(scope: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields what is assigned in a piece of source, and what to."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value
        elif isinstance(node, (ast.AugAssign, ast.NamedExpr)) or (isinstance(node, ast.AnnAssign) and node.value):
            yield node.target, node.value  # type: ignore[misc]


def _comes_from(node: ast.AST, names: set[str], lengths: set[int], *, quotients: bool = False) -> bool:
    """Whether an expression is a length, a name that holds one, or arithmetic with one, also quotients if wanted."""
    if id(node) in lengths:
        return True
    if isinstance(node, (ast.Name, ast.Attribute)):
        return ast.unparse(node) in names
    if isinstance(node, ast.BinOp) and (quotients or not isinstance(node.op, ast.Div)):
        parts = [node.left, node.right]
    else:
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
    return any(_comes_from(part, names, lengths, quotients=quotients) for part in parts)


def _decides(node: ast.AST, names: set[str], lengths: set[int]) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        of_batch = [side for side in sides if _comes_from(side, names, lengths)]
        others = [side for side in sides if side not in of_batch]
        if not of_batch or not others:
            return False
        if isinstance(node.ops[0], (ast.Eq, ast.NotEq)) and all(_is_length(side) for side in others):
            # Whether inputs and targets belong together.
            return False
        is_count = not any(isinstance(part, (ast.Mod, ast.Sub, ast.FloorDiv)) for side in of_batch for part in ast.walk(side))
        return not (is_count and all(isinstance(side, ast.Constant) and side.value in (0, None) for side in others))
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(node.test, ast.BinOp):
        return _comes_from(node.test, names, lengths)
    if isinstance(node, ast.Match):
        return _comes_from(node.subject, names, lengths)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        return any(_comes_from(argument, names, lengths) for argument in node.args)
    return False


def _is_global(scope: _Scope, name: str) -> bool:
    return any(isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names for node in ast.walk(scope))
