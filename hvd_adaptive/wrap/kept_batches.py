"""What a loader's first batches show beside their way to a loss: are they kept, and would samples of two fit together?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, default_collate

from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.tensors import tensors_in

# Batches that are looked at; how many of the newest a script may hold at a time, and how many older ones tell what it keeps.
_LOOKED_AT, _IN_USE, _LEAST_OLD = 16, 2, 2
# Samples after which it is no chance any more that all of each batch have one value.
_NO_CHANCE = 16
# A longer list has a part for each sample.
_MOST_PARTS = 16


class FirstBatches:
    """The first batches of a loader, none of which is kept alive by this.

    Args:
        loader: makes them.

    Attributes:
        has_other_shapes: samples of one batch have another shape than those of another.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.has_other_shapes = False
        self._only_stacks = loader.collate_fn is default_collate
        self._has_own_batches = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
        # Of each part of a batch that had one value in every batch so far: these values.
        self._kinds: dict[tuple[Any, ...], set[Any]] | None = None
        self._num_samples = 0
        self._count = 0
        self._tensors: list[weakref.ref[Any]] = []
        # By how many tensors a batch holds: it may have one for each sample.
        self._shapes: dict[int, list[tuple[int, ...]]] = {}

    def delivered(self, batch: Any) -> None:
        """The script has got a batch."""
        if self._count >= _LOOKED_AT:
            return
        self._count += 1
        tensors = list(tensors_in([batch]))
        if tensors:
            self._tensors.append(weakref.ref(tensors[0]))
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors[:8]]
        self.has_other_shapes = self.has_other_shapes or self._shapes.setdefault(len(tensors), shapes) != shapes
        if self._has_own_batches:
            found = dict(_kinds_in(batch, ()))
            before = {path: set() for path in found} if self._kinds is None else self._kinds
            self._kinds = {path: before[path] | {found[path]} for path in before.keys() & found.keys()}
            self._num_samples += max((len(tensor) for tensor in tensors if tensor.dim()), default=0)

    def reasons(self) -> set[Reason]:
        """Returns why samples of several of its batches must not come into one."""
        found = set()
        if self.has_other_shapes and self._only_stacks:
            found.add(Reason.SHAPES)
        if self._num_samples >= _NO_CHANCE and any(len(values) > 1 for values in (self._kinds or {}).values()):
            found.add(Reason.KINDS)
        return found

    @property
    def are_enough(self) -> bool:
        """Whether there were so many that it shows whether they are kept."""
        return self._count >= _IN_USE + _LEAST_OLD

    def are_kept(self) -> bool:
        """Whether the newest batches that the script should be through with are still there."""
        # Those before them may have been looked at only, as for their shape.
        old = self._tensors[:-_IN_USE][-_LEAST_OLD:]
        if len(old) < _LEAST_OLD or any(tensor() is None for tensor in old):
            return False
        # What refers to itself goes when Python looks for it.
        gc.collect()
        return all(tensor() is not None for tensor in old)


def _kinds_in(part: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields where a batch has one value for all of its samples, a word or a whole number, and the value."""
    if isinstance(part, Tensor):
        is_column = part.layout == torch.strided and part.dim() == 1 and len(part) > 1
        is_column = is_column and not part.is_floating_point() and not part.is_complex()
        if is_column and bool((part == part[0]).all()):
            yield path, part[0].item()
    elif isinstance(part, str):
        yield path, part
    elif isinstance(part, Mapping):
        for name, value in part.items():
            yield from _kinds_in(value, (*path, name))
    elif isinstance(part, (list, tuple)):
        if len(part) > 1 and all(isinstance(value, (str, int)) for value in part):
            if all(value == part[0] for value in part):
                yield path, part[0]
        elif len(part) <= _MOST_PARTS:
            for place, value in enumerate(part):
                yield from _kinds_in(value, (*path, place))
