"""The weight of a rank's share of a batch, put on each parameter's gradient before Horovod takes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.engine.weighted_gradient import WeightedGradient


class _Trainer:
    """The optimizer that was wrapped last for a parameter. The parameter's hook must not keep one alive that was replaced."""

    optimizer: Callable[[], Any] = staticmethod(lambda: None)
    local_weight = 1.0
    is_hooked = False


class GradientWeights:
    """Hooks on parameters, from the first batch on that has another size than the script's: each costs some microseconds.

    Args:
        weigh: returns the factor on a gradient of the present backward, given its optimizer and that optimizer's weight for
            local steps.

    Attributes:
        are_needed: a batch of another size has come.
    """

    def __init__(self, weigh: Callable[[Any, float], float]) -> None:
        self._weigh = weigh
        self._trainers = WeakTensorKeyDictionary()
        self.are_needed = False

    def registered(self, optimizer: Any, parameters: list[Tensor], *, local_weight: float) -> None:
        """Takes in a wrapped optimizer, in place of those that had the same parameters.

        Args:
            optimizer: the optimizer.
            parameters: those that it trains.
            local_weight: factor on gradients of steps that use this rank's alone.
        """
        for parameter in parameters:
            trainer = self._trainers.setdefault(parameter, _Trainer())
            trainer.optimizer, trainer.local_weight = weakref.ref(optimizer), local_weight
            self._hook(parameter, trainer)

    def need(self) -> None:
        """Takes note that weights other than 1 are about to come."""
        self.are_needed = True
        for parameter, trainer in self._trainers.items():
            self._hook(parameter, trainer)

    def averages(self, optimizer: Any) -> None:
        """Takes the weight for local steps off gradients that an optimizer has so far: they are about to be averaged."""
        for parameter, trainer in self._trainers.items():
            if trainer.optimizer() is optimizer and trainer.local_weight != 1.0 and parameter.grad is not None:
                parameter.grad.div_(trainer.local_weight)

    def _hook(self, parameter: Tensor, trainer: _Trainer) -> None:
        if trainer.is_hooked or not (self.are_needed or trainer.local_weight != 1.0):
            return
        trainer.is_hooked = True
        # A frozen parameter takes no hook, but may be trained again later.
        is_trained = parameter.requires_grad
        WeightedGradient(
            parameter.requires_grad_(True), lambda: self._weigh(trainer.optimizer(), trainer.local_weight)
        )
        parameter.requires_grad_(is_trained)
