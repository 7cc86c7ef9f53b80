"""Losses that are means over targets, such as the tokens of padded texts: all ranks' become the mean over all their targets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hvd_adaptive.comm.protocols import AgreedError, Collectives
from hvd_adaptive.engine.batches import Batch
from hvd_adaptive.strategies.sync_optimizer import Exchanger


class TargetMean:
    """Puts ``loss_reduction="targets"`` on an exchange of gradients; an :class:`Exchanger` itself.

    Each gradient counts as often as its micro-batch has targets. The ranks add up the gradients, and then what they have counted,
    by which the sum is divided. So none waits for the others' numbers before its backward pass.

    Args:
        exchanger: adds up the gradients of all ranks; None: a step has this rank's alone.
        model: to train.
        transport: the world.
        round_unit: samples of a step. Gradients are divided by them before they are added up, to keep them small.

    Attributes:
        is_over: the gradients of this step are divided.

    Raises:
        AgreedError: on all ranks, for parameters of float16.
    """

    def __init__(self, exchanger: Exchanger | None, model: nn.Module, transport: Collectives, *, round_unit: int) -> None:
        if any(p.dtype == torch.float16 for p in model.parameters() if p.requires_grad):
            # Every rank has the same model, so every rank is here.
            raise AgreedError(
                "loss_reduction 'targets' multiplies gradients by targets per sample, which parameters of float16 may not hold: "
                "keep the model in float32 and use torch.autocast, or take bfloat16"
            )
        self._exchanger = exchanger
        self._parameters = list(model.parameters())
        self._transport = transport
        self._scale = 1.0 / round_unit
        self.begin()

    def begin(self) -> None:
        """Begins a step."""
        # All that counts by now, by micro-batch: a loop may go through them twice. They are not kept: their graphs take memory.
        self._own = 0.0
        self._step = object()
        # Of the last micro-batch what is still to be counted, and what its gradients were multiplied by.
        self._last: Batch | None = None
        self._used: float | None = None
        self.is_over = False

    def factor(self, micro: Batch) -> Callable[[], float]:
        """Returns what gives the factor on the gradients of a micro-batch, once its targets are counted.

        Args:
            micro: the next one of this step.

        Raises:
            RuntimeError: if the gradients of those before were divided already.
        """
        if self.is_over:
            raise RuntimeError(
                f"rank {self._transport.rank}: a micro-batch came after session.synchronize(), which has divided the gradients "
                "by all targets of the step: call it once, after the last micro-batch"
            )
        self._count_last()
        self._last = micro
        return self._factor

    def _factor(self) -> float:
        if self._last is None:
            # Not of a step.
            return 1.0
        micro = self._last
        if not micro._sample_weight:
            return 0.0
        if micro.num_targets is None:
            raise RuntimeError(
                f"rank {self._transport.rank}: loss_reduction 'targets' needs the number that the loss is divided by: set "
                "batch.num_targets before backward(), for each batch, or for each of batch.micro_batches()"
            )
        self._check(micro)
        self._used = micro.num_targets
        return micro._sample_weight * micro.num_targets * self._scale

    def _count_last(self) -> None:
        """Counts the last micro-batch, if it was computed."""
        if self._last is None or self._used is None:
            return
        micro = self._last
        self._check(micro)
        step, used = micro._counted
        if step is not self._step:
            self._own += micro._sample_weight * self._used
            micro._counted = self._step, self._used
        elif used != self._used:
            raise RuntimeError(
                f"rank {self._transport.rank}: a micro-batch had {used:g} targets and then {self._used:g} in one step, which "
                "goes through its micro-batches twice: all parts of a loss must be divided by one number"
            )
        self._last = self._used = None

    def _check(self, micro: Batch) -> None:
        if self._used is not None and micro.num_targets != self._used:
            raise RuntimeError(
                f"rank {self._transport.rank}: batch.num_targets was {self._used:g} in backward() and is {micro.num_targets} "
                "now: all parts of a loss must be divided by one number. Set it once, before backward()"
            )

    @property
    def has_begun(self) -> bool:
        """See :class:`Exchanger`."""
        return self._exchanger is not None and self._exchanger.has_begun

    @property
    def is_finite(self) -> bool | None:
        """See :class:`Exchanger`."""
        return None if self._exchanger is None else self._exchanger.is_finite

    @torch.no_grad()
    def synchronize(self) -> None:
        """Waits for the gradients of the mean over all ranks' targets; again in one step: does nothing more. COLLECTIVE with an
        exchanger.

        Raises:
            RuntimeError: if the loop has changed a micro-batch's number of targets since its backward.
        """
        self._count_last()
        total, self._own = self._own, 0.0
        self.is_over = self.is_over or total > 0
        if self._exchanger is not None:
            self._exchanger.synchronize()
            total = float(self._transport.allgather_stats(np.array([total])).sum())
        total *= self._scale
        gradients = [p.grad for p in self._parameters if p.requires_grad and p.grad is not None]
        # Without any targets all gradients are 0, as no codec adds what it has lost before: combinations.py refuses that.
        if total > 0 and gradients:
            torch._foreach_div_(gradients, total)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """See :class:`Exchanger`."""
        if self._exchanger is not None:
            self._exchanger.set_backward_passes_per_step(passes)

    def remove(self) -> None:
        """See :class:`Exchanger`."""
        if self._exchanger is not None:
            self._exchanger.remove()
