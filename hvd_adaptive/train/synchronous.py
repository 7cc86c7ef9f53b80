"""What strategies share whose ranks' work is dealt out beforehand, and those that exchange gradients every step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from hvd_adaptive.config import Config
from hvd_adaptive.train.batches import Batch, BatchSource, Rows, prefetched
from hvd_adaptive.train.emulation import compute_seconds
from hvd_adaptive.train.records import RoundRecord, RoundStats
from hvd_adaptive.train.replay import Claim, RoundClaims
from hvd_adaptive.transport.base import Transport


class SynchronousClock:
    """Measures the seconds that Horovod's ``synchronize`` takes: waiting for slower ranks, and the rest of the exchange.

    Args:
        optimizer: Horovod's wrapper, whose ``synchronize`` is replaced by the same with a clock around it; or what
            waits for nobody: a plain optimizer, None.
        device: where the model is.
        transport: the world; its heartbeats are told who waits.
    """

    def __init__(self, optimizer: Any, device: torch.device, transport: Transport) -> None:
        self._device = device
        self._transport = transport
        self._foreign_s = 0.0
        self._wait_s = 0.0
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize = self._timed(optimizer.synchronize)

    def take_foreign_seconds(self) -> float:
        """Returns the compute seconds (:func:`compute_seconds`) spent polling for gradients since the last call."""
        seconds, self._foreign_s = self._foreign_s, 0.0
        return seconds

    def end_round(self, stats: RoundStats) -> None:
        """Moves the round's waiting from ``stats.busy_s`` to ``stats.wait_s``."""
        stats.wait_s += self._wait_s
        stats.busy_s -= self._wait_s
        self._wait_s = 0.0

    def _timed(self, synchronize: Callable[[], None]) -> Callable[[], None]:
        on_gpu = self._device.type == "cuda"

        def timed() -> None:
            if on_gpu:
                # The backward pass is this rank's own work. Its exchange has begun already, so this delays nothing.
                torch.cuda.current_stream(self._device).synchronize()
            wall, compute = time.perf_counter(), 0.0 if on_gpu else compute_seconds(self._device)
            with self._transport.waiting("gradients"):
                synchronize()
            wall_s = time.perf_counter() - wall
            self._wait_s += wall_s
            self._foreign_s += wall_s if on_gpu else compute_seconds(self._device) - compute

        return timed


class FixedWorkStrategy:
    """What :class:`hvd_adaptive.train.strategy.Strategy` asks and strategies without claims answer alike: the work of a round is
    dealt out beforehand, the learning rate does not follow batch sizes, and no batch can be computed again.

    Attributes:
        round_unit: 1, rounds may have any number of samples.
        inexact: empty.
        claimed: empty.
    """

    def __init__(self, model: nn.Module, config: Config, transport: Transport) -> None:
        self._model = model
        self._config = config
        self._transport = transport
        self._clock = SynchronousClock(None, next(model.parameters()).device, transport)
        self.round_unit = 1
        self.inexact: list[str] = []
        self.claimed: list[Claim] = []

    @property
    def mega_batch(self) -> int:
        """Samples of a round over all ranks."""
        return self._config.mega_batch_samples

    def warm_up(self, active: bool) -> None:
        """Batches keep their size; only the learning rate warms up."""

    def lr_multiplier(self, batch: Batch) -> float:
        """Returns 1: the global batch stays."""
        return 1.0

    def take_foreign_seconds(self) -> float:
        """Returns compute seconds of this step spent polling for gradients, which an emulated slowdown must not stretch."""
        return self._clock.take_foreign_seconds()

    def synchronize(self) -> bool:
        """Returns True at once: a step uses the rank's own gradients, unless a strategy says otherwise."""
        return True

    def drain(self) -> None:
        """Nothing is under way between rounds."""

    def take_back(self, batch: Batch) -> bool:
        """Returns False: the others wait for this step."""
        return False

    def repeat_round(self, recorded: RoundClaims) -> None:
        """The configuration refuses recordings of these strategies."""

    def after_round(self, record: RoundRecord) -> None:
        """All was decided when the round ended."""

    def close(self) -> None:
        """Nothing is left on the model."""


def equal_batches(
    rows: Rows, *, batch_size: int, transport: Transport, source: BatchSource, stats: RoundStats
) -> Iterator[Batch]:
    """Yields a rank's equal share of each step's global batch, the last ones padded from the round's beginning.

    Args:
        rows: the round's rows, the same on every rank.
        batch_size: samples in each batch.
        transport: the world.
        source: makes batches of rows.
        stats: gets the seconds spent waiting for batches.
    """
    num_steps = -(-len(rows) // (batch_size * transport.world_size))
    padded = np.resize(rows, num_steps * batch_size * transport.world_size)
    shares = padded.reshape(num_steps, transport.world_size, batch_size)[:, transport.rank]
    yield from batches_in_order((functools.partial(source.load, share, len(share)) for share in shares), stats)


def batches_in_order(
    loads: Iterator[Callable[[], Batch]], stats: RoundStats
) -> Iterator[Batch]:
    """Yields the batches that ``loads`` make, each made while the one before computes.

    Args:
        loads: each makes one batch.
        stats: gets the seconds spent waiting for them.
    """

    def fetch(_: int) -> Batch | None:
        load = next(loads, None)
        return None if load is None else load()

    @contextmanager
    def timed() -> Iterator[None]:
        start = time.perf_counter()
        yield
        stats.claim_s += time.perf_counter() - start

    yield from prefetched(fetch, timed)
