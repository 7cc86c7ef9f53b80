"""Real rounds that a calibration trains, and what they took."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.calibrate.choices import most_fragments
from hvd_adaptive.calibrate.file import SynchronousCalibration
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.session.session import Session
from hvd_adaptive.xmc.data import SparseDataset
from hvd_adaptive.xmc.defaults import has_rare_labels, with_train_defaults
from hvd_adaptive.xmc.train_config import TrainConfig
from hvd_adaptive.xmc.trainer import local_step, make_model, make_optimizer

# Rounds that count at least, after one that does not.
_NUM_ROUNDS = 3
# Where they take longer, fewer count.
_MOST_S = 30.0


class Rounds:
    """Rounds but the first, with medians over them.

    Attributes:
        mega_batch: samples of a round as asked for; an epoch is cut evenly, so real rounds have more or fewer.
        num_samples: samples that these rounds had, in sum.
        seconds: that they took, in sum.
        model_bytes: trainable parameters and float buffers.
        payload_bytes: that a rank sends in a merge.
        merge_s: delta, exchange and outer step, of the slowest rank.
        control_s: statistics, weights, next batch sizes, of the slowest rank.
        wait_s: waiting for the last rank; mean over ranks.
        round_s: the whole round.
        most_fragments: into which a merge could be cut; None: one layer is all there is.
        weights_rows: merges weigh single rows, not ranks.
        records: the rounds that count.
    """

    def __init__(
        self, records: Sequence[RoundRecord], *, mega_batch: int, model: torch.nn.Module, weights_rows: bool
    ) -> None:
        self.records = records[1:]
        self.weights_rows = weights_rows
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.most_fragments = most_fragments([name for name, _ in named], [one.numel() for _, one in named])
        self.mega_batch = mega_batch
        self.num_samples = records[-1].num_samples - records[0].num_samples
        self.seconds = records[-1].train_s - records[0].train_s
        trained = (p for p in model.parameters() if p.requires_grad)
        buffers = (b for b in model.buffers() if b.is_floating_point())
        self.model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in itertools.chain(trained, buffers))
        self.payload_bytes = int(np.median([record.payload_bytes for record in self.records]))
        self.merge_s = float(np.median([record.stats["merge_s"].max() for record in self.records]))
        self.control_s = float(np.median([record.stats["control_s"].max() for record in self.records]))
        self.wait_s = float(np.median([record.stats["wait_s"].mean() for record in self.records]))
        self.round_s = float(np.median(np.diff([record.train_s for record in records])))

    @property
    def samples_per_s(self) -> float:
        """Samples a second over all ranks."""
        return self.num_samples / self.seconds

    def total(self, *names: str) -> Array:
        """Returns the sum of statistics over the rounds, shape (world_size,)."""
        return np.sum([record.stats[name] for record in self.records for name in names], axis=0, dtype=np.float64)

    def line_s(self, fixed_s: Array, work_s: Array) -> Array:
        """Returns the seconds in which each rank alone would have made its steps, shape (world_size,)."""
        return self.total("num_steps") * fixed_s + self.total("work") * work_s


def play_rounds(
    config: Config,
    train: TrainConfig,
    data: SparseDataset,
    *,
    device: torch.device,
    transport: Transport,
    work: NDArray[np.int64] | None,
    least_s: float,
) -> Rounds:
    """Trains some rounds with a new model. COLLECTIVE over the transport's ranks, which stays open.

    Args:
        config: the rules; rounds are made of one size at full batches, however a run would begin and go on.
        train: the model and its optimizer.
        data: the training data.
        device: this rank's.
        transport: the world.
        work: cost of each row; None: one a row.
        least_s: seconds that all the rounds take at least.
    """
    share = Config().merge_share
    config = dataclasses.replace(config, merge_period="fixed", merge_share=share, warmup_epochs=0.0, hash_interval=0)
    model = make_model(train, data, seed=config.seed, device=device)
    optimizer = make_optimizer(train, model)
    if config.strategy == "local":
        config = with_train_defaults(config, optimizer, model, rare_labels=has_rare_labels(config, data))
    session = Session(model, optimizer, config, transport=transport)
    records: list[RoundRecord] = []

    def after_round(record: RoundRecord) -> None:
        records.append(record)
        # All ranks have the same seconds.
        enough = len(records) > _NUM_ROUNDS and record.train_s > least_s
        if enough or (len(records) > 1 and record.train_s > max(least_s, _MOST_S)):
            session.stop(agreed=True)

    session.records.append(after_round)
    for batch in session.batches(data, num_epochs=None, work=work):
        with session.step(batch):
            batch.loss = local_step(model, session.optimizer, batch)
    weights_rows = config.strategy == "local" and config.weight_rule in ("dual-averaging", "fisher-rows")
    return Rounds(records, mega_batch=config.mega_batch_samples, model=model, weights_rows=weights_rows)


def lengthened(rounds: Sequence[Rounds], fixed_s: Array, work_s: Array) -> Array:
    """Returns the seconds in steps and claims over those that each rank's line says, shape (world_size,)."""
    spent_s = np.sum([one.total("busy_s", "claim_s") for one in rounds], axis=0)
    line_s = np.sum([one.line_s(fixed_s, work_s) for one in rounds], axis=0)
    # A rank that got nothing in these rounds is taken to be like the others.
    ratios = np.where(line_s > 0, spent_s / np.where(line_s > 0, line_s, 1.0), np.nan)
    return np.where(np.isnan(ratios), np.nanmedian(ratios), ratios)


def synchronous(rounds: Rounds, fixed_s: Array, work_s: Array) -> SynchronousCalibration:
    """Returns what steps took that all ranks make together."""
    num_steps = rounds.total("num_steps")
    return SynchronousCalibration(
        step_s=(rounds.total("busy_s") / num_steps).tolist(),
        lengthened=lengthened([rounds], fixed_s, work_s).tolist(),
        # The slowest rank waits for the exchange alone.
        exchange_s=float((rounds.total("wait_s") / num_steps).min()),
    )
