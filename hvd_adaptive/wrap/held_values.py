"""Whether a script keeps values of a batch in a tensor that its losses use: a row for each sample, or a queue of the last ones.

With unequal shares samples come to ranks that do not have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HeldValues:
    """Knows tensors by their memory, as a script may write to one view and read another."""

    def __init__(self) -> None:
        self._written: set[int] = set()
        # What tensors that are not of the batch were made of, in this batch.
        self._sources: dict[int, set[int]] = {}
        # None of their memory is given to others.
        self._alive: list[Tensor] = []

    def written(self, tensor: Tensor) -> None:
        """Values of the batch, or places by them, are written to a tensor that is not made of the batch."""
        if tensor.layout == torch.strided and not tensor.requires_grad:
            self._alive.append(tensor)
            self._written.add(_memory(tensor))

    def made(self, results: Iterable[Tensor], *, of: Iterable[Tensor]) -> None:
        """Tensors are made that are not of the batch."""
        sources = {_memory(tensor) for tensor in of if tensor.layout == torch.strided}
        for tensor in results:
            if tensor.layout == torch.strided:
                self._alive.append(tensor)
                self._sources.setdefault(_memory(tensor), set()).update(sources)

    def are_in(self, used: Iterable[Tensor]) -> bool:
        """Whether such a tensor, older than the batch, is among these or what they were made of."""
        new = found = {_memory(tensor) for tensor in used if tensor.layout == torch.strided} if self._written else set()
        while new:
            new = {source for memory in new for source in self._sources.get(memory, ())} - found
            found = found | new
        # What was made in this batch, of no other tensor, holds nothing of an older one.
        return any(memory in found and self._sources.get(memory) != set() for memory in self._written)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
