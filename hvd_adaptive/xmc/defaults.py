"""Options that were left open, as the data and the optimizer have them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from hvd_adaptive.algorithm.merge_period import capped_mega_batch
from hvd_adaptive.algorithm.merge_weights import labels_are_rare
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.optimizer_state import with_defaults
from hvd_adaptive.xmc.data import SparseDataset
from hvd_adaptive.xmc.train_config import TrainConfig

log = logging.getLogger(__name__)

# Options that follow from others where they are not given.
_FOLLOWING = ("compression", "lr", "lr_rule", "merge_period", "merge_weights", "outer_step", "weight_decay")


def resume_options(config: Config, train: TrainConfig) -> dict[str, Any]:
    """Returns the trainer's own options as a checkpoint has them, and which of all options follow from others."""
    given = {**dataclasses.asdict(config), **dataclasses.asdict(train)}
    defaults = {item.name: item.default for cls in (Config, TrainConfig) for item in dataclasses.fields(cls)}
    by_default = [name for name in _FOLLOWING if given[name] in (None, "auto") and given[name] == defaults[name]]
    # A value that is given may be the default.
    values = {"lr": train.learning_rate, "weight_decay": train.decay}
    return {**dataclasses.asdict(train), **values, "by_default": by_default}


def labels_of_a_round(config: Config, data: SparseDataset) -> tuple[int, float]:
    """Returns the samples between two merges, as for one rank: a resume with another number of ranks keeps the rule. And the mean
    number of a sample's labels."""
    mega_batch = capped_mega_batch(config, config.mega_batch_samples, len(data), 1)
    return mega_batch, float(data.label_counts().sum()) / max(1, len(data))


def has_rare_labels(config: Config, data: SparseDataset) -> bool:
    """Returns whether a label occurs on one rank at most between most merges."""
    mega_batch, labels_a_sample = labels_of_a_round(config, data)
    return labels_are_rare(labels_a_sample, data.num_labels, mega_batch)


def with_train_defaults(config: Config, optimizer: Optimizer, model: nn.Module, *, rare_labels: bool) -> Config:
    """Returns the rules that follow from the optimizer. SGD without momentum has Nesterov's outer step here: on sparse data
    averages alone learn too slowly, and the default learning rate is for it."""
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    if config.outer_step is None and isinstance(optimizer, SGD) and not any(momenta):
        config = dataclasses.replace(config, outer_step="nesterov")
    return with_defaults(config, optimizer, model.parameters(), rare_labels=rare_labels)


def fill_in(
    config: Config, train: TrainConfig, data: SparseDataset, *, model: nn.Module, optimizer: Optimizer, transport: Transport
) -> Config:
    """Returns the configuration of strategy local with its open options filled in; rank 0 says which were chosen by the data."""
    if config.merge_period is None:
        # What is measured of Adam's short rounds is of dense models; and labels are rare or not by the rounds' length.
        config = dataclasses.replace(config, merge_period="fixed")
    if not config.encodes:
        config = dataclasses.replace(config, compression="none")
    mega_batch, labels_a_sample = labels_of_a_round(config, data)
    rare = has_rare_labels(config, data)
    found = with_train_defaults(config, optimizer, model, rare_labels=rare)
    told = rare and config.merge_weights == "auto" and transport.rank == 0
    if told and config.island is not None:
        log.warning(
            "merge_weights auto means updates with island %s: an island's weight is its number of batches. Without islands "
            "rows would have their own weights, as most labels occur on one rank only between two merges: compare the two",
            config.island,
        )
    elif told:
        log.info(
            "merge_weights %s: the %d labels occur %.1f times each in the %d samples between two merges, so most on one rank",
            found.weight_rule, data.num_labels, labels_a_sample * mega_batch / data.num_labels, mega_batch,
        )  # fmt: skip
    if config.reference_batch_size and config.lr_rule == "auto" and found.lr_rule == "none" and transport.rank == 0:
        log.warning(
            "reference_batch_size %d has no effect: the learning rate of optimizer %s does not follow the batch size. Set "
            "lr_rule linear or sqrt if it is to.", config.reference_batch_size, train.optimizer,
        )  # fmt: skip
    return found
