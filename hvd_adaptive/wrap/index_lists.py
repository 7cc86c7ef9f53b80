"""The lists of indices that make a loader's batches, in the kind that its sampler gives: a list, a tuple, an array, a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Handed:
    """One list of indices: its samples, those of the global batch, and the factor on the gradients of a mean over them.

    Unequal: the ranks' parts of the global batch are, though this rank's own may have the script's size; alike on all ranks.
    First: the place of its first sample in the global batch, which is the ranks' own lists one after the other.
    """

    num_samples: int
    global_samples: int
    weight: float
    is_unequal: bool = False
    first: int = 0


def as_list(given: Any) -> list[Any] | None:
    """Returns what a sampler gave for a batch as a list of indices; None if it is of no kind that holds one for each sample."""
    if isinstance(given, (np.ndarray, Tensor)):
        return given.tolist() if given.ndim else None
    return list(given) if isinstance(given, (list, tuple)) else None


def like(given: Any, indices: list[Any]) -> Any:
    """Returns other indices in the kind of those that a sampler gave, as a data set may take a whole batch of them."""
    if isinstance(given, np.ndarray):
        return np.array(indices, dtype=given.dtype)
    if isinstance(given, Tensor):
        return torch.tensor(indices, dtype=given.dtype, device=given.device)
    return tuple(indices) if isinstance(given, tuple) else indices
