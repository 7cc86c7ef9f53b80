"""Merge weights: what each rank's delta counts in the merge, in float64, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_adaptive.algorithm.statistics import Array

# Rules for one weight a rank.
MERGE_WEIGHT_RULES = ("paper", "heterogpu", "uniform", "updates", "samples")
# Rules for a weight a row or a coordinate; see hvd_adaptive.engine.merge_rule.
ROW_RULES = ("dual-averaging", "fisher-rows")

# Occurrences of the average label between two merges, over all ranks, under which averages dilute most labels.
_RARE = 1.5


def labels_are_rare(labels_a_sample: float, num_labels: int, mega_batch: int) -> bool:
    """Returns whether a label occurs on one rank at most between most merges.

    There is nothing to average then: an average would only shorten the step of the one rank that learned. See
    benchmarks/records/2026-11-23-dual-averaging.md.

    Args:
        labels_a_sample: the mean.
        num_labels: of the data.
        mega_batch: samples between two merges, over all ranks.
    """
    return labels_a_sample * mega_batch < _RARE * num_labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """The paper's perturbation (arXiv 2110.07029, Algorithm 2): favour the rank with most updates while models are small.

    Attributes:
        threshold: it acts while every rank's model norm, per parameter, is under this.
        delta: the busiest rank's weight is multiplied by 1 + delta, the laziest one's by 1 - delta, in [0, 1).
    """

    threshold: float = 0.1
    delta: float = 0.1


def merge_weights(
    rule: str,
    *,
    num_updates: Array,
    num_samples: Array,
    batch_sizes: Array,
    finite: NDArray[np.bool_],
    norm_per_parameter: Array | None = None,
    perturbation: Perturbation | None = None,
) -> Array:
    """Returns the weight of each rank's delta, shape (world_size,), float64, >= 0.

    Ranks that are not finite or made no update get 0; the rule applies to the others.

    Args:
        rule: with u = updates, n = samples, b = batch size, over the ranks that take part:
            ``paper`` (Algorithm 2): b_i / sum b where all u are equal, else u_i / sum u. Updates are n_i / b_i here, so equal
            means less than one update apart. After a perturbation the weights are normalized again, which the paper leaves open.
            ``heterogpu`` (its released code): u_i / sum u, perturbed WITHOUT normalizing: the sum is 1 + delta (max - min).
            ``uniform``: 1 / N. ``updates``: u_i / sum u. ``samples``: n_i / sum n.
        num_updates: shape (world_size,), >= 0.
        num_samples: shape (world_size,), >= 0.
        batch_sizes: shape (world_size,), > 0.
        finite: False for a rank whose parameters hold NaN or Inf, shape (world_size,).
        norm_per_parameter: L2 norm of each rank's model over its number of parameters, shape (world_size,);
            needed with a perturbation.
        perturbation: None switches it off; used by ``paper`` and ``heterogpu`` only.

    Raises:
        ValueError: for an unknown rule.
        RuntimeError: if no rank is finite, or none made an update.
    """
    if perturbation is not None and norm_per_parameter is None:
        raise ValueError("norm_per_parameter must be given with a perturbation, got None")
    if rule not in MERGE_WEIGHT_RULES:
        raise ValueError(f"merge weights must be one of {', '.join(MERGE_WEIGHT_RULES)}, got {rule!r}")
    if not finite.any():
        raise RuntimeError(
            "the parameters of ALL ranks hold NaN or Inf: the run has diverged. Lower the learning rate, warm it up for longer, "
            "or merge more often (--mega-batch)."
        )
    active = finite & (num_updates > 0)
    if not active.any():
        raise RuntimeError(
            "no finite rank made an update in this round: there is nothing to merge. Lower the learning rate."
        )
    updates, samples, sizes = (np.where(active, x, 0.0) for x in (num_updates, num_samples, batch_sizes))

    if rule == "uniform":
        weights = active / active.sum()
    elif rule == "samples":
        weights = samples / samples.sum()
    elif rule == "paper" and np.ptp(updates[active]) < 1.0:
        weights = sizes / sizes.sum()
    else:
        weights = updates / updates.sum()

    if (
        perturbation is not None
        and norm_per_parameter is not None
        and rule in ("paper", "heterogpu")
        and np.ptp(updates[active]) > 0
        and norm_per_parameter[active].max() < perturbation.threshold
    ):
        most = int(np.argmax(np.where(active, updates, -np.inf)))
        least = int(np.argmin(np.where(active, updates, np.inf)))
        weights[most] *= 1 + perturbation.delta
        weights[least] *= 1 - perturbation.delta
        if rule == "paper":
            weights /= weights.sum()
    return weights
