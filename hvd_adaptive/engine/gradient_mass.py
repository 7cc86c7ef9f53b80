"""Merge weights by squared-gradient mass: a rank counts in a row by what it learned there.

An average gives a rank the same weight everywhere. If one rank alone saw a rare feature or label, that rank's row moves in full,
but the average moves by a part of it. Here a rank's weight is its share of the sum of squared gradients, an estimate of the
diagonal Fisher information (Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", arXiv 2111.09832), so the row
moves in full. Deviations from the paper: deltas are averaged, not models; the gradients are those of the round's own
mini-batches; there is one mass a row. One a coordinate was as good within 0.001 and doubled what crosses the wire
(benchmarks/records/2026-11-23-merge-rules.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.engine.optimizers import row_dims, slice_shape, slice_squares

# A mass above it would overflow in the sum over ranks.
_LARGEST = 1e30
# Of coded masses; codes 1 to 255 reach from 2^-44 to 2^20.
_STEPS_AN_OCTAVE = 4
_CODE_OF_ONE = 176


class GradientMass:
    """This rank's squared gradients since the last merge, and from them its weight in each row.

    A "row" is a slice along a parameter's longest dimension (:func:`~hvd_adaptive.engine.optimizers.slice_dim`), or along the
    first one where ``row_parameters`` says so.

    Args:
        parameters: the trainable ones, in the model's order, each once.
        row_parameters: indices of those whose gradients may be sparse.

    Attributes:
        message_bytes: what a rank sent in the last exchange.
    """

    def __init__(self, parameters: Iterable[Tensor], *, row_parameters: Iterable[int] = ()) -> None:
        self._parameters = list(parameters)
        self._dims = row_dims(self._parameters, row_parameters)
        shapes = [slice_shape(p.shape, dim) for p, dim in zip(self._parameters, self._dims, strict=True)]
        self._mass = [p.new_zeros(shape, dtype=torch.float32) for p, shape in zip(self._parameters, shapes, strict=True)]
        self._versions = [p._version for p in self._parameters]
        self.message_bytes = 0

    def before_step(self) -> None:
        """Does nothing."""

    @torch.no_grad()
    def after_step(self) -> None:
        """Adds the gradients of the step that the optimizer has just taken; parameters that it did not change add nothing."""
        for index, parameter in enumerate(self._parameters):
            version, gradient = parameter._version, parameter.grad
            # A wrapping optimizer runs the hooks of a step twice.
            if version == self._versions[index]:
                continue
            self._versions[index] = version
            if gradient is not None:
                self._add_(index, gradient)

    def _add_(self, index: int, gradient: Tensor) -> None:
        mass, dim = self._mass[index], self._dims[index]
        if not gradient.is_sparse:
            mass.add_(slice_squares(gradient, dim))
            return
        if dim != 0 or gradient.sparse_dim() != 1:
            gradient = gradient.to_dense()
            self._add_(index, gradient)
            return
        gradient = gradient.coalesce()
        squares = gradient._values().float().square().flatten(1).sum(1)
        mass.index_add_(0, gradient._indices()[0], squares.view(-1, *mass.shape[1:]))

    def restart(self) -> None:
        """Forgets the squared gradients since the last merge."""
        for mass in self._mass:
            mass.zero_()

    def starts(self) -> list[Tensor]:
        """Returns nothing: every merge starts from zero."""
        return []

    @torch.no_grad()
    def exchange(
        self, transport: Collectives, *, weights: Array, unions: Mapping[int, Tensor], coded: bool = False
    ) -> list[Tensor]:
        """Returns this rank's weight in each row, and starts the next round's mass. COLLECTIVE.

        Over ranks the weights sum to 1 in every row. Where no rank has any mass they are the ranks' scalar weights: there,
        a delta comes from momentum or weight decay alone.

        Args:
            transport: the world.
            weights: the ranks' scalar weights, shape (world_size,), which sum to 1. A rank with 0 takes no part.
            unions: by index of a parameter the rows that some rank touched, ascending, the same on every rank; elsewhere no
                delta is exchanged, and the weights are not defined.
            coded: two bytes a mass cross the wire in place of a sum of float32; weights are then multiples of 1 / 255.

        Returns:
            One tensor a parameter, float32, which broadcasts to the parameter's shape.
        """
        for mass in self._mass:
            if weights[transport.rank]:
                torch.nan_to_num_(mass, nan=0.0, posinf=_LARGEST).clamp_(max=_LARGEST)
            else:
                mass.zero_()
        parts = [m if i not in unions else m.index_select(0, unions[i]) for i, m in enumerate(self._mass)]
        flat = torch.cat([part.reshape(-1) for part in parts])
        coded = coded and 1 < transport.world_size <= flat.numel()
        factors = (_coded_shares if coded else _shares)(flat, weights, transport)
        self.message_bytes = flat.numel() * (2 if coded else flat.element_size())
        result = []
        for index, factor in enumerate(factors.split([part.numel() for part in parts])):
            factor = factor.view(parts[index].shape)
            if index in unions:
                rows, factor = factor, torch.zeros_like(self._mass[index])
                factor[unions[index]] = rows
            result.append(factor)
        self.restart()
        return result


def _shares(mass: Tensor, weights: Array, transport: Collectives) -> Tensor:
    """This rank's share of the sum of all ranks' masses; its scalar weight where that is 0. COLLECTIVE."""
    total = mass.clone()
    transport.allreduce_sum_(total, name="mass")
    return torch.where(total > 0, mass / total, float(weights[transport.rank]))


def _coded_shares(mass: Tensor, weights: Array, transport: Collectives) -> Tensor:
    """As :func:`_shares`, in two bytes a mass. COLLECTIVE.

    Each rank sends its masses as bytes, in steps of a quarter of an octave, to the rank that owns their part of the vector. The
    owner cuts 255 units among the ranks, by largest remainders, so that they sum to 255 exactly, and sends each its units.
    """
    world_size, rank, device = transport.world_size, transport.rank, mass.device
    edges = [mass.numel() * r // world_size for r in range(world_size + 1)]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    steps = (mass.log2() * _STEPS_AN_OCTAVE).round_().add_(_CODE_OF_ONE).clamp_(1, 255)
    codes = torch.where(mass > 0, steps, 0.0).to(torch.uint8)
    own = [sizes[rank]] * world_size
    parts = transport.alltoall_bytes_async(codes, send_bytes=sizes, receive_bytes=own, name="mass.codes").wait()
    seen = parts.view(world_size, -1).to(torch.int64)
    scale = torch.exp2((torch.arange(256, dtype=torch.float64, device=device) - _CODE_OF_ONE) / _STEPS_AN_OCTAVE)
    scale[0] = 0.0
    masses = scale[seen]
    scalar = torch.from_numpy(weights).to(device).unsqueeze(1)
    total = masses.sum(0)
    exact = torch.where(total > 0, masses / total.clamp_min(scale[1]), scalar) * 255
    units = exact.floor()
    left = (255 - units.sum(0)).round_()
    place = (exact - units).argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    units = (units + (place < left)).to(torch.uint8)
    answer = transport.alltoall_bytes_async(units.view(-1), send_bytes=own, receive_bytes=sizes, name="mass.units").wait()
    return answer.to(torch.float32) / 255
