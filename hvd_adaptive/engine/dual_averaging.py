"""Merges of Adagrad's steps in its dual space: what ranks learned adds up where they learned different things.

Adagrad's delta is a sum of gradients over the root of its accumulator A. So sqrt(A) times the delta is the sum of a rank's
gradients, about, and such sums may be added over ranks ("dual averaging": Yuan, Zaheer, Reddi, arXiv 2011.08474):

    g_r    = A_r - A_start                  what rank r added to the accumulator since the last merge
    A      = A_start + sum g_r
    n      = (sum g_r)^2 / sum g_r^2        how many ranks learned the row, in [1, ranks]; g summed over the row here
    delta  = sum sqrt(A_r / A) delta_r / sqrt(n)

Where one rank learned a row, the row gets its whole step. Where all learned alike, the first merge is the average. Later, when
a round adds little to A, a merge moves sqrt(n) times as far as the average: about as far as steps with the mean gradient would.
Deviations from the paper: its accumulators are averages, ours are sums, and n is ours.
benchmarks/records/2026-11-23-dual-averaging.md has the comparison with averages and with weights by squared-gradient mass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.engine.optimizers import RowwiseAdagrad, row_dims, row_sum

# Above it, sums over ranks would overflow.
_LARGEST = 1e30
# Squared gradients are small: without a factor their squares would be zeros in float32.
_UNIT = 1e12
_LARGEST_IN_UNITS = 1e18


class DualAveraging:
    """One rank's part in merges of Adagrad's steps. Also merges the accumulators: after a merge all ranks hold the same.

    A "row" is a slice along a parameter's longest dimension (:func:`~hvd_adaptive.engine.optimizers.slice_dim`), or along the
    first one where ``row_parameters`` says so.

    Args:
        optimizer: torch's Adagrad or :class:`~hvd_adaptive.engine.optimizers.RowwiseAdagrad`.
        parameters: the trainable ones, in the model's order, each once.
        row_parameters: indices of those whose gradients may be sparse.

    Attributes:
        message_bytes: what a rank sent in the last exchange.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], *, row_parameters: Iterable[int] = ()) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._dims = row_dims(self._parameters, row_parameters)
        self._start: list[Tensor] | None = None
        self.message_bytes = 0

    def before_step(self) -> None:
        """Takes down the accumulators before the first step after a merge."""
        if self._start is None:
            self._start = [self._accumulator(index).clone() for index in range(len(self._parameters))]

    def after_step(self) -> None:
        """Does nothing: the optimizer counts."""

    def restart(self) -> None:
        """Forgets this round's steps: the next one starts from the accumulators as they are then."""
        self._start = None

    def starts(self) -> list[Tensor]:
        """Returns the accumulators that this rank's steps started from, for a change in place."""
        self.before_step()
        assert self._start is not None
        return self._start

    def _accumulator(self, index: int) -> Tensor:
        parameter = self._parameters[index]
        group = next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))
        return row_sum(parameter, self._dims[index], self._optimizer.state[parameter], group)

    @torch.no_grad()
    def exchange(
        self, transport: Collectives, *, weights: NDArray[np.float64], unions: Mapping[int, Tensor], coded: bool = False
    ) -> list[Tensor]:
        """Merges the accumulators; returns what this rank's delta counts in each row or coordinate. COLLECTIVE.

        Args:
            transport: the world.
            weights: the ranks' scalar weights, shape (world_size,), which sum to 1. A rank with 0 takes no part. They count where
                no rank has a squared gradient.
            unions: by index of a parameter the rows that some rank touched, ascending, the same on every rank; elsewhere no
                delta is exchanged, and the result is not defined.
            coded: no effect: accumulators are sums of all steps, and are exchanged in float32 (float64 for such parameters).

        Returns:
            One tensor a parameter, which broadcasts to the parameter's shape.
        """
        starts, weight = [], float(weights[transport.rank])
        gains: list[Tensor] = []
        for index, start in enumerate(self.starts()):
            rows, accumulator = unions.get(index), self._accumulator(index)
            starts.append(start if rows is None else start.index_select(0, rows))
            gain = (accumulator if rows is None else accumulator.index_select(0, rows)) - starts[-1]
            gain = gain.to(torch.promote_types(gain.dtype, torch.float32))
            gains.append(gain.nan_to_num_(nan=0.0, posinf=_LARGEST).clamp_(0, _LARGEST) if weight else torch.zeros_like(gain))
            if not weight:
                # It may hold NaN in all rows.
                accumulator.copy_(start)
        squares = [self._in_units(i, gain).clamp_(max=_LARGEST_IN_UNITS).square_() for i, gain in enumerate(gains)]
        wide = torch.float64 if any(gain.dtype == torch.float64 for gain in gains) else torch.float32
        parts = [part for pair in zip(gains, squares, strict=True) for part in pair]
        flat = torch.cat([part.reshape(-1).to(wide) for part in parts])
        transport.allreduce_sum_(flat, name="accumulators")
        self.message_bytes = flat.nbytes
        sums = [s.view(p.shape).to(p.dtype) for s, p in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
        self._start, factors = None, []
        for index, start in enumerate(starts):
            rows, gain, together = unions.get(index), sums[2 * index], sums[2 * index + 1]
            total, accumulator = start + gain, self._accumulator(index)
            learners = self._in_units(index, gain).square_().div_(together).clamp_(1, transport.world_size)
            factor = ((start + gains[index]) / (total * learners)).sqrt_()
            factor = torch.where((total > 0) & (together > 0), factor, weight)
            if rows is None:
                accumulator.copy_(total)
            else:
                accumulator[rows] = total.to(accumulator.dtype)
                some, factor = factor, torch.zeros_like(accumulator, dtype=factor.dtype)
                factor[rows] = some
            factors.append(factor)
        return factors

    def _in_units(self, index: int, gain: Tensor) -> Tensor:
        others = [d for d in range(gain.dim()) if d != self._dims[index]]
        return (gain.sum(others, keepdim=True) if others else gain) * _UNIT


def has_accumulators(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's steps can be merged in this way."""
    return isinstance(optimizer, (Adagrad, RowwiseAdagrad))

