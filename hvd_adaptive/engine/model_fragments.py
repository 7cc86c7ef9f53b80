"""The parts of a model that are merged at once, and how far a rank is ahead of the global model in each."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_adaptive.algorithm.fragments import cut_layers
from hvd_adaptive.algorithm.outer_step import OuterStep, cached_parts
from hvd_adaptive.algorithm.outliers import NormHistory
from hvd_adaptive.comm.protocols import AgreedError, Pending
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.engine.flat_group import FlatGroup
from hvd_adaptive.engine.flat_model import FlatModel
from hvd_adaptive.exchange.pipeline import UnderWay

# Fragments of a model that is merged beside steps, and elements that each has at least, as one more message costs time.
_MOST_BESIDE_STEPS, _LEAST_BESIDE_STEPS = 4, 1 << 16


@dataclass(slots=True, eq=False)
class Piece:
    """A fragment's parameters of one dtype.

    Attributes:
        group: they alone, sharing memory with the whole group.
        whole: all parameters of the dtype.
        part: where they are in it.
        first: the place of its first parameter there.
        ahead: how much further this rank's steps started than the global model, shape (num_elements,).
    """

    group: FlatGroup
    whole: FlatGroup
    part: slice
    first: int
    ahead: Tensor

    def rebind(self) -> None:
        """Takes the tensors that the whole group has now."""
        tensors = self.group.tensors
        tensors[:] = self.whole.tensors[self.first : self.first + len(tensors)]

    def start(self) -> Tensor:
        """Returns what this rank's latest steps started from."""
        return self.group.weights + self.ahead

    def held(self) -> Tensor | None:
        """Returns what half-precision parameters held of that, rounded; None where they held all of it."""
        return self.group.rounded(self.start()) if self.group.rounds else None


@dataclass(slots=True, eq=False)
class Fragment:
    """What is merged at once.

    Attributes:
        number: which one, from 0.
        pieces: its parameters.
        handles: of dense sums on the way.
        under_way: encoded ones.
        message: of each rank its part of the weights' sum, 1 if it was not finite, 1 if it is an outlier, its norm times its
            weight, and its updates, shape (world_size, 5), to be summed over ranks; None: nothing was sent since the last sum.
        pending: its deltas hold a sum, or what will be one, that the global model has not taken.
        factor: what the sum is to be multiplied by, once it is there: one over the weights' sum.
        work: this rank's work since the fragment was sent.
        num_updates: its updates since then.
        sent_at: the place in the round at which it was sent last; below 0 in the round before.
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
    sent_at: float = 0.0
    merged_updates: float = 0.0
    history: NormHistory | None = None

    @property
    def arrived(self) -> bool:
        """Whether a sum is known to be there."""
        return self.pending and self.under_way.is_over and all(handle.done() for handle in self.handles)

    def finish(self) -> None:
        """Waits until its sum is there. COLLECTIVE: every rank has begun it."""
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        self.under_way.finish()

    def measure_(self) -> bool:
        """Fills the deltas with this rank's progress since they were sent; returns whether that is finite."""
        finite = True
        for piece in self.pieces:
            group = piece.group
            group.gather_(group.delta)
            held = piece.held()
            for part in cached_parts(slice(0, group.delta.numel()), group.delta.device):
                delta, weights, ahead = (flat[part] for flat in (group.delta, group.weights, piece.ahead))
                start = weights + ahead if held is None else held[part]
                torch.sub(delta, weights, out=ahead)
                delta.sub_(start)
            finite &= all_finite(group.delta)
        return finite

    def start_again_(self) -> None:
        """Puts this rank's own parameters to the global model's."""
        self.work = self.num_updates = 0.0
        for piece in self.pieces:
            piece.ahead.zero_()
            piece.group.scatter_(piece.group.weights)

    def take_in_(self, outer: OuterStep | None, alpha: float) -> None:
        """Moves the global model by the sum in the deltas, and this rank's own with it.

        Args:
            outer: the outer step, begun for this fragment; None: the sum is added.
            alpha: the part of its distance to the global model that this rank keeps.
        """
        for piece in self.pieces:
            group, offset = piece.group, piece.part.start
            values = group.gather_(torch.empty_like(group.delta))
            held = piece.held()
            for part in cached_parts(slice(0, values.numel()), values.device):
                value, delta, weights, ahead = (flat[part] for flat in (values, group.delta, group.weights, piece.ahead))
                start = weights + ahead
                value.sub_(start if held is None else held[part])
                if self.factor != 1.0:
                    delta.mul_(self.factor)
                if outer is None:
                    weights.add_(delta)
                else:
                    outer.apply_(piece.whole.weights, piece.whole.delta, [slice(offset + part.start, offset + part.stop)])
                torch.sub(start, weights, out=ahead).mul_(alpha) if alpha else ahead.zero_()
                value.add_(weights)
                if alpha:
                    value.add_(ahead)
            group.scatter_(values)
        self.pending, self.factor = False, 1.0


def fragments_beside_steps(flat: FlatModel) -> int:
    """Returns in how many fragments a model is merged beside steps: the link carries one after the other, so that each arrives
    sooner than the whole would. Where a sum took as long as what is between two merges, that was worth a tenth of the samples:
    benchmarks/records/2026-11-27-late-sums.md."""
    groups = flat.parameter_groups
    if any(group.row_ranges or group.factors is not None for group in groups):
        return 1
    num_elements, num_tensors = sum(group.delta.numel() for group in groups), sum(len(group.tensors) for group in groups)
    return max(1, min(_MOST_BESIDE_STEPS, num_tensors, num_elements // _LEAST_BESIDE_STEPS))


def cut_model(flat: FlatModel, num_fragments: int, *, by_layers: bool = True) -> list[Fragment]:
    """Returns a model's fragments, in its order.

    Args:
        flat: the model.
        num_fragments: F, >= 1.
        by_layers: layers are whole; else parameters are.

    Raises:
        AgreedError: on all ranks, if it has fewer layers than fragments.
    """
    groups = flat.parameter_groups
    if num_fragments == 1:
        whole = [Piece(g, g, slice(0, g.delta.numel()), 0, torch.zeros_like(g.delta)) for g in groups]
        return [Fragment(0, whole)]
    found = sorted((place, info) for g in groups for place, info in zip(g.positions, g.infos, strict=True))
    try:
        names = [info.name if by_layers else str(number) for number, (_, info) in enumerate(found)]
        runs = cut_layers(names, [info.size for _, info in found], num_fragments)
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
                pieces.append(Piece(sub, group, part, inside[0], torch.zeros_like(sub.delta)))
        fragments.append(Fragment(number, pieces))
    return fragments
