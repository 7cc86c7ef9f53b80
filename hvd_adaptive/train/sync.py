"""Strategy ``sync``: every step is one machine's step with the global batch, of which each rank computes a share by its speed.

LB-BSP (Chen et al., SoCC 2020, "Semi-dynamic load balancing"), on Horovod's own overlapped exchange of gradients.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.config import Config
from hvd_adaptive.core.shares import Part, cut_round, integer_shares
from hvd_adaptive.core.speed_model import Damping, SpeedModel
from hvd_adaptive.train.batches import Batch, BatchSource, Rows
from hvd_adaptive.train.exactness import what_breaks_equality
from hvd_adaptive.train.flat_model import FlatBuffers
from hvd_adaptive.train.records import Array, GatheredStats, RoundStats
from hvd_adaptive.train.strategy import OwnState
from hvd_adaptive.train.sync_optimizer import SyncOptimizer
from hvd_adaptive.train.synchronous import FixedWorkStrategy, SynchronousClock, batches_in_order
from hvd_adaptive.transport.base import AgreedError, Transport

log = logging.getLogger(__name__)


class GradientWeight:
    """Multiplies every gradient by this rank's weight as soon as it is computed, before Horovod's own hook sends it.

    A tensor's hook runs before those of its gradient's accumulation, where Horovod's is; sparse gradients pass it as well.

    Args:
        optimizer: over the parameters.

    Attributes:
        value: the factor; at 1 gradients are not touched.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.value = 1.0
        self._handles = [
            p.register_hook(self._scale)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        ]

    def _scale(self, gradient: Tensor) -> Tensor | None:
        return None if self.value == 1.0 else gradient * self.value

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()


class SyncStrategy(FixedWorkStrategy):
    """Synchronous training with unequal shares of a fixed global batch. Construction is COLLECTIVE.

    The weighted gradients of N ranks add up to the gradient of the global batch: the step equals one rank's. That holds for
    losses that are a mean (or, with ``loss_reduction="sum"``, a sum) over the samples, and without layers that look at the
    other samples of a batch or draw random numbers; such layers are named in a warning and in ``inexact``.

    A round is only the interval of statistics, rebalancing and evaluation. Buffers are merged there.

    Attributes:
        optimizer: a :class:`SyncOptimizer` around Horovod's wrapper.
        batch_sizes: the ranks' shares of the global batch, samples, whole numbers, shape (world_size,).
        round_unit: the global batch size.
        inexact: what makes the ranks differ from one rank, as sentences.

    Raises:
        AgreedError: on all ranks, if the global batch has too few samples for them or too many for ``max_batch_size``.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        super().__init__(model, config, transport)
        self._trainable = [p.requires_grad for p in model.parameters()]
        world_size = transport.world_size
        self.round_unit = config.global_batch_size or config.batch_size * world_size
        # BatchNorm refuses a batch of one.
        self._smallest = 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()) else 1
        self._speed_model = SpeedModel(world_size)
        self._damping = Damping(world_size)
        self._sizes = np.full(world_size, self.round_unit / world_size)
        self.batch_sizes = self._whole()
        transport.broadcast_([*(p.detach() for p in model.parameters()), *model.buffers()])
        self._buffers = FlatBuffers(model, transport)
        # Average, not Sum: with equal shares all weights are 1 and no gradient is touched.
        self._mean = config.loss_reduction == "mean"
        self._weight = GradientWeight(optimizer)
        wrapped = transport.distributed_optimizer(
            optimizer, model, average=self._mean, backward_passes_per_step=config.accumulation_steps
        )
        self._clock = SynchronousClock(wrapped, next(model.parameters()).device, transport)
        self._steps = SyncOptimizer(wrapped)
        self.optimizer: Optimizer = self._steps
        self.inexact = what_breaks_equality(model, loss_reduction=config.loss_reduction)
        if self.inexact and transport.rank == 0:
            log.warning(
                "strategy 'sync' is not equal to one rank at the same global batch with this model: %s",
                "; ".join(self.inexact),
            )

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
        parts = cut_round(
            len(rows),
            shares=[int(size) for size in self.batch_sizes],
            rank=self._transport.rank,
            num_micro_batches=self._config.accumulation_steps,
            smallest=self._smallest,
        )
        loads: Iterator[Callable[[], Batch]] = (functools.partial(self._load, part, rows, source) for part in parts)
        opens_window = True
        for part, batch in zip(parts, batches_in_order(loads, stats), strict=True):
            if self._mean:
                self._weight.value = part.weight * self._transport.world_size
            else:
                self._weight.value = float(part.weight > 0)
            self._steps.begin(opens_window=opens_window, step_due=part.ends_step)
            yield batch
            opens_window = part.ends_step

    def end_round(self, stats: RoundStats) -> tuple[GatheredStats, Array, int]:
        """Merges the buffers and chooses the next shares. COLLECTIVE.

        Args:
            stats: this rank's round; gets the seconds of waiting and of the merge.

        Returns:
            The statistics of all ranks, their shares as fractions, and the bytes of the buffers (those of gradients are Horovod's
            and not known).

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
            AgreedError: on all ranks, if every step of the round was left out, or the ranks' shares differed.
        """
        self._check_trainable()
        stats.skipped_steps, self._steps.num_skipped = float(self._steps.num_skipped), 0
        stats.finite = float(self._buffers.compute_delta())
        self._clock.end_round(stats)
        stats.wait_s += self._transport.rendezvous("round")
        gathered = GatheredStats(self._transport.allgather_stats(stats.vector()))
        self._check_round(gathered)
        shares = self.batch_sizes / self.round_unit
        finite = gathered["finite"] > 0
        weights = np.where(finite, shares, 0.0)
        if finite.any():
            weights /= weights.sum()
        self._buffers.merge_(float(weights[self._transport.rank]))
        self._rebalance(gathered)
        return gathered, shares, self._buffers.payload_bytes

    def close(self) -> None:
        """Takes the weights' hooks off the model."""
        self._weight.remove()

    def state_dict(self) -> dict[str, Any]:
        """Returns the model, the optimizer's state, the shares, and what was learnt of the ranks' speeds: all ranks' alike."""
        return {
            "shared": {
                "parameters": [p.detach() for p in self._model.parameters()],
                "buffers": self._buffers.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sizes": self._sizes,
                "speed_model": self._speed_model.state_dict(),
                "damping": self._damping.state_dict(),
            },
            "own": {},
        }

    @torch.no_grad()
    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a state; with another number of ranks the shares start equal again."""
        for tensor, value in zip(self._model.parameters(), shared["parameters"], strict=True):
            tensor.copy_(value)
        self._buffers.load_state_dict(shared["buffers"])
        self.optimizer.load_state_dict(shared["optimizer"])
        if world_size == self._transport.world_size:
            self._sizes = np.array(shared["sizes"]) * (self.round_unit / sum(shared["sizes"]))
            self._speed_model.load_state_dict(shared["speed_model"])
            self._damping.load_state_dict(shared["damping"])
            self.batch_sizes = self._whole()

    def _load(self, part: Part, rows: Rows, source: BatchSource) -> Batch:
        if part.start < part.stop:
            return source.load(rows[part.start : part.stop], part.stop - part.start)
        batch = source.load(rows[part.batch_start : min(part.batch_start + 2, part.batch_stop)], 0)
        batch.rows = rows[:0]
        return batch

    @property
    def _bounds(self) -> tuple[Array, Array]:
        config, world_size = self._config, self._transport.world_size
        lower = max(config.accumulation_steps * self._smallest, config.min_batch_size or 1)
        upper = math.inf if config.max_batch_size is None else config.max_batch_size
        return np.full(world_size, float(lower)), np.full(world_size, float(upper))

    def _whole(self) -> Array:
        lower, upper = (bound.tolist() for bound in self._bounds)
        # Processors may differ in the last bit of a size, but the ranks must not in their shares.
        sizes = [round(size, 6) for size in self._sizes.tolist()]
        most = None if math.isinf(upper[0]) else [int(size) for size in upper]
        try:
            return np.array(integer_shares(sizes, self.round_unit, lower=int(lower[0]), upper=most), dtype=np.float64)
        except ValueError as error:
            # Every rank has the same configuration and model, so every rank is here.
            raise AgreedError(
                f"global_batch_size must hold a share for every rank: {error}. Raise global_batch_size or batch_size, or lower "
                "accumulation_steps, min_batch_size or the number of ranks."
            ) from None

    def _check_trainable(self) -> None:
        if [p.requires_grad for p in self._model.parameters()] != self._trainable:
            raise RuntimeError(
                "requires_grad of a parameter changed during the session; close it and make a new Session after freezing "
                "or unfreezing, so that the ranks exchange the right gradients"
            )

    def _check_round(self, gathered: GatheredStats) -> None:
        if gathered["batch_size"].sum() != self.round_unit:
            raise AgreedError(
                f"the ranks' shares {gathered['batch_size'].tolist()} do not add up to the global batch of {self.round_unit}: "
                "their hosts computed different shares from the same statistics. Use batch_size_rule 'fixed'."
            )
        skipped = int(gathered["skipped_steps"].max())
        num_steps = int(gathered["num_steps"].max()) // self._config.accumulation_steps
        if skipped and skipped >= num_steps:
            raise AgreedError(
                f"the gradients of all {num_steps} steps of a round held NaN or Inf: the run has diverged. Lower --lr, or raise "
                "--warmup-epochs."
            )
        if skipped and self._transport.rank == 0:
            log.warning(
                "%d of %d steps were left out on all ranks, as their gradients held NaN or Inf. If this repeats, lower --lr.",
                skipped,
                num_steps,
            )

    def _rebalance(self, gathered: GatheredStats) -> None:
        config, rule = self._config, self._config.size_rule
        if rule == "fixed" or (rule == "static" and self._speed_model.observed.all()):
            return
        self._speed_model.observe(
            gathered["num_steps"], gathered["num_samples"], gathered["busy_s"] + gathered["claim_s"]
        )
        if not self._speed_model.observed.all():
            return
        # The model is of a micro-batch.
        parts = config.accumulation_steps
        lower, upper = self._bounds
        target = parts * self._speed_model.equalize(self.round_unit / parts, lower / parts, upper / parts)
        self._sizes = target if rule == "static" else self._damping.next(self._sizes, target, lower=lower, upper=upper)
        self.batch_sizes = self._whole()
