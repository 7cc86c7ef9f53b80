"""A script's collate_fn, tried once: does it make a sample's part of a batch of the other samples, too?

It may mix samples, take negatives from the batch, or scale it by its own statistics. Then a batch of another size is another one.
It is tried where the batches are made, as in a worker: on two samples, on those with one of them twice, and on each alone.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from hvd_adaptive.wrap.tensors import tensors_in


class MixedBatch(NamedTuple):
    """A batch of a collate_fn that mixes samples, on its way from a worker."""

    batch: Any


def watched(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a collate_fn that gives a :class:`MixedBatch` the first time if it mixes samples."""
    return collate if collate in (default_collate, default_convert) else _Watched(collate)


class _Watched:
    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._is_known = False

    def __call__(self, samples: Any) -> Any:
        if self._is_known or not isinstance(samples, list) or len(samples) < 2:
            return self._collate(samples)
        self._is_known = True
        is_mixed = mixes_samples(self._collate, samples[0], samples[1])
        batch = self._collate(samples)
        return MixedBatch(batch) if is_mixed else batch


def mixes_samples(collate: Callable[[Any], Any], one: Any, other: Any) -> bool:
    """Whether the rows of a batch depend on which other samples are in it.

    False as well for what draws random numbers, and for batches without a row for each sample.

    Args:
        collate: makes a batch of a list of samples.
        one: a sample.
        other: another one.
    """
    before = _random_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, again, part, ones, others = (
                collate([copy.deepcopy(sample) for sample in samples])
                for samples in ([one, other, other], [one, other, other], [one, other], [one, one], [other, other])
            )
        if not _is_same(before, _random_state()):
            return False
        rows, known = _rows(whole, 3), _rows(part, 2)
        # Three of something else than samples are as many in the part.
        is_comparable = len(rows) == 3 and len(known) == 2 and len(rows[0]) == len(known[0])
        if not is_comparable or not all(map(_are_equal, rows, _rows(again, 3))):
            return False
        # A row of one sample alone may be padded to less.
        alone = [row for row in (*_rows(ones, 2), *_rows(others, 2)) if _shapes(row) == _shapes(known[0])]
        # In any order, as some sort samples by their length.
        return not all(any(_are_equal(row, of_part) for of_part in known) for row in (*rows, *alone))
    except Exception:
        # It needs more samples, or such that cannot be copied.
        return False
    finally:
        _restore(before)


def _rows(batch: Any, count: int) -> list[list[Tensor]]:
    """Returns what each sample has in the tensors of a batch."""
    tensors = [tensor for tensor in tensors_in([batch]) if tensor.layout == torch.strided and tensor.dim() > 0]
    long = [tensor for tensor in tensors if tensor.shape[0] == count and not _are_places(tensor)]
    return [[tensor[number] for tensor in long] for number in range(count)] if long else []


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


def _random_state() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


def _is_same(state: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    numpys = (repr(part[1][0]) + repr(part[1][2:]) + part[1][1].tobytes().hex() for part in (state, other))
    return torch.equal(state[0], other[0]) and len(set(numpys)) == 1 and state[2] == other[2]
