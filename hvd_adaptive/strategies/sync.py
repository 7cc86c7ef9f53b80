"""Strategy ``sync``: every step is one machine's step with the global batch, of which each rank computes a share by its speed.

LB-BSP (Chen et al., SoCC 2020, "Semi-dynamic load balancing"), on Horovod's own overlapped exchange of gradients, or on ours,
which encodes them and needs no Horovod.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.share_balance import StepWindow
from hvd_adaptive.algorithm.share_control import ShareControl
from hvd_adaptive.algorithm.shares import Part, cut_round
from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.flat_buffers import FlatBuffers
from hvd_adaptive.engine.flat_model import check_trainable, has_batch_norm
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.engine.strategy import OwnState
from hvd_adaptive.engine.touched_rows import sparse_parameters
from hvd_adaptive.engine.weighted_gradient import GradientWeight
from hvd_adaptive.exchange.gradients import GradientExchange
from hvd_adaptive.strategies.exactness import check_forward, what_breaks_equality
from hvd_adaptive.strategies.sync_optimizer import Exchanger, HorovodExchanger, SyncOptimizer, start_state_
from hvd_adaptive.strategies.synchronous import FixedWorkStrategy, SynchronousClock
from hvd_adaptive.strategies.target_mean import TargetMean
from hvd_adaptive.strategies.untouched_gradients import UntouchedGradients

log = logging.getLogger(__name__)

# Steps in a row, in whole rounds, whose gradients hold NaN or Inf, after which the job ends.
_MOST_BROKEN = 10


class SyncStrategy(FixedWorkStrategy):
    """Synchronous training with unequal shares of a fixed global batch. Construction is COLLECTIVE.

    The weighted gradients of N ranks add up to the gradient of the global batch: the step equals one rank's. That holds for
    losses that are a mean (or, with ``loss_reduction="sum"``, a sum) over the samples, or with ``"targets"`` a mean over targets;
    and without layers that look at the other samples of a batch or draw random numbers; such layers are named in a warning and
    in ``inexact``.

    A round is only the interval of statistics and evaluation. Buffers are merged there; shares change within it.

    Attributes:
        optimizer: a :class:`SyncOptimizer` around the script's own.
        round_unit: the global batch size.
        inexact: what makes the ranks differ from one rank, as sentences.

    Raises:
        AgreedError: on all ranks, if the global batch has too few samples for them or too many for ``max_batch_size``, or a
            layer's forward pass changes its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        super().__init__(model, config, transport)
        self._trainable = [p.requires_grad for p in model.parameters()]
        world_size = transport.world_size
        if world_size > 1:
            check_forward(model)
        self.round_unit = config.global_batch_size or config.batch_size * world_size
        self._smallest = 2 if has_batch_norm(model) else 1
        try:
            self._shares = ShareControl(
                config, world_size, global_batch_size=self.round_unit, smallest=self._smallest
            )
        except ValueError as error:
            # Every rank has the same configuration and model, so every rank is here.
            raise AgreedError(
                f"global_batch_size must hold a share for every rank: {error}. Raise global_batch_size or batch_size, or lower "
                "accumulation_steps, min_batch_size or the number of ranks."
            ) from None
        transport.broadcast_([*(p.detach() for p in model.parameters()), *model.buffers()])
        self._buffers = FlatBuffers(model, transport)
        self._mean = config.loss_reduction == "mean"
        self._targets: TargetMean | None = None
        sparse = sparse_parameters(model).values() if world_size > 1 else ()
        self._weight = GradientWeight(model, optimizer, sparse)
        self._compressed: GradientExchange | None = None
        exchanger: Exchanger | None = None
        # Horovod adds up no bf16, and takes contiguous gradients only: none of channels_last. Our exchange takes both; bf16 goes
        # as fp32, whose sums are rounded once; or encoded.
        needs_ours = any(
            p.requires_grad and (p.dtype == torch.bfloat16 or not p.is_contiguous()) for p in model.parameters()
        )
        # A rank's device may decide how its parameters lie in memory.
        needs_ours = any(transport.allgather_object(needs_ours))
        if not config.encodes and transport.backend == "horovod" and not needs_ours:
            # Of the script's own Horovod would make a new one from its groups, without its other attributes, hooks and state.
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            carrier = torch.optim.SGD(parameters, lr=0.0)
            wrapped = transport.distributed_optimizer(carrier, model, average=self._mean, may_sleep=True)
            if wrapped is not carrier:
                exchanger = HorovodExchanger(wrapped, config.accumulation_steps)
        elif transport.world_size > 1:
            exchanger = self._compressed = GradientExchange(
                model.named_parameters(),
                config,
                transport,
                backward_passes=config.accumulation_steps,
                auto_bits=config.auto_bits,
            )
        if config.loss_reduction == "targets":
            exchanger = self._targets = TargetMean(exchanger, model, transport, round_unit=self.round_unit)
        start_state_(optimizer, optimizer, transport)
        # Steps that the shares do not know yet, and samples and seconds of those that are over.
        self._num_uncounted = 0
        # Steps in a row that were left out, of whole rounds.
        self._num_broken = 0
        self._measured: list[tuple[int, float]] = []
        self._own_s = 0.0
        # Horovod averages, so that with equal shares all weights are 1 and no gradient is touched; encoded values add up.
        self._weight_unit = 1.0 if self._compressed else float(world_size)
        self._unit = config.micro_batch_size or 1
        self._clock = SynchronousClock(
            exchanger,
            next(model.parameters()).device,
            transport,
            exchanged=() if self._compressed else model.parameters(),
            emulates=config.slowdown is not None,
        )
        gradients = UntouchedGradients(model, transport.rank) if world_size > 1 else None
        self._steps = SyncOptimizer(optimizer, exchanger, gradients)
        self.hooks += [self._weight, self._steps.guard(optimizer), self._steps]
        self.hooks += [part for part in (exchanger, gradients) if part is not None]
        self.optimizer: Optimizer = self._steps
        self.inexact = what_breaks_equality(model, loss_reduction=config.loss_reduction)
        if self.inexact and transport.rank == 0:
            log.warning(
                "strategy 'sync' is not equal to one rank at the same global batch with this model: %s",
                "; ".join(self.inexact),
            )
        if self._compressed is not None and not self._compressed.is_exact:
            # No surprise, so no warning.
            self.inexact.append(f"compression {config.compression!r} loses a part of the gradients")

    @property
    def batch_sizes(self) -> Array:
        """The ranks' present shares of the global batch, samples, whole numbers, shape (world_size,)."""
        return self._shares.whole

    def synchronize(self) -> bool:
        """Waits for the reduced gradients; returns whether this micro-batch is the step's last. COLLECTIVE then."""
        self._steps.synchronize()
        return self._steps.step_due

    def round_batches(
        self, rows: Rows, *, work: np.ndarray | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's micro-batches, the same number on every rank; ``work`` is not used.

        Where the last global batch of an epoch is too small to go round, a rank without samples gets a batch of other ranks' rows
        whose weight is 0 and whose ``rows`` are empty: it must take part in the exchange.
        """
        self._shares.begin_round(num_prefetched=source.num_prefetched)
        per_step = self._config.accumulation_steps
        num_steps = -(-len(rows) // self.round_unit)
        loads: Iterator[tuple[int, Callable[[], Batch]]] = (
            (index // per_step, functools.partial(self._load, part, rows, source))
            for index, part in enumerate(self._parts(len(rows)))
        )
        opens_window = True
        self._own_s = 0.0
        # The round may be closed before the last part. The thread that loads batches has an iterator of its own.
        for batch, part in zip(
            self._in_order(loads, round_id, num_steps, source, stats), self._parts(len(rows)), strict=False
        ):
            if self._targets is not None and opens_window:
                self._targets.begin()
            if self._config.micro_batch_size is None:
                self._weigh(part, batch)
            else:
                batch._weigh = functools.partial(self._weigh, part)
                self._steps.expect_passes(batch.num_micro_batches)
            self._steps.begin(opens_window=opens_window, step_due=part.ends_step)
            yield batch
            if self._targets is None and batch.num_targets is not None:
                raise ValueError(
                    "batch.num_targets counts with Config(loss_reduction='targets'), got it with loss_reduction "
                    f"{self._config.loss_reduction!r}: set that, or leave num_targets out"
                )
            opens_window = part.ends_step
            if part.ends_step:
                is_whole = part.batch_stop - part.batch_start == self.round_unit
                step = part.batch_start // self.round_unit if is_whole else None
                # A GPU may not be through with it.
                source.times.then(functools.partial(self._step_is_over, step, stats))
                if step is not None:
                    self._count_step(step, source.times, stats)

    def _weigh(self, part: Part, micro: Batch) -> None:
        """Sets the factor on the gradients of a micro-batch of this rank's part, which may be all of it."""
        if self._mean:
            self._weight.value = micro.weight * part.weight * self._weight_unit
        elif self._targets is None:
            self._weight.value = micro._sample_weight
        else:
            self._weight.follow(self._targets.factor(micro))

    def _step_is_over(self, step: int | None, stats: RoundStats) -> None:
        """Takes down this rank's own seconds of a step; None: one whose global batch is not whole."""
        before, self._own_s = self._own_s, stats.busy_s - self._clock.waited_s + stats.claim_s
        if step is not None and self._shares.steps_to_look:
            self._measured.append((self._shares.shares_at(step)[self._transport.rank], self._own_s - before))

    def _count_step(self, step: int, times: DeviceTimes, stats: RoundStats) -> None:
        """Counts a step; the ranks look at each other's seconds if that is due."""
        self._num_uncounted += 1
        if self._num_uncounted != self._shares.steps_to_look:
            return
        self._num_uncounted = 0
        times.settle()
        window = None
        for num_samples, seconds in self._measured:
            window = self._shares.count(num_samples, seconds)
        self._measured.clear()
        assert window is not None
        stats.wait_s += self._transport.rendezvous("shares")
        start = time.perf_counter()
        self._shares.observe(StepWindow.gathered(self._transport.allgather_stats(window.vector())), step=step)
        stats.control_s += time.perf_counter() - start

    def _parts(self, num_rows: int) -> Iterator[Part]:
        return cut_round(
            num_rows,
            total=self.round_unit,
            shares_at=self._shares.shares_at,
            rank=self._transport.rank,
            num_micro_batches=self._config.accumulation_steps,
            smallest=self._smallest,
            unit=self._unit,
        )

    def end_round(self, stats: RoundStats) -> tuple[Gathered, Array, int]:
        """Merges the buffers. COLLECTIVE.

        Args:
            stats: this rank's round; gets the seconds of waiting and of the merge.

        Returns:
            The statistics of all ranks, their shares as fractions, and the bytes of gradients and buffers that this rank put
            into exchanges.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
            AgreedError: on all ranks, if every step of the last rounds, ten or more, was left out, or the ranks' shares differed.
        """
        check_trainable(self._model, self._trainable)
        stats.skipped_steps, self._steps.num_skipped = float(self._steps.num_skipped), 0
        stats.equal_share_s = float(self._shares.equal_share_s[self._transport.rank])
        stats.finite = float(self._buffers.compute_delta())
        payload_bytes = self._clock.payload_bytes + self._buffers.payload_bytes
        self._clock.end_round(stats)
        stats.wait_s += self._transport.rendezvous("round")
        gathered = stats.gather(self._transport.allgather_stats)
        self._forget_round()
        self._check_round(gathered)
        shares = self.batch_sizes / self.round_unit
        finite = gathered["finite"] > 0
        if not finite.any():
            self._buffers.undo_()
        weights = np.where(finite, shares, 0.0) if finite.any() else shares
        weights = weights / weights.sum()
        self._buffers.start_(float(weights[self._transport.rank]))
        self._buffers.finish_()
        if self._compressed is not None:
            payload_bytes += self._compressed.payload_bytes
            self._compressed.payload_bytes = 0
        return gathered, shares, payload_bytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the model, the optimizer's state, the shares, and what was learnt of the ranks' speeds: all ranks' alike;
        and what this rank's codecs have lost."""
        return {
            "shared": {
                "parameters": [p.detach() for p in self._model.parameters()],
                "buffers": self._buffers.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                **self._shares.state_dict(),
            },
            "own": {"compressed": None if self._compressed is None else self._compressed.state_dict()},
        }

    @torch.no_grad()
    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a state; with another number of ranks the shares start equal again, and what codecs lost is dropped."""
        for tensor, value in zip(self._model.parameters(), shared["parameters"], strict=True):
            tensor.copy_(value)
        self._buffers.load_state_dict(shared["buffers"])
        self.optimizer.load_state_dict(shared["optimizer"])
        if world_size == self._transport.world_size:
            self._shares.load_state_dict(shared)
        if self._compressed is not None:
            saved = own_of(self._transport.rank % world_size)["compressed"]
            if saved is not None:
                self._compressed.load_state_dict(saved)

    def _load(self, part: Part, rows: Rows, source: BatchSource) -> Batch:
        if part.start < part.stop:
            return source.request(rows[part.start : part.stop], part.stop - part.start)
        return source.request(rows[part.batch_start : min(part.batch_start + 2, part.batch_stop)], 0, stands_in=True)

    def _check_round(self, gathered: Gathered) -> None:
        if gathered["batch_size"].sum() != self.round_unit:
            raise AgreedError(
                f"the ranks' shares {gathered['batch_size'].tolist()} do not add up to the global batch of {self.round_unit}: "
                "their hosts computed different shares from the same statistics. Use batch_size_rule 'fixed'."
            )
        skipped = int(gathered["skipped_steps"].max())
        num_steps = int(gathered["num_steps"].max()) // self._config.accumulation_steps
        # On few data a round may be one step, and one bad batch is no divergence.
        self._num_broken = self._num_broken + skipped if skipped >= num_steps else 0
        if self._num_broken >= _MOST_BROKEN:
            raise AgreedError(
                f"the gradients of all of the last {self._num_broken} steps held NaN or Inf: the run has diverged, or its data "
                "hold such numbers. Lower the learning rate, or warm it up for longer."
            )
        if skipped and self._transport.rank == 0:
            log.warning(
                "%d of %d steps were left out on all ranks, as their gradients held NaN or Inf. If this repeats, look for such "
                "numbers in the data, or lower the learning rate.",
                skipped,
                num_steps,
            )
