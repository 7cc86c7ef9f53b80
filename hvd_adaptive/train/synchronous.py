"""What the strategies that exchange gradients share: waiting told apart from computing, and batches in lock-step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hvd_adaptive.config import Config
from hvd_adaptive.train.batches import Batch, prefetched
from hvd_adaptive.train.emulation import compute_seconds
from hvd_adaptive.train.records import RoundRecord, RoundStats
from hvd_adaptive.train.replay import Claim, RoundClaims
from hvd_adaptive.transport.base import Transport


class SynchronousClock:
    """Measures the seconds that Horovod's ``synchronize`` takes: waiting for slower ranks, and the rest of the exchange.

    Args:
        optimizer: Horovod's wrapper, whose ``synchronize`` is replaced by the same with a clock around it; or a plain
            optimizer, which waits for nobody.
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


class SynchronousStrategy:
    """What :class:`hvd_adaptive.train.strategy.Strategy` asks and strategies that exchange gradients answer alike: the
    global batch and so the learning rate stay, nothing is claimed, and no batch can be computed again.

    Attributes:
        round_unit: 1, rounds may have any number of samples.
        inexact: empty.
        claimed: empty.
    """

    _clock: SynchronousClock

    def __init__(self, model: nn.Module, config: Config, transport: Transport) -> None:
        self._model = model
        self._config = config
        self._transport = transport
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

    def take_back(self, batch: Batch) -> bool:
        """Returns False: the others' gradients of this step wait for this rank's."""
        return False

    def repeat_round(self, recorded: RoundClaims) -> None:
        """The configuration refuses recordings of these strategies."""

    def after_round(self, record: RoundRecord) -> None:
        """All was decided when the round ended."""

    def close(self) -> None:
        """Nothing is left on the model."""


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
