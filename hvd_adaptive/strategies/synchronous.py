"""What strategies share whose ranks' work is dealt out beforehand, and those that exchange gradients every step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvd_adaptive.algorithm.merge_period import capped_mega_batch
from hvd_adaptive.algorithm.world_scale import lr_factor, planned_mega_batch
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.claims import Claim, StepFrontier
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.emulation import compute_seconds
from hvd_adaptive.engine.records import RoundClaims, RoundRecord, RoundStats
from hvd_adaptive.engine.strategy import Removable


class SynchronousClock:
    """Measures the seconds that Horovod's ``synchronize`` takes: waiting for slower ranks, and the rest of the exchange.

    Args:
        optimizer: Horovod's wrapper, whose ``synchronize`` is replaced by the same with a clock around it; or what
            waits for nobody: a plain optimizer, None.
        device: where the model is.
        transport: the world; its heartbeats are told who waits.
        exchanged: the parameters whose gradients Horovod exchanges.
        emulates: whether a slowdown is emulated, for which :meth:`take_foreign_seconds` is needed.

    Attributes:
        times: of the steps of the present round.
        waited_s: seconds of the present round; of the device's, where it computes beside this process.
        payload_bytes: of the gradients that this rank has put into Horovod's exchanges in the present round.
    """

    def __init__(
        self,
        optimizer: Any,
        device: torch.device,
        transport: Transport,
        *,
        exchanged: Iterable[Tensor] = (),
        emulates: bool = False,
    ) -> None:
        self._device = device
        self._transport = transport
        self._emulates = emulates
        self._foreign_s = 0.0
        self._exchanged = [p for p in exchanged if p.requires_grad and transport.world_size > 1]
        self.times = DeviceTimes()
        self.waited_s = 0.0
        self.payload_bytes = 0
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize = self._timed(optimizer.synchronize)

    def take_foreign_seconds(self) -> float:
        """Returns the compute seconds (:func:`compute_seconds`) spent polling for gradients since the last call."""
        seconds, self._foreign_s = self._foreign_s, 0.0
        return seconds

    def end_round(self, stats: RoundStats) -> None:
        """Moves the round's waiting from ``stats.busy_s`` to ``stats.wait_s``."""
        stats.wait_s += self.waited_s
        stats.busy_s -= self.waited_s
        self.waited_s, self.payload_bytes = 0.0, 0

    def _timed(self, synchronize: Callable[[], None]) -> Callable[[], None]:
        on_gpu = self._device.type == "cuda"

        def timed() -> None:
            if on_gpu and self._emulates:
                # What this process waits for must not be stretched. The exchange has begun already, so this delays nothing.
                torch.cuda.current_stream(self._device).synchronize()
            # Afterwards sparse gradients hold all ranks' rows.
            self.payload_bytes += sum(map(_gradient_bytes, self._exchanged))
            reads_cpu = self._emulates and not on_gpu
            wall, compute = time.perf_counter(), compute_seconds(self._device) if reads_cpu else 0.0
            # On a GPU the backward pass, which is this rank's own work, ends here.
            start = self.times.mark()
            with self._transport.waiting("gradients"):
                synchronize()
            self.times.add(self, "waited_s", start)
            if self._emulates:
                self._foreign_s += (
                    compute_seconds(self._device) - compute if reads_cpu else time.perf_counter() - wall
                )

        return timed


def _gradient_bytes(parameter: Tensor) -> int:
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return parameter.nbytes
    return gradient._values().nbytes + gradient._indices().nbytes


class FixedWorkStrategy:
    """What :class:`hvd_adaptive.engine.strategy.Strategy` asks and strategies without claims answer alike: the work of a round is
    dealt out beforehand, the learning rate does not follow batch sizes, and no batch can be computed again.

    Attributes:
        round_unit: samples of a step of all ranks: only the last round of an epoch ends with fewer.
        inexact: empty.
        claimed: empty.
        hooks: empty.
    """

    def __init__(self, model: nn.Module, config: Config, transport: Transport) -> None:
        self._model = model
        self._config = config
        self._transport = transport
        self._clock = SynchronousClock(None, next(model.parameters()).device, transport)
        self.round_unit = config.batch_size * transport.world_size
        self.inexact: list[str] = []
        self.claimed: list[Claim] = []
        self.hooks: list[Removable] = []

    def mega_batch_of(self, dataset_size: int) -> int:
        """Returns the samples of a round over all ranks."""
        config, world_size = self._config, self._transport.world_size
        return capped_mega_batch(config, planned_mega_batch(config, world_size), dataset_size, world_size)

    def warm_up(self, active: bool) -> None:
        """Batches keep their size; only the learning rate warms up."""

    def lr_multiplier(self, batch: Batch) -> float:
        """Returns 1, but where the global batch follows the number of ranks."""
        return lr_factor(self._config, self._transport.world_size)

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

    def close_round(self) -> None:
        """Ends the round after the last step that some rank has promised."""
        self._frontier.close()

    def round_samples(self, num_rows: int) -> int:
        """Returns the samples of the steps that were made."""
        end = self._frontier.end
        return num_rows if end is None else min(num_rows, (end + 1) * self.round_unit)

    def _forget_round(self) -> None:
        """Removes the frontier; when every rank has made its last step."""
        if self._transport.rank == 0:
            self._frontier.forget()

    def repeat_round(self, recorded: RoundClaims) -> None:
        """The configuration refuses recordings of these strategies."""

    def after_round(self, record: RoundRecord) -> None:
        """All was decided when the round ended."""

    def _equal_batches(self, rows: Rows, round_id: int, *, source: BatchSource, stats: RoundStats) -> Iterator[Batch]:
        """Yields this rank's equal share of each step's global batch; the last one of an epoch is padded from the round's
        beginning.

        Args:
            rows: the round's rows, the same on every rank.
            round_id: names the round.
            source: makes batches of rows.
            stats: gets the seconds spent waiting for batches.
        """
        batch_size, world_size = self._config.batch_size, self._transport.world_size
        num_steps = -(-len(rows) // self.round_unit)
        padded = np.resize(rows, num_steps * self.round_unit)
        shares = padded.reshape(num_steps, world_size, batch_size)[:, self._transport.rank]
        loads = ((step, functools.partial(source.request, share, len(share))) for step, share in enumerate(shares))
        yield from self._in_order(loads, round_id, num_steps, source, stats)

    def _in_order(
        self,
        loads: Iterator[tuple[int, Callable[[], Batch]]],
        round_id: int,
        num_steps: int,
        source: BatchSource,
        stats: RoundStats,
    ) -> Iterator[Batch]:
        """Yields the batches that ``loads`` make, each made while the one before computes, until the round is over.

        Args:
            loads: the step of each batch, and what makes it.
            round_id: names the round.
            num_steps: of each rank.
            source: of the batches.
            stats: gets the seconds spent waiting for them.
        """
        # Every rank's batches ask it.
        frontier = self._frontier = StepFrontier(
            self._transport, f"steps.{round_id}", num_steps=num_steps, num_prefetched=source.num_prefetched
        )
        self._clock.times = source.times

        def fetch(_: int) -> Batch | None:
            step, load = next(loads, (0, None))
            if load is None or not frontier.begin(step):
                return None
            batch = load()
            batch._place = step * self.round_unit
            return batch

        yield from source.prefetched(fetch, stats)
