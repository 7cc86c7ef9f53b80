"""Strategy ``horovod``: what everybody has today, Horovod's DistributedOptimizer with equal batches, for comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.config import Config
from hvd_adaptive.train.batches import Batch, BatchSource, Rows, equal_batches
from hvd_adaptive.train.emulation import compute_seconds
from hvd_adaptive.train.records import Array, GatheredStats, RoundStats
from hvd_adaptive.transport.base import Transport


class HorovodStrategy:
    """Plain synchronous data parallelism: nothing of ours takes part in a step. Construction is COLLECTIVE.

    A "round" is only the interval of statistics and evaluation, as many samples as in strategy ``local``. The last batches
    of a round are padded from its beginning, as DistributedSampler pads an epoch, so that all ranks make as many steps.

    Attributes:
        optimizer: Horovod's wrapper of the user's optimizer.
        batch_sizes: the batch size, for every rank, shape (world_size,).
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        self._config = config
        self._transport = transport
        self._device = next(model.parameters()).device
        transport.broadcast_([*(p.detach() for p in model.parameters()), *model.buffers()])
        self.optimizer = transport.distributed_optimizer(optimizer, model)
        self.batch_sizes = np.full(transport.world_size, float(config.batch_size))
        self._clock: list[tuple[float, float]] = []
        self._foreign_s = 0.0
        self._wait_s = 0.0
        if self.optimizer is not optimizer:
            # Runs first when the wrapper's step begins, and again inside it when the gradients have arrived.
            self.optimizer.register_step_pre_hook(self._mark)

    def warm_up(self, active: bool) -> None:
        """The baseline keeps its batch size; only the learning rate warms up."""

    def lr_multiplier(self, batch: Batch) -> float:
        """Returns 1: all batches have the same size."""
        return 1.0

    def take_foreign_seconds(self) -> float:
        """Returns compute seconds of this step spent polling for gradients, which an emulated slowdown must not stretch."""
        seconds, self._foreign_s = self._foreign_s, 0.0
        self._clock.clear()
        return seconds

    def drain(self) -> None:
        """Nothing is under way between rounds."""

    def round_batches(
        self, rows: Rows, *, work: np.ndarray | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's equal share of each step's global batch; ``work`` is not used."""
        self._wait_s = 0.0
        yield from equal_batches(
            rows,
            batch_size=self._config.batch_size,
            rank=self._transport.rank,
            world_size=self._transport.world_size,
            source=source,
            stats=stats,
        )

    def end_round(self, stats: RoundStats) -> tuple[GatheredStats, Array, int]:
        """Gathers the statistics. COLLECTIVE. Waiting is the time in Horovod's synchronize, the exchange included."""
        stats.wait_s = self._wait_s
        stats.busy_s -= self._wait_s
        gathered = GatheredStats(self._transport.allgather_stats(stats.vector()))
        return gathered, np.full(self._transport.world_size, 1.0 / self._transport.world_size), 0

    def _mark(self, *_: Any) -> None:
        self._clock.append((time.perf_counter(), compute_seconds(self._device)))
        if len(self._clock) == 2:
            (wall_start, compute_start), (wall, compute) = self._clock
            self._wait_s += wall - wall_start
            self._foreign_s += compute - compute_start
            self._clock.clear()
