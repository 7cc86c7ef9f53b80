"""Whether a script puts a batch's samples into another order that is fixed, as ``x.flip(0)`` or ``x.roll(1, 0)`` do.

What is mixed with it, or compared to it, then depends on which samples stand at which places of one rank's batch, and so on the
ranks' shares. A random order, as of mixup by ``randperm``, is random augmentation: with equal shares it gives other pairs, too.
An order by the data (``x[lengths.argsort()]``) is put on inputs and labels alike.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.wrap import losses

# Where the argument stands that says along which dimensions.
_BY_DIMENSIONS = {"flip": 1, "roll": 2}
# Where the dimension stands, and what says which row comes where.
_BY_INDEX = {"index_select": (1, 2), "gather": (1, 2), "take_along_dim": (2, 1)}
# From so many samples on a random order hardly ever looks like a fixed one.
_SURELY_FIXED = 10
# Orders of fewer samples that came last, and what held them. A random one seldom comes in two batches, one after the other.
_last: dict[int, tuple[Any, list[int]]] = {}


def reorders(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Collection[Tensor], num_samples: int) -> bool:
    """Whether a function puts samples into another order that is fixed, or writes some of them over others.

    Args:
        func: the function, with its arguments.
        made: those of them that are made of the batch.
        num_samples: the batch's.
    """
    name = losses.plain_name(func)
    source: Any = args[0] if args else kwargs.get("input")
    if num_samples == 1 or not any(tensor is source for tensor in made) or num_samples not in source.shape:
        return False
    along = list(source.shape).index(num_samples)
    if name == "flipud":
        return along == 0
    if name in _BY_DIMENSIONS:
        return along in _dims(args, kwargs, _BY_DIMENSIONS[name], source)
    if name == "setitem":
        place = _of_samples(args[1], along)
        # Of a whole slice each row gets its own.
        return isinstance(place, slice) and place != slice(None) and any(tensor is args[2] for tensor in made)
    index = _index(name, args, kwargs, along, source)
    return index is not None and not any(tensor is index for tensor in made) and _is_fixed(index, num_samples)


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, source: Tensor) -> set[int]:
    """Returns the dimensions along which rows are moved; ``x.flip(0, 1)`` has one each."""
    value = kwargs.get("dims", args[position:])
    parts = [value] if isinstance(value, int) else value
    numbers = [number for part in parts for number in ([part] if isinstance(part, int) else part)]
    return {number % source.dim() for number in numbers} if numbers else set(range(source.dim()))


def _of_samples(places: Any, along: int) -> Any:
    """Returns what ``x[places]`` has for the samples' dimension; None if it has nothing, or if that cannot be told."""
    parts = places if isinstance(places, tuple) else (places,)
    if along >= len(parts) or any(part is None or part is Ellipsis for part in parts[:along]):
        return None
    return parts[along]


def _index(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], along: int, source: Tensor) -> Any:
    """Returns what says which row comes where; None if nothing does."""
    if name == "getitem":
        return _of_samples(args[1], along)
    if name not in _BY_INDEX:
        return None
    of_dim, of_index = _BY_INDEX[name]
    dim = kwargs.get("dim", args[of_dim] if len(args) > of_dim else None)
    index = kwargs.get("index", kwargs.get("indices", args[of_index] if len(args) > of_index else None))
    return index if isinstance(dim, int) and dim % source.dim() == along else None


def _is_fixed(index: Any, num_samples: int) -> bool:
    """Whether an index is an order of all samples as people write it down: backwards, turned around, or neighbours swapped."""
    if isinstance(index, Tensor):
        is_order = not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)
        order = index.reshape(len(index), -1)[:, 0].tolist() if is_order and index.numel() and index.dim() else []
    else:
        order = [n for n in index if isinstance(n, int)] if isinstance(index, (list, range)) else []
    if len(order) != num_samples:
        return False
    order = [number % num_samples for number in order]
    steps = {(after - before) % num_samples for before, after in itertools.pairwise(order)}
    is_swapped = num_samples % 2 == 0 and order == [number ^ 1 for number in range(num_samples)]
    is_known = order[0] != 0 if steps == {1} else steps == {num_samples - 1} or is_swapped
    return is_known and (num_samples >= _SURELY_FIXED or _came_before(index, order))


def _came_before(index: Any, order: list[int]) -> bool:
    """Whether an order came before, by another index than the present one, which a step may use several times."""
    holder, last = _last.get(len(order), (lambda: None, []))
    _last[len(order)] = (weakref.ref(index) if isinstance(index, Tensor) else lambda: None, order)
    return order == last and holder() is not index
