"""A script's collate_fn, tried once: does it make a sample's part of a batch of the other samples, too? Does it sort them?

It may mix samples, take negatives from the batch, or scale it by its own statistics. Then a batch of another size is another one.
One that may change something when it is called, as a generator of random numbers or a list of its own, is not tried.
It is tried where the batches are made, as in a worker: on two samples, on those with one of them twice, and on each alone; and on
some samples backwards. Samples of one length show no order by length: then the names that it uses decide.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from hvd_adaptive.wrap.random_numbers import GENERATORS, random_numbers_kept
from hvd_adaptive.wrap.sizes import is_installed
from hvd_adaptive.wrap.tensors import tensors_in

_CHANGING = (*GENERATORS, list, dict, set, collections.deque, np.ndarray, Tensor, Iterator)
# Samples in each of the batches that are made.
_COUNTS = (3, 3, 2, 2, 2)


# What puts samples into another order.
_ORDERING = {
    "sort", "sorted", "argsort", "lexsort", "nlargest", "nsmallest", "reverse", "reversed", "shuffle", "sample", "randperm",
    "permutation",
}  # fmt: skip
# Samples that are tried backwards, and their bytes.
_MOST_TRIED, _MOST_BYTES = 8, 1 << 24


class TriedBatch(NamedTuple):
    """A batch of a collate_fn that was tried, on its way from a worker.

    Attributes:
        batch: as the script gets it.
        is_mixed: samples are mixed.
        is_reordered: they come in another order; None: that did not show.
    """

    batch: Any
    is_mixed: bool
    is_reordered: bool | None


def _is_plain(collate: Any) -> bool:
    return collate is default_collate or collate is default_convert


def watched(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a collate_fn that gives a :class:`TriedBatch` the first time if it can be tried."""
    if _is_plain(collate):
        return collate
    try:
        is_changing = any(isinstance(value, _CHANGING) for value in _held_by(collate))
    except Exception:
        # A stranger's object may raise anything, and so does a variable of its closure that has no value yet.
        is_changing = True
    return collate if is_changing else _Watched(collate)


def _held_by(collate: Any) -> Iterator[Any]:
    """Yields what a function may change when it is called: of its closure, its globals and its object."""
    if isinstance(collate, functools.partial):
        yield from (*collate.args, *collate.keywords.values())
        yield from _held_by(collate.func)
    elif isinstance(collate, types.FunctionType):
        yield from (cell.cell_contents for cell in collate.__closure__ or ())
        # A table that all calls read is no reason.
        named = (collate.__globals__.get(name) for name in collate.__code__.co_names)
        yield from (value for value in named if isinstance(value, GENERATORS))
        if "STORE_GLOBAL" in {instruction.opname for instruction in dis.get_instructions(collate)}:
            yield []
    elif isinstance(collate, types.MethodType):
        yield from vars(collate.__self__).values() if hasattr(collate.__self__, "__dict__") else ()
    else:
        yield from getattr(collate, "__dict__", {"": []}).values()
        yield from (value for value in vars(type(collate)).values() if isinstance(value, _CHANGING))


class _Watched:
    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._is_known = False

    def __call__(self, samples: Any) -> Any:
        if self._is_known or not isinstance(samples, list) or len(samples) < 2:
            return self._collate(samples)
        self._is_known = True
        is_mixed = mixes_samples(self._collate, samples[0], samples[1])
        is_reordered = reorders(self._collate, samples[:_MOST_TRIED])
        return TriedBatch(self._collate(samples), is_mixed, is_reordered)


def may_reorder(collate: Any) -> bool:
    """Whether a collate_fn, or what it calls of the script's, uses what sorts or shuffles; also if that cannot be said."""
    if _is_plain(collate):
        return False
    try:
        return _uses_ordering(collate)
    except Exception:
        # A stranger's object may raise anything.
        return True


def _uses_ordering(collate: Any) -> bool:
    to_do: list[tuple[Any, type | None]] = [(collate, None)]
    known = set[types.CodeType]()
    function: Any
    while to_do:
        function, owner = to_do.pop()
        while isinstance(function, functools.partial):
            function = function.func
        called = list(getattr(getattr(function, "__self__", function), "__dict__", {}).values())
        if isinstance(function, types.MethodType):
            function, owner = function.__func__, type(function.__self__)
        elif isinstance(function, type):
            function, owner = function.__init__, function  # type: ignore[misc]
        elif callable(function) and not isinstance(function, types.FunctionType):
            function, owner = type(function).__call__, type(function)
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType) or function.__code__ in known:
            continue
        known.add(function.__code__)
        names = _names_in(function.__code__)
        # Keys are sorted so that they come in one order.
        if names & (_ORDERING - {"sorted"} if "keys" in names else _ORDERING):
            return True
        called += [function.__globals__.get(name) for name in names]
        modules = [module for module in called if isinstance(module, types.ModuleType)]
        called += [vars(module).get(name) for module in modules for name in names]
        called += [inspect.getattr_static(owner, name, None) for name in names if owner is not None]
        with contextlib.suppress(ValueError):
            called += [cell.cell_contents for cell in function.__closure__ or ()]
        # A static method's function is within it.
        called = [getattr(other, "__func__", other) for other in called]
        to_do += [(other, owner) for other in called if _is_of_script(other)]
    return False


def _is_of_script(value: Any) -> bool:
    """Whether a value is a function of the script's, or an object of the script's that can be called."""
    function = value if isinstance(value, types.FunctionType) else getattr(type(value), "__call__", None)  # noqa: B004
    return isinstance(function, types.FunctionType) and not is_installed(function.__code__.co_filename)


def _names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function, and in those that are written within it."""
    within = (_names_in(value) for value in code.co_consts if isinstance(value, types.CodeType))
    return set(code.co_names).union(*within)


def reorders(collate: Callable[[Any], Any], samples: list[Any]) -> bool | None:
    """Whether the rows of a batch are in another order than its samples: of the samples backwards it is not the batch backwards.

    None if that does not show: if random numbers are drawn, if there is no row for each sample, or if samples of one shape are in
    order, which others need not be.

    Args:
        collate: makes a batch of a list of samples.
        samples: some.
    """
    try:
        if sum(tensor.nbytes for tensor in tensors_in([samples])) > _MOST_BYTES:
            return None
        collate, shapes = _shallow(collate), [_shapes(list(tensors_in([sample]))) for sample in samples]
        with warnings.catch_warnings(), random_numbers_kept() as are_drawn:
            warnings.simplefilter("ignore")
            # It may sort the list, or write into samples.
            ahead, back = (
                list(tensors_in([collate([_copied(sample) for sample in order])])) for order in (samples, samples[::-1])
            )
            if are_drawn() or len(back) != len(ahead):
                return None
        rows = [one.layout == torch.strided and one.shape[:1] == (len(samples),) and not _are_places(one) for one in ahead]
        pairs = [(one, other) for one, other, is_row in zip(ahead, back, rows, strict=True) if is_row]
        if not all(_are_equal([one], [other.flip(0)]) for one, other in pairs):
            return True
        return False if pairs and any(shape != shapes[0] for shape in shapes) else None
    except Exception:
        # Samples that cannot be copied, or no tensors.
        return None


def _shallow(collate: Any) -> Any:
    if isinstance(collate, types.MethodType):
        return types.MethodType(collate.__func__, copy.copy(collate.__self__))
    return copy.copy(collate)


def mixes_samples(collate: Callable[[Any], Any], one: Any, other: Any) -> bool:
    """Whether the rows of a batch depend on which other samples are in it.

    False as well for what draws random numbers, and for batches without a row for each sample.

    Args:
        collate: makes a batch of a list of samples.
        one: a sample.
        other: another one.
    """
    try:
        # It may count its calls.
        collate = _shallow(collate)
        with warnings.catch_warnings(), random_numbers_kept() as are_drawn:
            warnings.simplefilter("ignore")
            whole, again, part, ones, others = (
                collate([_copied(sample) for sample in samples])
                for samples in ([one, other, other], [one, other, other], [one, other], [one, one], [other, other])
            )
            if are_drawn():
                return False
        tensors = [list(tensors_in([batch])) for batch in (whole, again, part, ones, others)]
        if len(set(map(len, tensors))) > 1:
            return False
        # Three of something else than samples are as many in the part.
        places = [number for number in range(len(tensors[0])) if _are_rows(tensors[0][number], tensors[2][number])]
        rows, same, known, *doubled = (
            [[of[place][row] for place in places] for row in range(count)] for of, count in zip(tensors, _COUNTS, strict=True)
        )
        if not places or not all(map(_are_equal, rows, same)):
            return False
        # A row of one sample alone may be padded to less.
        alone = [row for rows_of in doubled for row in rows_of if _shapes(row) == _shapes(known[0])]
        # In any order, as some sort samples by their length.
        return not all(any(_are_equal(row, of_part) for of_part in known) for row in (*rows, *alone))
    except Exception:
        # It needs more samples, or such that cannot be copied.
        return False


def _copied(value: Any) -> Any:
    """Returns a copy of a sample.

    Raises:
        TypeError: if it holds something whose size is not known.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item) for item in value]
        return items if isinstance(value, list) else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if value is None or isinstance(value, (str, bytes, int, float, np.generic)):
        return value
    raise TypeError(type(value))


def _are_rows(whole: Tensor, part: Tensor) -> bool:
    """Whether a batch of three samples and one of two have a row for each in these tensors, and not where samples begin."""
    is_long = whole.layout == part.layout == torch.strided and whole.shape[:1] == (3,) and part.shape[:1] == (2,)
    return is_long and not _are_places(whole)


def _are_places(tensor: Tensor) -> bool:
    """Whether numbers say where samples begin, as an EmbeddingBag's offsets, or which they are."""
    is_whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dim() == 1
    return is_whole and int(tensor[0]) == 0 and bool((tensor[1:] >= tensor[:-1]).all())


def _shapes(row: list[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in row]


def _are_equal(row: list[Tensor], other: list[Tensor]) -> bool:
    return len(row) == len(other) and all(
        one.shape == two.shape and one.dtype == two.dtype and torch.allclose(one, two, rtol=1e-5, atol=1e-8, equal_nan=True)
        for one, two in zip(row, other, strict=True)
    )
