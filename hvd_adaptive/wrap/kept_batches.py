"""What a loader's first batches show beside their way to a loss: whether they are kept, and whether their shapes vary."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from hvd_adaptive.wrap.tensors import tensors_in

# Batches that are looked at; how many of the newest a script may hold at a time, and how many older ones tell what it keeps.
_LOOKED_AT, _IN_USE, _LEAST_OLD = 16, 2, 2


class FirstBatches:
    """The first batches of a loader, none of which is kept alive by this.

    Attributes:
        has_other_shapes: samples of one batch have another shape than those of another.
    """

    def __init__(self) -> None:
        self.has_other_shapes = False
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
