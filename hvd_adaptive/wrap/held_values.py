"""Whether a script keeps values of a batch, and later losses use them: a row for each sample, a queue, a moving mean.

With unequal shares samples come to ranks that do not have theirs, and a mean over a rank's batch is one over others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap.tensors import tensors_in

# Who is on the way from a script's call to here.
_WATCHERS = {__name__, *(f"hvd_adaptive.wrap.{name}" for name in ("tape", "forwards"))}
# They take a length, a type or a place from a tensor; the second kind from all but the first one.
_NO_VALUES = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
_NO_VALUES |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
_VALUES_OF_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}


class HeldValues:
    """Knows tensors that are written to by their memory, as a script may write to one view and read another."""

    def __init__(self) -> None:
        # What was made of values of this batch, and of those before it.
        self._now, self._older = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.begin(())

    def begin(self, batch: Iterable[Tensor]) -> None:
        """Begins with a batch's tensors; values of the one before are older ones now."""
        self._older.update(self._now)
        self._now = WeakTensorKeyDictionary(dict.fromkeys(batch, True))
        self._written: set[int] = set()
        # What tensors that are not of the batch were made of, in this batch.
        self._sources: dict[int, set[int]] = {}
        # None of their memory is given to others.
        self._alive: list[Tensor] = []
        # Memory that values of this batch were written to, of tensors that held none before.
        self._filled: set[int] = set()

    def computed(self, name: str, args: Any, kwargs: Any, results: Iterable[Tensor], *, writes: bool) -> None:
        """A function of that name was called, which writes to its first argument or does not."""
        # Horovod makes its results of tensors that are new as well.
        has_none = name in _NO_VALUES or (name == "new" and not _is_called_by("horovod."))
        given = [] if has_none else list(tensors_in(args[:1] if name in _VALUES_OF_FIRST else [args, kwargs]))
        is_filled = self._filled and any(tensor.layout == torch.strided and _memory(tensor) in self._filled for tensor in given)
        if is_filled or any(tensor in self._now for tensor in given):
            for tensor in tensors_in(args[:1]) if writes else ():
                if tensor not in self._now and tensor.layout == torch.strided:
                    self._alive.append(tensor)
                    self._filled.add(_memory(tensor))
            self._now.update(dict.fromkeys(results, True))
        if any(tensor in self._older for tensor in given):
            self._older.update(dict.fromkeys(results, True))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of values of the batch."""
        return tensor in self._now

    def written(self, tensor: Tensor) -> None:
        """Values of the batch, or places by them, are written to a tensor that is not made of the batch."""
        if tensor.layout == torch.strided and not tensor.requires_grad and not _is_called_by("hvd_adaptive."):
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
        """Whether a tensor with values that the script keeps, older than the batch, is among these or what they were made of."""
        used = list(used)
        if any(tensor in self._older for tensor in used):
            return True
        # Parameters are moved by optimizers.
        plain = [tensor for tensor in used if tensor.layout == torch.strided and not tensor.requires_grad]
        new = found = set(map(_memory, plain)) if self._written else set()
        while new:
            new = {source for memory in new for source in self._sources.get(memory, ())} - found
            found = found | new
        # What was made in this batch, of no other tensor, holds nothing of an older one.
        return any(memory in found and self._sources.get(memory) != set() for memory in self._written)


def _is_called_by(package: str) -> bool:
    """Whether it is a package that calls a function of torch's, as this one within a merge."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in _WATCHERS and not name.startswith("torch."):
            return name.startswith(package)
        frame = frame.f_back
    return False


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
