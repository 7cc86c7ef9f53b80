"""Whether a script keeps values of a batch in a tensor that its losses use: a row for each sample, or a queue of the last ones.

With unequal shares samples come to ranks that do not have theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import torch
from torch import Tensor

# Who is on the way from a script's call to here.
_WATCHERS = {__name__, *(f"hvd_adaptive.wrap.{name}" for name in ("tape", "forwards"))}


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
        if tensor.layout == torch.strided and not tensor.requires_grad and not _is_own_code():
            self._alive.append(tensor)
            self._written.add(_memory(tensor))

    def made(self, results: Iterable[Tensor], *, of: Iterable[Tensor]) -> None:
        """Tensors are made that are not of the batch."""
        given = [tensor for tensor in of if tensor.layout == torch.strided]
        self._alive.extend(given)
        sources = set(map(_memory, given))
        for tensor in results:
            if tensor.layout == torch.strided:
                self._alive.append(tensor)
                self._sources.setdefault(_memory(tensor), set()).update(sources)

    def are_in(self, used: Iterable[Tensor]) -> bool:
        """Whether such a tensor, older than the batch, is among these or what they were made of."""
        # Parameters are moved by optimizers.
        plain = [tensor for tensor in used if tensor.layout == torch.strided and not tensor.requires_grad]
        new = found = set(map(_memory, plain)) if self._written else set()
        while new:
            new = {source for memory in new for source in self._sources.get(memory, ())} - found
            found = found | new
        # What was made in this batch, of no other tensor, holds nothing of an older one.
        return any(memory in found and self._sources.get(memory) != set() for memory in self._written)


def _is_own_code() -> bool:
    """Whether it is this package that calls a function of torch's, as within a merge."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in _WATCHERS and not name.startswith("torch."):
            return name.startswith("hvd_adaptive.")
        frame = frame.f_back
    return False


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
