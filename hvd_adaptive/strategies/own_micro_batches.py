"""The steps of ``local`` in micro-batches: the gradients of a rank's own, each weighted as it is computed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch
from hvd_adaptive.engine.strategy import Removable, refuse_closure
from hvd_adaptive.engine.weighted_gradient import GradientWeight
from hvd_adaptive.strategies.target_mean import TargetMean


class OwnMicroBatches:
    """Has each micro-batch count in its step: by its samples, or with ``loss_reduction="targets"`` by its targets.

    Args:
        model: to train.
        optimizer: the user's own.
        config: has a ``micro_batch_size``.
        transport: the world.

    Attributes:
        hooks: on the model and the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Collectives) -> None:
        self._weight = GradientWeight(model, optimizer)
        self.hooks: list[Removable] = [self._weight]
        self._targets: TargetMean | None = None
        self._number = 0
        if config.loss_reduction == "targets":
            self._targets = TargetMean(None, model, transport, round_unit=config.batch_size)
            self.hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def follow(self, batch: Batch) -> None:
        """Has the micro-batches of a batch weighted when they are handed out."""
        batch._weigh = functools.partial(self._weigh, batch)

    def _weigh(self, batch: Batch, micro: Batch) -> None:
        if self._targets is None:
            self._weight.value = micro.weight
            return
        # A step begins with its first micro-batch, as a loop may fetch its next batch before it steps. After a pass whose
        # gradients were divided another one may come, as for SAM.
        is_first = batch._parts is not None and micro is batch._parts[0]
        if batch.number != self._number or (is_first and self._targets.is_over):
            self._number = batch.number
            self._targets.begin()
        self._weight.follow(self._targets.factor(micro))

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        refuse_closure(args, kwargs, "loss_reduction 'targets'", "as it divides the gradients by the batch's targets")
        self.synchronize()

    def synchronize(self) -> None:
        """Makes of the gradients what the optimizer takes, if they are not yet."""
        if self._targets is not None:
            self._targets.synchronize()
