"""The same training with another number of ranks than its batch size and learning rate were chosen for.

fixed-global: the samples of a step over all ranks stay, and with them the learning rate and the noise of a step; each of fewer
ranks has a larger batch. With ``local`` too: N replicas with batches of B/N, averaged, make as many steps a round as before.

fixed-per-rank: each rank's batch stays, and the samples of a step follow the number of ranks. ``sync`` and ``horovod`` scale the
learning rate with them (Goyal et al., arXiv 1706.02677, section 2.1). With ``local`` and ``sma`` the mega-batch follows, so that
a replica makes as many steps between two merges, and the learning rate stays.
"""

from __future__ import annotations

import dataclasses

from hvd_adaptive.algorithm.micro_batches import multiple
from hvd_adaptive.combinations import has_effect
from hvd_adaptive.config import Config


def scaled_config(config: Config, world_size: int) -> Config:
    """Returns the configuration that ``config`` means for this many ranks; itself where it names no ``reference_ranks``.

    Batch sizes are rounded to whole samples, or micro-batches, at least 1; with strategy ``sync`` the total stays exact. A
    mega-batch that is not set stays so, as the rules for it differ: :func:`planned_mega_batch` knows of its scale.

    Args:
        config: as the user gave it.
        world_size: number of ranks, >= 1.
    """
    reference = config.reference_ranks
    if reference is None or reference == world_size:
        return config
    changes: dict[str, float | None]
    unit = config.micro_batch_size or 1
    if config.elastic_batch == "fixed-per-rank":
        growth = world_size / reference
        fixed = config.global_batch_size
        changes = {
            "mega_batch": None if config.mega_batch is None else multiple(config.mega_batch * growth, 1),
            "global_batch_size": None if fixed is None else multiple(fixed * growth, unit),
        }
    else:
        ratio = reference / world_size
        low, high = config.batch_size_bounds
        size = multiple(config.batch_size * ratio, unit)
        changes = {
            "batch_size": size,
            "min_batch_size": min(multiple(low * ratio, unit), size),
            "max_batch_size": max(multiple(high * ratio, unit), size),
            "batch_size_step": config.batch_size_step_samples * ratio,
            # A rank's learning rate follows its batch, but not through a change that all ranks share.
            "reference_batch_size": multiple((config.reference_batch_size or config.batch_size) * ratio, 1),
            "global_batch_size": config.global_batch_size or config.batch_size * reference,
        }
    if config.strategy == "sync":
        # Its shares have no bounds but those that were given.
        changes = {n: v for n, v in changes.items() if n not in ("min_batch_size", "max_batch_size") or getattr(config, n)}
    changes = {name: value for name, value in changes.items() if has_effect(config, name)}
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def planned_mega_batch(config: Config, world_size: int) -> int:
    """Returns the samples between two merges over all ranks, for data that are large enough: as many steps of all ranks as
    ``reference_ranks`` make.

    Args:
        config: scaled.
        world_size: number of ranks, >= 1.
    """
    if config.mega_batch is not None or config.reference_ranks is None:
        return config.mega_batch_samples
    return multiple(config.mega_batch_samples * world_size / config.reference_ranks, 1)


def global_batch_size(config: Config, world_size: int) -> int:
    """Returns the samples of a step over all ranks, with strategy ``sync`` or ``horovod``.

    Args:
        config: as the user gave it.
        world_size: number of ranks, >= 1.
    """
    scaled = scaled_config(config, world_size)
    return scaled.global_batch_size or scaled.batch_size * world_size


def lr_factor(config: Config, world_size: int) -> float:
    """Returns the factor on the learning rate of ``sync`` and ``horovod``.

    Args:
        config: as the user gave it, or scaled.
        world_size: number of ranks, >= 1.
    """
    if config.reference_ranks is None or config.elastic_batch == "fixed-global" or config.strategy not in ("sync", "horovod"):
        return 1.0
    return world_size / config.reference_ranks
