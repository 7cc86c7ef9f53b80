"""What Adaptive SGD's released code (HeteroGPU) does otherwise than its paper, and the paper's perturbation (arXiv 2110.07029).

Nobody gains by them (docs/results.md): they are there to be compared with.
"""

from __future__ import annotations

import functools

import numpy as np

from hvd_adaptive.algorithm import batch_sizes, merge_weights
from hvd_adaptive.algorithm.merge_weights import Contributions, by_updates, paper
from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.config import Config


def one_step(sizes: Array, difference: Array, *, step: float, low: float, high: float) -> Array:
    """Batch sizes: one step up for a rank that made more than its equal share of updates, one down for less."""
    return np.clip(sizes + step * np.sign(difference), low, high)


def perturbed(config: Config, done: Contributions, *, rule: str) -> Array:
    """Weights of a rule, perturbed while every rank's model norm, per parameter, is under ``perturbation_threshold``.

    That of the rank with most updates is multiplied by 1 + ``perturbation_delta``, that of the rank with fewest by 1 - it. With
    ``paper`` (Algorithm 2) weights are normalized again, which the paper leaves open. With ``heterogpu``, as in its code, they
    are not: their sum is 1 + delta (max - min).
    """
    weights = paper(config, done) if rule == "paper" else by_updates(config, done)
    if np.ptp(done.updates[done.active]) > 0 and done.norm_per_parameter[done.active].max() < config.perturbation_threshold:
        weights[np.argmax(np.where(done.active, done.updates, -np.inf))] *= 1 + config.perturbation_delta
        weights[np.argmin(np.where(done.active, done.updates, np.inf))] *= 1 - config.perturbation_delta
    return weights / weights.sum() if rule == "paper" else weights


def add_rules() -> None:
    """Has configurations find these rules by name."""
    batch_sizes.RULES["heterogpu"] = one_step
    merge_weights.RULES["heterogpu"] = by_updates
    for rule in ("paper", "heterogpu"):
        merge_weights.RULES[f"{rule}, perturbed"] = functools.partial(perturbed, rule=rule)
