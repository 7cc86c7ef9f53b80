"""Tensors of one kind as a flat global model and a flat delta."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.compress.policy import TensorInfo
from hvd_adaptive.engine import host_state
from hvd_adaptive.engine.row_merge import RowRange
from hvd_adaptive.engine.touched_rows import TouchedRows


@dataclass(slots=True)
class FlatGroup:
    """Tensors of one kind, flattened one after the other.

    Attributes:
        name: names the exchange, the same on every rank.
        tensors: the model's own tensors, in the model's order, each once.
        weights: the flat global model, fp64 for fp64 tensors, else fp32, shape (num_elements,); on the device, or in host memory.
        delta: same shape and dtype, on the device; of buffers in fp64.
        row_ranges: the sparse parameters among ``tensors``, by position there.
        infos: names and shapes of parameters.
        positions: of parameters, where each tensor stands among the model's trainable ones.
        factors: this rank's weight in each row or coordinate of each tensor, which broadcasts to it; None: one weight for all.
    """

    name: str
    tensors: list[Tensor]
    weights: Tensor
    delta: Tensor
    row_ranges: dict[int, RowRange] = field(default_factory=dict)
    infos: list[TensorInfo] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    factors: list[Tensor] | None = None

    def rest(self) -> list[slice]:
        """The elements outside the row ranges, where there are any, ascending."""
        bounds = [0, *(b for r in self.row_ranges.values() for b in (r.part.start, r.part.stop)), self.delta.numel()]
        return [slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]

    def part(self, start: int, stop: int, name: str) -> tuple[slice, FlatGroup]:
        """Returns where the tensors in [start, stop) are in the flat ones, and a group of them alone, which shares memory with
        this one; without row ranges and factors."""
        ends = [0, *itertools.accumulate(t.numel() for t in self.tensors)]
        inside, found = slice(start, stop), slice(ends[start], ends[stop])
        group = FlatGroup(
            name, self.tensors[inside], self.weights[found], self.delta[found],
            infos=self.infos[inside], positions=self.positions[inside],
        )  # fmt: skip
        return found, group

    def slices(self, flat: Tensor) -> list[Tensor]:
        """Returns views of a flat tensor, one a tensor of the group and of its shape."""
        sizes = [t.numel() for t in self.tensors]
        return [part.view(t.shape) for part, t in zip(flat.split(sizes), self.tensors, strict=True)]

    def gather_(self, flat: Tensor) -> Tensor:
        """Copies the tensors into a flat one; returns it."""
        return torch.cat([t.reshape(-1).to(flat.dtype) for t in self.tensors], out=flat)

    def scatter_(self, flat: Tensor) -> None:
        """Copies a flat tensor into the tensors, rounded where they are of half precision."""
        torch._foreach_copy_(self.tensors, self.slices(flat))

    @property
    def rounds(self) -> bool:
        """Whether a tensor is of half precision, and so holds the global model rounded."""
        return any(t.dtype != self.weights.dtype for t in self.tensors)

    def rounded(self, flat: Tensor) -> Tensor:
        """Returns a flat tensor as the tensors would hold it."""
        pairs = zip(self.slices(flat), self.tensors, strict=True)
        return torch.cat([part.to(t.dtype).to(flat.dtype).reshape(-1) for part, t in pairs])


def make_groups(
    kind: str, tensors: list[Tensor], touched: Mapping[int, TouchedRows] | None = None, *, on_host: bool = False
) -> list[FlatGroup]:
    """Returns the tensors as groups, one a dtype of their global values.

    Args:
        kind: the first part of the groups' names.
        tensors: detached, each once.
        touched: the sparse parameters whose touched rows are known, by ``id`` of the tensor.
        on_host: the global model is to be in host memory, also where the tensors are on a GPU; nothing is touched then.
    """
    groups = []
    for dtype, members in by_dtype(tensors).items():
        flat = torch.cat([t.reshape(-1).to(dtype) for t in members])
        name = f"{kind}.{str(dtype).removeprefix('torch.')}"
        weights = host_state.to_host(flat) if on_host else flat
        delta = torch.zeros_like(flat) if weights is flat else flat.zero_()
        group = FlatGroup(name=name, tensors=members, weights=weights, delta=delta)
        start = 0
        for index, tensor in enumerate(members):
            if touched and id(tensor) in touched:
                group.row_ranges[index] = RowRange(
                    touched[id(tensor)], tensor, group.weights, group.delta, start
                )
            start += tensor.numel()
        groups.append(group)
    return groups


def by_dtype(tensors: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """The tensors by the dtype of their global values, where there are any."""
    found = {
        dtype: [t for t in tensors if (t.dtype == torch.float64) == (dtype == torch.float64)]
        for dtype in (torch.float32, torch.float64)
    }
    return {dtype: members for dtype, members in found.items() if members}


def kinds(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and kind of tensors by name, as far as merges must know them."""
    wide = (torch.float64, torch.complex128)
    return {
        name: (t.shape, "fp64" if t.dtype in wide else "float" if t.is_floating_point() or t.is_complex() else "integer")
        for name, t in named
    }


def check_same_kinds(what: str, before: Mapping[str, tuple[Any, str]], now: Mapping[str, tuple[Any, str]]) -> None:
    """Checks that a model's tensors are those that it had when merges began, in the same order.

    Args:
        what: what each is.
        before: their :func:`kinds` then.
        now: as they are.

    Raises:
        RuntimeError: naming the first one that is not, and what to do.
    """
    if list(before.items()) == list(now.items()):
        return
    if before == now:
        name = next(name for name, other in zip(now, before, strict=True) if name != other)
        raise RuntimeError(
            f"{what}s of the model are in another order than when merges began, the first is {name}: do not delete and register "
            "them anew, or close the session after that and make a new one"
        )
    name = next((name for name in [*before, *now] if before.get(name) != now.get(name)), "")
    was, became = (
        f"a tensor ({found[name][1]}) of shape {tuple(found[name][0])}" if name in found else "not there"
        for found in (before, now)
    )
    raise RuntimeError(
        f"{what} {name} of the model was {was} when merges began, and is {became} now: run a forward pass in training mode "
        "before the session (or hvd.DistributedOptimizer) is made, if the first one sets its shape; after a later change close "
        "the session and make a new one"
    )


def replace(held: list[list[Tensor]], found: list[list[Tensor]]) -> None:
    """Replaces a model's tensors by those that it has now, which are of the same :func:`kinds`."""
    for tensors, others in zip(held, found, strict=True):
        tensors[:] = others


def fill_deltas(groups: list[FlatGroup], *, verify: bool = False) -> bool:
    """Fills the deltas with tensors minus global model; returns whether they are finite. ``verify``: see
    :meth:`RowRange.compute_delta_`."""
    finite = True
    for group in groups:
        for index, (tensor, weights, delta) in enumerate(
            zip(group.tensors, group.slices(group.weights), group.slices(group.delta), strict=True)
        ):
            if weights.device != delta.device:
                host_state.fill_delta_(tensor, weights, delta)
            elif index in group.row_ranges:
                finite &= group.row_ranges[index].compute_delta_(verify=verify)
            else:
                # Half-precision parameters hold the rounded global model: that is what they started from.
                torch.sub(tensor.to(delta.dtype), weights.to(tensor.dtype).to(delta.dtype), out=delta)
        finite &= all(all_finite(group.delta[part]) for part in group.rest())
    return finite


def load_(group: FlatGroup, indices: Iterable[int]) -> None:
    """Loads the global model into some of a group's tensors."""
    slices = group.slices(group.weights)
    on_host = group.weights.device != group.delta.device
    for index in indices:
        if on_host:
            host_state.load_(group.tensors[index], slices[index])
        else:
            group.tensors[index].copy_(slices[index])


def scale_(group: FlatGroup, factor: float) -> None:
    """Multiplies a group's delta by this rank's weight, or by those of rows or coordinates; 0 gives zeros."""
    # Not delta * 0: NaN times 0 is NaN.
    if not factor:
        group.delta.zero_()
        return
    scale_rest_(group, factor)
    for row_range in group.row_ranges.values():
        row_range.scale_(factor)


def scale_rest_(group: FlatGroup, factor: float) -> None:
    """As :func:`scale_`, outside the row ranges."""
    if not factor or group.factors is None:
        for part in group.rest():
            rest = group.delta[part]
            rest.mul_(factor) if factor else rest.zero_()
        return
    for index, delta in enumerate(group.slices(group.delta)):
        if index not in group.row_ranges:
            delta.mul_(group.factors[index])
