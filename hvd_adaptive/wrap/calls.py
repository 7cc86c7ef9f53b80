"""Calls of torch's functions as they are kept, with what stands for tensors and numbers that are made of the batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")}


class Slot(NamedTuple):
    """Stands for a tensor that is made of the batch."""

    number: int


class Call(NamedTuple):
    """A function's call.

    Attributes:
        func: the function.
        args: its arguments, with slots.
        kwargs: and by their names.
        slots: of the tensors that it gave, or wrote to.
        is_after: it came after a forward, and not within one.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    slots: list[int]
    is_after: bool


class Number(NamedTuple):
    """Stands for a number that is made of the batch's size.

    Attributes:
        of: what it is for a batch of another size.
    """

    of: Callable[[int], int]


def writes(func: Any, kwargs: Any) -> bool:
    """Whether a function writes to its first argument."""
    name = str(getattr(func, "__name__", ""))
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return in_place or name == "__setitem__" or kwargs.get("inplace") is True


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns arguments with each leaf replaced."""
    if isinstance(value, (Slot, Number)):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(function, item) for item in (value.start, value.stop, value.step)))
    return function(value)


def leaves_in(value: Any) -> Iterator[Any]:
    """Yields what arguments consist of."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return iter(found)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def slots_of(call: Call) -> Iterator[int]:
    """Yields the numbers of the tensors that a call was given, gave, or wrote to."""
    yield from call.slots
    yield from (leaf.number for leaf in leaves_in((call.args, call.kwargs)) if isinstance(leaf, Slot))


def leading_to(calls: Sequence[Call], wanted: Collection[int]) -> list[Call]:
    """Returns those of some calls that tensors of these numbers are made by, in order."""
    found, needed = list[Call](), set(wanted)
    for call in reversed(calls):
        if not needed.isdisjoint(call.slots):
            found.append(call)
            needed.update(leaf.number for leaf in leaves_in((call.args, call.kwargs)) if isinstance(leaf, Slot))
    return found[::-1]
