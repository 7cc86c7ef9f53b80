"""The tensors that a script makes of the batch that is followed, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.wrap import sizes
from hvd_adaptive.wrap.chosen import Chosen
from hvd_adaptive.wrap.losses import Kind, rows_dim
from hvd_adaptive.wrap.tensors import tensors_in

_SEVERAL = -1


class MadeOfBatch:
    """Knows them by id, or by their memory.

    Args:
        is_computed: whether a tensor is made of the batch, also within a forward.

    Attributes:
        num_samples: of the batch.
        known: the tensors and their kinds, by id; kept alive so that neither their ids nor their memory is used again.
        as_long: tensors as long as the batch and its like: made since, from data or by a script that has asked how long it is.
        beside: tensors made since, of weights and the like, outside of any forward.
        needs_proof: a tensor was taken for what it may not be, as rows that a forward has made and not returned: the loss must be
            shown to be a mean by its numbers.
        has_unknown: the same, of a function that followed the forwards.
        chosen: tensors of rows that a mask has chosen.
    """

    def __init__(self, is_computed: Callable[[Tensor], bool]) -> None:
        self._is_computed = is_computed
        self.num_samples = 0
        self.known: dict[int, tuple[Tensor, Kind]] = {}
        self.as_long: dict[int, Tensor] = {}
        self.beside: dict[int, Tensor] = {}
        # The number of the sample whose row a tensor is made of.
        self._rows: dict[int, int] = {}
        self.needs_proof = self.has_unknown = False
        self.chosen = Chosen()
        self._memory: set[int] = set()
        self._lengths: set[int] = set()
        self._batch: set[int] = set()

    def begin(self, batch: Iterable[Tensor], num_samples: int) -> None:
        """Begins with a batch's tensors."""
        self.clear()
        batch = list(batch)
        self.num_samples = num_samples
        self._lengths = {size + shift for tensor in batch for size in tensor.shape for shift in (-1, 0, 1)}
        self._batch = set(map(id, batch))
        self.keep(Kind.ROWS, *batch)

    def clear(self) -> None:
        """Forgets all."""
        for kept in (self.known, self.as_long, self.beside, self._memory, self._rows):
            kept.clear()
        self.chosen.clear()
        self.needs_proof = self.has_unknown = False

    def keep(self, kind: Kind, *tensors: Tensor) -> None:
        """Adds tensors of a kind."""
        for tensor in tensors:
            self.known[id(tensor)] = (tensor, kind)
            if tensor.layout == torch.strided and kind is Kind.ROWS:
                self._memory.add(tensor.untyped_storage().data_ptr())

    def kind(self, tensor: Tensor) -> Kind | None:
        """Returns what a tensor holds; None if it is not made of the batch at all."""
        known = self.known.get(id(tensor))
        if known is not None:
            return known[1]
        # Aliases that no torch function makes, as the old torch.autograd.Variable.
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self._memory:
            return Kind.ROWS if self.num_samples in tensor.shape else Kind.CUT
        return None

    def may_have_rows(self, tensor: Tensor, arguments: Iterable[Tensor]) -> bool:
        """Whether a forward's result has as many rows for each sample as the batch's tensors have places, or as the script's own
        arguments have rows: others have them by chance."""
        if self.num_samples in tensor.shape or not tensor.dim() or tensor.shape[0] // self.num_samples in self._lengths:
            return True
        own = (argument for argument in arguments if id(argument) not in self._batch)
        return any(argument.shape[:1] == tensor.shape[:1] for argument in own)

    def holds_samples(self, value: Any) -> bool:
        """Whether a value has a row, or some, for each sample along its first dimension."""
        return isinstance(value, Tensor) and self.kind(value) is Kind.ROWS and rows_dim(value, self.num_samples) == 0

    def follow_row(self, func: Any, args: tuple[Any, ...], results: Iterable[Tensor]) -> None:
        """Takes note of a function that takes one sample's row, or makes something of such."""
        if func is Tensor.__getitem__ and isinstance(sizes.first_of(args[1]), int) and self.holds_samples(args[0]):
            row = int(sizes.first_of(args[1]))
        else:
            rows = {self._rows[id(tensor)] for tensor in tensors_in(args) if id(tensor) in self._rows}
            if not rows:
                return
            row = rows.pop() if len(rows) == 1 else _SEVERAL
        self._rows.update((id(tensor), row) for tensor in results)

    def mixes_rows(self, places: Any, value: Any) -> bool:
        """Whether what is written to a place of a tensor is made of other samples' rows than that one."""
        row = self._rows.get(id(value))
        return row is not None and row != sizes.first_of(places)

    def fills_fixed_length(self, tensor: Tensor, places: Any, *, length_asked: bool) -> bool:
        """Whether places of a tensor are written that is not made of the batch, as many as that has samples."""
        is_other = self.kind(tensor) is None and id(tensor) not in self.as_long
        return is_other and sizes.fills_by_length(places, self.num_samples, length_asked=length_asked)

    def size_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Returns what a question for a tensor's size has given, which knows that it is the batch's where it is."""
        known = self.known.get(id(args[0] if args else None))
        if known is None or known[1] is not Kind.ROWS:
            return result
        if func in sizes.COUNTS:
            return sizes.as_size(result, self.num_samples)
        return sizes.along(rows_dim(known[0], self.num_samples), args, result, kwargs.get("dim"))

    def are_from_inside(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a tensor with gradients comes from a forward, but by another way than its result.

        One with a row for each sample is kept as such from now on: its loss must then be shown to be a mean.
        """
        found = False
        for tensor in tensors:
            is_computed = tensor.requires_grad and not tensor.is_leaf
            if not is_computed or id(tensor) in self.beside or self.kind(tensor) is not None:
                continue
            if rows_dim(tensor, self.num_samples) == 0 and self._is_computed(tensor):
                self.keep(Kind.ROWS, tensor)
                self.needs_proof = True
            else:
                found = True
        return found
