"""Sparse rows as torch tensors, as data gives them and models take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SparseRows(NamedTuple):
    """Rows of a sparse matrix (CSR): features with values, or labels without.

    Row i owns ``indices[offsets[i]:offsets[i + 1]]``, ascending and without duplicates.

    Attributes:
        indices: column ids, int64, shape (nnz,).
        offsets: where each row starts and, last, nnz; int64, shape (num_rows + 1,).
        values: float32, shape (nnz,), or None for labels.
    """

    indices: Tensor
    offsets: Tensor
    values: Tensor | None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SparseRows:
        """Return these rows on ``device``; tensors that are already there are shared, not copied."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SparseRows:
        """Return these rows in pinned host memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """As ``Tensor.record_stream``."""
        for tensor in self:
            if tensor is not None:
                tensor.record_stream(stream)

    def _each(self, function: Callable[[Tensor], Tensor]) -> SparseRows:
        values = None if self.values is None else function(self.values)
        return SparseRows(function(self.indices), function(self.offsets), values)
