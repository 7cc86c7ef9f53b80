"""Merges by row or coordinate: what they have in common, and which one an option names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from hvd_adaptive.algorithm.merge_weights import ROW_RULES
from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.engine.dual_averaging import DualAveraging
from hvd_adaptive.engine.gradient_mass import GradientMass


class MergeRule(Protocol):
    """What a rank's delta counts in each row or coordinate.

    Attributes:
        message_bytes: what a rank sent in the last exchange.
    """

    message_bytes: int

    def before_step(self) -> None:
        """Call it before each step of the optimizer."""

    def after_step(self) -> None:
        """Call it after each step of the optimizer."""

    def restart(self) -> None:
        """Forgets this round's steps: model and optimizer have been loaded."""

    def starts(self) -> list[Tensor]:
        """Returns what this round's steps started from and all ranks must share, for a change in place."""

    def exchange(
        self, transport: Collectives, *, weights: NDArray[np.float64], unions: Mapping[int, Tensor], coded: bool = False
    ) -> list[Tensor]:
        """Returns this rank's weights, one tensor a parameter, which broadcasts to it. COLLECTIVE."""


def make_merge_rule(
    name: str, optimizer: Optimizer, parameters: Iterable[Tensor], *, row_parameters: Iterable[int] = ()
) -> MergeRule | None:
    """Returns the rule of that name, None where a rank has one weight for all.

    Args:
        name: a value of ``merge_weights``.
        optimizer: of the parameters.
        parameters: the trainable ones, in the model's order, each once.
        row_parameters: indices of those whose gradients may be sparse.
    """
    if name not in ROW_RULES:
        return None
    if name == "dual-averaging":
        return DualAveraging(optimizer, parameters, row_parameters=row_parameters)
    return GradientMass(parameters, row_parameters=row_parameters)
