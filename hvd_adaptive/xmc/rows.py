"""Sparse rows as torch tensors, as data gives them and models take them."""

from __future__ import annotations

from typing import NamedTuple

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

    @property
    def num_rows(self) -> int:
        """Number of rows, empty ones included."""
        return self.offsets.shape[0] - 1

    def to(self, device: torch.device | str) -> SparseRows:
        """Return these rows on ``device``; tensors that are already there are shared, not copied."""
        values = None if self.values is None else self.values.to(device)
        return SparseRows(self.indices.to(device), self.offsets.to(device), values)
