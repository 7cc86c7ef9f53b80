"""Micro-batches of one size: a step is some of them, whose gradients add up to those of its samples, however many these are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def micro_batches(rows: Rows, size: int) -> list[tuple[Rows, float]]:
    """Cuts the rows of a step into micro-batches of ``size`` rows each.

    Rows that fill none are repeated until they do. Some then occur once more than the others, and a further micro-batch, of these
    alone, is taken off again, and so on: where r rows are left, M = q r + s, the micro-batch holds them q times, and s of them
    once more. The sum of their r gradients is (M mean - sum of those s) / q. So it comes out exactly for every loss that is a
    mean over samples. Each has fewer rows than the one before, and counts at most as much.

    Args:
        rows: of the step, shape (num_samples,).
        size: rows of each micro-batch, M >= 1.

    Returns:
        The rows of each micro-batch, shape (size,), and the samples that its mean counts: ``size``, or less where rows repeat,
        and negative for what is taken off. They add up to num_samples.
    """
    whole = len(rows) // size * size
    parts = [(rows[start : start + size], float(size)) for start in range(0, whole, size)]
    left, factor = rows[whole:], 1.0
    while len(left):
        times, rest = divmod(size, len(left))
        factor /= times
        parts.append((np.resize(left, size), factor * size))
        left, factor = left[:rest], -factor
    return parts


def stand_in(rows: Rows, size: int) -> list[tuple[Rows, float]]:
    """Returns the micro-batch of a rank that has no samples in a step: others' rows, which count nothing.

    Args:
        rows: some of the step's, at least one.
        size: rows of the micro-batch.
    """
    return [(np.resize(rows, size), 0.0)]


def multiple(samples: float, size: int) -> int:
    """Returns the whole number of micro-batches that is nearest to so many samples, in samples; at least one."""
    return max(1, round(samples / size)) * size
