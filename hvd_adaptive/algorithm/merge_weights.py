"""Merge weights: what each rank's delta counts in the merge, in float64, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hvd_adaptive.algorithm.statistics import Array

if TYPE_CHECKING:
    from hvd_adaptive.config import Config

# Rules for a weight a row or a coordinate; see hvd_adaptive.engine.merge_rule.
ROW_RULES = ("dual-averaging", "fisher-rows")

# Occurrences of the average label between two merges, over all ranks, under which averages dilute most labels.
_RARE = 1.5
DIVERGED = (
    "the parameters of ALL ranks hold NaN or Inf: the run has diverged, or its data hold such numbers. Look at the data, lower "
    "the learning rate, warm it up for longer, or merge more often (a smaller mega_batch)."
)


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


@dataclass(frozen=True, slots=True)
class Contributions:
    """What the ranks did that take part in a merge. Arrays are of shape (world_size,), zeros for the others.

    Attributes:
        active: the ranks that take part: finite, and with an update.
        updates: samples over batch size.
        samples: their number.
        sizes: batch sizes.
        norm_per_parameter: L2 norm of each rank's model over its number of parameters, as far as it was measured.
    """

    active: NDArray[np.bool_]
    updates: Array
    samples: Array
    sizes: Array
    norm_per_parameter: Array


# Returns weights >= 0, those of ranks that take no part 0.
Rule = Callable[["Config", Contributions], Array]


def by_updates(config: Config, done: Contributions) -> Array:
    """u_i / sum u."""
    return done.updates / done.updates.sum()


def paper(config: Config, done: Contributions) -> Array:
    """arXiv 2110.07029, Algorithm 2: b_i / sum b where all u are less than one update apart, else u_i / sum u."""
    equal = np.ptp(done.updates[done.active]) < 1.0
    return done.sizes / done.sizes.sum() if equal else by_updates(config, done)


# By name; those for comparisons are added from above.
RULES: dict[str, Rule] = {
    "paper": paper,
    "uniform": lambda config, done: done.active / done.active.sum(),
    "updates": by_updates,
    "samples": lambda config, done: done.samples / done.samples.sum(),
}


def merge_weights(
    config: Config,
    *,
    num_updates: Array,
    num_samples: Array,
    batch_sizes: Array,
    finite: NDArray[np.bool_],
    norm_per_parameter: Array,
) -> Array:
    """Returns the weight of each rank's delta, shape (world_size,), float64, >= 0.

    Ranks that are not finite or made no update get 0; the rule applies to the others.

    Args:
        config: names the rule.
        num_updates: shape (world_size,), >= 0.
        num_samples: shape (world_size,), >= 0.
        batch_sizes: shape (world_size,), > 0.
        finite: False for a rank whose parameters hold NaN or Inf, shape (world_size,).
        norm_per_parameter: shape (world_size,); only looked at with ``perturbation``.

    Raises:
        ValueError: for a rule that nobody has added.
        RuntimeError: if no rank is finite, or none made an update.
    """
    # Weights by mass differ from row to row; what has one weight a rank, such as buffers, goes by updates.
    name = "updates" if config.weight_rule in ROW_RULES else config.weight_rule
    name += ", perturbed" if config.perturbation else ""
    if not finite.any():
        raise RuntimeError(DIVERGED)
    active = finite & (num_updates > 0)
    if not active.any():
        raise RuntimeError(
            "no finite rank made an update in this round: there is nothing to merge. Lower the learning rate."
        )
    updates, samples, sizes = (np.where(active, x, 0.0) for x in (num_updates, num_samples, batch_sizes))
    if name not in RULES:
        raise ValueError(f"merge weights must be one of {', '.join(RULES)}, got {name!r}")
    return RULES[name](config, Contributions(active, updates, samples, sizes, norm_per_parameter))
