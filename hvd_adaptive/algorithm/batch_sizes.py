"""Batch sizes and learning rates of the next round, from the statistics of the last one.

Every rank calls these with the same gathered arrays and so gets the same answer. Sizes are float64 between rounds (the
paper's rule moves by fractions); a claim rounds them.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from hvd_adaptive.algorithm.statistics import Array


class SizeRule(Protocol):
    """Returns the sizes of the next round, from those of the last and how far each rank's updates were from the mean."""

    def __call__(self, sizes: Array, difference: Array, *, step: float, low: float, high: float) -> Array: ...  # noqa: D102


def _fixed(sizes: Array, difference: Array, *, step: float, low: float, high: float) -> Array:
    return sizes.copy()


def _paper(sizes: Array, difference: Array, *, step: float, low: float, high: float) -> Array:
    proposed = sizes + step * difference
    return np.where((proposed >= low) & (proposed <= high), proposed, sizes)


# By name; those for comparisons are added from above.
RULES: dict[str, SizeRule] = {"fixed": _fixed, "paper": _paper}


def next_batch_sizes(
    rule: str,
    batch_sizes: Array,
    num_updates: Array,
    *,
    min_batch_size: float,
    max_batch_size: float,
    step: float,
) -> Array:
    """Returns the batch sizes of the next round.

    Args:
        rule: ``fixed``: unchanged. ``paper`` (arXiv 2110.07029, Algorithm 1): b_i += step (u_i - mean u), skipped where
            that would leave the bounds; or another one of `RULES`.
        batch_sizes: shape (world_size,), > 0.
        num_updates: samples of each rank over its batch size, shape (world_size,), >= 0.
        min_batch_size: lower bound.
        max_batch_size: upper bound.
        step: samples a whole update of difference moves (``paper``: beta), or the rule's step.
    """
    if num_updates.sum() == 0:
        return batch_sizes.copy()
    mean = num_updates.mean()
    # The mean of equal numbers is rounded; that must not move anything.
    difference = np.where(np.isclose(num_updates, mean, rtol=1e-9, atol=0), 0.0, num_updates - mean)
    return RULES[rule](batch_sizes, difference, step=step, low=min_batch_size, high=max_batch_size)


def lr_multiplier(rule: str, *, batch_size: float, reference_batch_size: float) -> float:
    """Returns the factor on the optimizer's learning rate for a batch of ``batch_size`` samples.

    ``linear``: b / b_ref (Goyal et al., arXiv 1706.02677); ``sqrt``: its square root; ``none``: 1.
    """
    ratio = batch_size / reference_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def lr_schedule(progress_epochs: float, *, warmup_epochs: float, decay: float) -> float:
    """Returns the schedule's factor: a linear ramp over the warm-up, then 1 / (1 + decay (epoch - warmup_epochs)).

    As in HeteroGPU's released code, with the ramp by fractions of an epoch instead of whole ones.

    Args:
        progress_epochs: epochs consumed so far, fractional, >= 0.
        warmup_epochs: length of the ramp, >= 0; 0 switches it off.
        decay: inverse-time decay an epoch, >= 0; 0 switches it off.
    """
    if progress_epochs < warmup_epochs:
        # The first round would otherwise train at a rate of zero.
        return max(progress_epochs, 0.01 * warmup_epochs) / warmup_epochs
    return 1.0 / (1.0 + decay * (progress_epochs - warmup_epochs))


def speed_shares(work: Array, busy_s: Array) -> Array:
    """Returns each rank's share of the ranks' summed speed, shape (world_size,), > 0, summing to 1.

    Args:
        work: work each rank computed in the last round, shape (world_size,), >= 0.
        busy_s: seconds each rank computed, shape (world_size,), >= 0. A rank that computed nothing counts as the
            slowest of the others: it must be offered work to be measured.
    """
    measured = (work > 0) & (busy_s > 0)
    if not measured.any():
        return np.full(len(work), 1.0 / len(work))
    speed = np.zeros(len(work))
    speed[measured] = work[measured] / busy_s[measured]
    speed[~measured] = speed[measured].min()
    return speed / speed.sum()
