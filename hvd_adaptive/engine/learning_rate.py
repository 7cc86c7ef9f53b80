"""A learning-rate multiplier inside ``optimizer.step``: schedulers and the user's own writes to ``lr`` survive it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class LearningRateMultiplier:
    """Multiplies every group's ``lr`` for the length of each step and puts the old value back after it.

    Args:
        optimizer: any torch optimizer; hooks are registered on it. One that finds its steps itself, with no ``lr`` or None, goes
            with factors of 1 only.

    Attributes:
        value: the factor on the learning rate of the step that is under way, else of the next one.
        applied_lr: the first group's learning rate in the last step, 0 before any, or where it has none.
        num_begun: steps that have begun, finished or not.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._value = 1.0
        self.applied_lr = 0.0
        self.num_begun = 0
        self._saved: list[Any] | None = None
        self._optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def value(self) -> float:
        """The factor."""
        return self._value

    @value.setter
    def value(self, factor: float) -> None:
        self._value = factor
        if self._saved is not None:
            # Horovod's optimizer waits for the gradients inside its step, and what is known then may change the factor.
            self._apply(self._saved)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self.num_begun += 1
        # A wrapping optimizer (Horovod's) runs the hooks again for the step inside its own.
        if self._saved is None:
            self._saved = [group.get("lr") for group in optimizer.param_groups]
            self._apply(self._saved)

    def _apply(self, rates: list[Any]) -> None:
        for group, lr in zip(self._optimizer.param_groups, rates, strict=True):
            if lr is not None:
                group["lr"] = lr * self._value
            elif self._value != 1:
                self.restore()
                raise ValueError(
                    f"{type(self._optimizer).__name__} has no learning rate ('lr') that could be multiplied by "
                    f"{self._value:.3g}, as lr_rule, warmup_epochs or lr_decay demand: leave these out of the configuration, or "
                    "give the optimizer a learning rate"
                )
        self.applied_lr = float(self._optimizer.param_groups[0].get("lr") or 0.0)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts the learning rates back, also after a step that raised."""
        if self._saved is not None:
            for group, lr in zip(self._optimizer.param_groups, self._saved, strict=True):
                if lr is not None:
                    group["lr"] = lr
            self._saved = None

    def remove(self) -> None:
        """Takes the hooks off the optimizer, also between those of one step."""
        self.restore()
        for handle in self._handles:
            handle.remove()
