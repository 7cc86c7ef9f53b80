"""A model's buffers, merged over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.comm.protocols import Collectives, Pending
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.engine.flat_group import (
    FlatGroup,
    by_dtype,
    check_same_kinds,
    kinds,
    load_,
    make_groups,
    replace,
    scale_,
)

_LOWEST, _HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def split_buffers(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a model's float buffers, complex ones viewed as real, and its integer ones."""
    buffers = [torch.view_as_real(b) if b.is_complex() else b for b in model.buffers()]
    return [b for b in buffers if b.is_floating_point()], [b for b in buffers if not b.is_floating_point()]


class FlatBuffers:
    """A model's buffers, which forward passes change on each rank by itself: float and complex ones meet as a weighted mean,
    since a momentum could make a variance negative; integer ones as their maximum.

    The values themselves are summed, in fp64: where ranks hold the same value, such as a mask's 0 or 1, the mean is that one, bit
    for bit, whatever the buffer held before. For fp64 buffers, where a sum rounds, the ranks' least and greatest values tell.

    Args:
        model: any module; the ranks' buffers are equal now.
        transport: the world.

    Attributes:
        groups: the float buffers, and complex ones as real; their deltas are fp64, and hold values.
        integers: the integer ones.
        payload_bytes: bytes of these values.
    """

    def __init__(self, model: nn.Module, transport: Collectives) -> None:
        self._model = model
        self._transport = transport
        self._kinds = kinds(model.named_buffers())
        floats, self.integers = split_buffers(model)
        self.groups = make_groups("buffers", floats)
        for group in self.groups:
            group.delta = group.delta.double()
        self.payload_bytes = sum(g.delta.numel() * g.delta.element_size() for g in self.groups)
        self._under_way: list[Pending] = []
        self._maxima = torch.empty(0, dtype=torch.int64)
        self._has_bounds = False

    def rebind(self) -> None:
        """Takes the model's buffers anew: a forward pass may have put others in their place, as ``self.mean = ...`` does.

        Raises:
            RuntimeError: if there are other ones than at construction, or of other shapes; see :func:`check_same_kinds`.
        """
        check_same_kinds("buffer", self._kinds, kinds(self._model.named_buffers()))
        floats, integers = split_buffers(self._model)
        replace([*(group.tensors for group in self.groups), self.integers], [*by_dtype(floats).values(), integers])

    @torch.no_grad()
    def compute_delta(self) -> bool:
        """Fills the deltas with the float buffers; returns whether they are finite, but for what was not after the last merge
        and has not changed, such as an attention mask of -inf."""
        self.rebind()
        finite = True
        for group in self.groups:
            values = group.gather_(group.delta)
            if not all_finite(values):
                unchanged = (values == group.weights) | (values.isnan() & group.weights.isnan())
                finite &= bool((unchanged | values.isfinite()).all())
        return finite

    @torch.no_grad()
    def undo_(self) -> None:
        """Fills the deltas with what the float buffers were after the last merge, for a round in which no rank's are finite."""
        for group in self.groups:
            group.delta.copy_(group.weights)

    @torch.no_grad()
    def start_(self, weight: float | None) -> None:
        """Starts to merge, beside what is exchanged until :meth:`finish_`. COLLECTIVE.

        Args:
            weight: this rank's; they sum to 1 over ranks. 0 contributes nothing, whatever the delta holds. None: the deltas are
                sums already.
        """
        # What was under way when an exchange failed is not waited for.
        self._under_way = []
        parts = [b.reshape(-1).to(torch.int64) for b in self.integers]
        if weight is not None:
            parts += [_bounds(group.delta, counts=weight > 0) for group in self.groups if _may_round(group)]
            for group in self.groups:
                scale_(group, weight)
                self._under_way.append(self._transport.allreduce_sum_async_(group.delta, name=group.name))
        self._has_bounds = weight is not None
        if parts:
            self._maxima = torch.cat(parts)
            self._under_way.append(self._transport.allreduce_max_async_(self._maxima, name="integer_buffers"))

    @torch.no_grad()
    def finish_(self) -> None:
        """Replaces the float buffers by the ranks' weighted mean, and integer ones by their maximum. COLLECTIVE."""
        for pending in self._under_way:
            pending.wait()
        sizes = [b.numel() for b in self.integers]
        bounded = [group for group in self.groups if self._has_bounds and _may_round(group)]
        maxima = self._maxima.split(sizes + [2 * group.delta.numel() for group in bounded]) if sizes or bounded else ()
        for group, bounds in zip(bounded, maxima[len(sizes) :], strict=True):
            greatest, least = bounds.chunk(2)
            same = greatest == ~least
            group.delta.copy_(torch.where(same, _ordered(greatest).view(torch.float64), group.delta))
        for group in self.groups:
            # The bits of a sum of NaNs may follow the order of its parts.
            group.weights.copy_(group.delta.masked_fill_(group.delta.isnan(), torch.nan))
            load_(group, range(len(group.tensors)))
        for buffer, value in zip(self.integers, maxima[: len(sizes)], strict=True):
            buffer.copy_(value.view(buffer.shape))

    def state_dict(self) -> dict[str, Any]:
        """Returns the float buffers, flat, by name of their group, and the integer ones."""
        return {
            "weights": {group.name: group.weights for group in self.groups},
            "integers": list(self.integers),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads buffers of the same shapes, into the model as well. Raises RuntimeError as :meth:`rebind`."""
        self.rebind()
        for group in self.groups:
            group.weights.copy_(state["weights"][group.name])
            load_(group, range(len(group.tensors)))
        for tensor, value in zip(self.integers, state["integers"], strict=True):
            tensor.copy_(value)


def _may_round(group: FlatGroup) -> bool:
    """Whether a sum of weighted equal values may be another value: of fp32 in fp64 it is not."""
    return group.weights.dtype == torch.float64


def _bounds(values: Tensor, *, counts: bool) -> Tensor:
    """Returns integers whose maxima over ranks give the greatest and the least value: shape (2 * num_elements,)."""
    if not counts:
        return torch.full((2 * values.numel(),), _LOWEST, dtype=torch.int64, device=values.device)
    ordered = _ordered(values.view(torch.int64))
    return torch.cat([ordered, ~ordered])


def _ordered(bits: Tensor) -> Tensor:
    """Returns integers in the order of the floats that have these bits; of such integers, the bits."""
    return bits ^ ((bits >> 63) & _HIGHEST)
