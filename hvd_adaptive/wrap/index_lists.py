"""The lists of indices that make a loader's batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Handed:
    """One list of indices: its samples, those of the global batch, and the factor on its gradients.

    Unequal: the ranks' parts of the global batch are, though this rank's own may have the script's size; alike on all ranks.
    """

    num_samples: int
    global_samples: int
    weight: float
    is_unequal: bool = False
