"""The parts of a model that are merged at once, and how far a rank is ahead of the global model in each."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_adaptive.algorithm.fragments import cut_layers
from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.algorithm.outliers import NormHistory
from hvd_adaptive.comm.protocols import AgreedError, Pending
from hvd_adaptive.compress.kernels.dispatch import all_finite, sum_of_squares
from hvd_adaptive.engine.flat_group import FlatGroup, load_
from hvd_adaptive.engine.flat_model import FlatModel
from hvd_adaptive.exchange.pipeline import UnderWay


@dataclass(slots=True, eq=False)
class Piece:
    """A fragment's parameters of one dtype.

    Attributes:
        group: they alone, sharing memory with the whole group.
        whole: all parameters of the dtype.
        part: where they are in it.
        ahead: how much further this rank's steps started than the global model, shape (num_elements,).
    """

    group: FlatGroup
    whole: FlatGroup
    part: slice
    ahead: Tensor

    def start(self) -> Tensor:
        """Returns what this rank's latest steps started from."""
        return self.group.weights + self.ahead


@dataclass(slots=True, eq=False)
class Fragment:
    """What is merged at once.

    Attributes:
        number: which one, from 0.
        pieces: its parameters.
        handles: of dense sums on the way.
        under_way: encoded ones.
        message: of each rank its part of the weights' sum, 1 if it was not finite, 1 if it is an outlier, its norm times its
            weight, and its updates, shape (world_size, 5), to be summed over ranks; None where the weights were known when it was
            sent.
        pending: its deltas hold a sum, or what will be one, that the global model has not taken.
        factor: what the sum is to be multiplied by, once it is there: one over the weights' sum.
        work: this rank's work since the fragment was sent.
        num_updates: its updates since then.
        merged_updates: those of the fastest rank in the sum that is there.
        history: of the norms of this rank's progress; None: outliers are let in.
    """

    number: int
    pieces: list[Piece]
    handles: list[Pending] = field(default_factory=list)
    under_way: UnderWay = field(default_factory=UnderWay)
    message: Tensor | None = None
    pending: bool = False
    factor: float = 1.0
    work: float = 0.0
    num_updates: float = 0.0
    merged_updates: float = 0.0
    history: NormHistory | None = None

    @property
    def arrived(self) -> bool:
        """Whether a sum is known to be there."""
        return self.pending and self.under_way.is_over and all(handle.done() for handle in self.handles)

    def measure_(self) -> bool:
        """Fills the deltas with this rank's progress since they were sent; returns whether that is finite."""
        finite = True
        for piece in self.pieces:
            group = piece.group
            flats = (piece.start(), group.delta, group.weights, piece.ahead)
            for tensor, start, delta, weights, ahead in zip(group.tensors, *map(group.slices, flats), strict=True):
                value = tensor.to(delta.dtype)
                # Half-precision parameters hold what they started from rounded.
                torch.sub(value, start.to(tensor.dtype).to(delta.dtype), out=delta)
                torch.sub(value, weights, out=ahead)
            finite &= all_finite(group.delta)
        return finite

    def progress_norm(self) -> float:
        """Returns the L2 norm of this rank's progress since it was sent."""
        squares = []
        for piece in self.pieces:
            group = piece.group
            for tensor, start in zip(group.tensors, group.slices(piece.start()), strict=True):
                squares.append(sum_of_squares((tensor.to(start.dtype) - start.to(tensor.dtype).to(start.dtype)).reshape(-1)))
        return float(sum(squares)) ** 0.5

    def start_again_(self) -> None:
        """Puts this rank's own parameters to the global model's."""
        self.work = self.num_updates = 0.0
        for piece in self.pieces:
            piece.ahead.zero_()
            load_(piece.group, range(len(piece.group.tensors)))

    def take_in_(self, outer: OuterStep | None, alpha: float) -> None:
        """Moves the global model by the sum in the deltas, and this rank's own with it.

        Args:
            outer: the outer step, begun for this fragment; None: the sum is added.
            alpha: the part of its distance to the global model that this rank keeps.
        """
        for piece in self.pieces:
            group, start = piece.group, piece.start()
            if self.factor != 1.0:
                group.delta.mul_(self.factor)
            if outer is None:
                group.weights.add_(group.delta)
            else:
                outer.apply_(piece.whole.weights, piece.whole.delta, [piece.part])
            torch.sub(start, group.weights, out=piece.ahead).mul_(alpha) if alpha else piece.ahead.zero_()
            flats = (start, group.weights, piece.ahead)
            for tensor, before, weights, ahead in zip(group.tensors, *map(group.slices, flats), strict=True):
                moved = (tensor.to(weights.dtype) - before.to(tensor.dtype).to(weights.dtype)).add_(weights)
                tensor.copy_(moved.add_(ahead) if alpha else moved)
        self.pending, self.factor = False, 1.0


def cut_model(flat: FlatModel, num_fragments: int) -> list[Fragment]:
    """Returns a model's fragments, in its order.

    Raises:
        AgreedError: on all ranks, if it has fewer layers than fragments.
    """
    groups = flat.parameter_groups
    if num_fragments == 1:
        whole = [Piece(g, g, slice(0, g.delta.numel()), torch.zeros_like(g.delta)) for g in groups]
        return [Fragment(0, whole)]
    found = sorted((place, info) for g in groups for place, info in zip(g.positions, g.infos, strict=True))
    try:
        runs = cut_layers([info.name for _, info in found], [info.size for _, info in found], num_fragments)
    except ValueError as error:
        # Every rank has the same model, so every rank is here.
        raise AgreedError(str(error)) from None
    fragments = []
    for number, run in enumerate(runs):
        pieces = []
        for group in groups:
            inside = [index for index, place in enumerate(group.positions) if place in run]
            if inside:
                part, sub = group.part(inside[0], inside[-1] + 1, f"{group.name}.{number}")
                pieces.append(Piece(sub, group, part, torch.zeros_like(sub.delta)))
        fragments.append(Fragment(number, pieces))
    return fragments
