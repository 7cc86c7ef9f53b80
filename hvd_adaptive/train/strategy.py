"""What the session asks of a strategy: who computes what, and how the ranks' models stay one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from hvd_adaptive.train.batches import Batch, BatchSource, Rows
from hvd_adaptive.train.records import Array, GatheredStats, RoundStats


class Strategy(Protocol):
    """One way of training over all ranks. Construction is COLLECTIVE.

    Attributes:
        optimizer: what the user's loop calls: the user's own optimizer, or Horovod's wrapper of it.
        batch_sizes: the ranks' batch sizes, samples, shape (world_size,), equal on every rank.
    """

    optimizer: Optimizer
    batch_sizes: Array

    def warm_up(self, active: bool) -> None:
        """Switches the warm-up of ``Config.warmup_epochs`` on or off; called before every round."""

    def lr_multiplier(self, batch: Batch) -> float:
        """Returns the factor on the learning rate for this batch."""

    def take_foreign_seconds(self) -> float:
        """Returns compute seconds of this step that are not the rank's own work, which an emulated slowdown must not
        stretch."""

    def drain(self) -> None:
        """Finishes what is under way between rounds, so that the model is the one of all rounds. COLLECTIVE."""

    def round_batches(
        self, rows: Rows, *, work: NDArray[np.int64] | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's batches of a round.

        Args:
            rows: the round's rows in dispatch order, the same on every rank.
            work: their cost, or None for one unit a sample.
            source: makes batches of rows.
            round_id: names the round; never used twice.
            stats: gets the seconds spent waiting for batches.
        """

    def end_round(self, stats: RoundStats) -> tuple[GatheredStats, Array, int]:
        """Ends a round, so that all ranks hold the same model. COLLECTIVE.

        Args:
            stats: this rank's round; gets the seconds of waiting, control and merge.

        Returns:
            The statistics of all ranks, the merge weights, and the bytes this rank sent as far as they are known.

        Raises:
            AgreedError: on all ranks, if no rank's parameters are finite.
        """
