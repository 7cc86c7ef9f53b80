"""A model's buffers, merged over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.comm.protocols import Collectives, Pending
from hvd_adaptive.compress.kernels.dispatch import all_finite
from hvd_adaptive.engine.flat_group import by_dtype, fill_deltas, load_, make_groups, replace, scale_


def split_buffers(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a model's float buffers, complex ones viewed as real, and its integer ones."""
    buffers = [torch.view_as_real(b) if b.is_complex() else b for b in model.buffers()]
    return [b for b in buffers if b.is_floating_point()], [b for b in buffers if not b.is_floating_point()]


class FlatBuffers:
    """A model's buffers, which forward passes change on each rank by itself: float and complex ones meet as a weighted mean,
    since a momentum could make a variance negative; integer ones as their maximum.

    Args:
        model: any module; the ranks' buffers are equal now.
        transport: the world.

    Attributes:
        groups: the float buffers, and complex ones as real.
        integers: the integer ones.
        payload_bytes: bytes of the deltas.
    """

    def __init__(self, model: nn.Module, transport: Collectives) -> None:
        self._model = model
        self._transport = transport
        floats, self.integers = split_buffers(model)
        self.groups = make_groups("buffers", floats)
        self.payload_bytes = sum(g.delta.numel() * g.delta.element_size() for g in self.groups)
        self._under_way: list[Pending] = []
        self._maxima = torch.empty(0, dtype=torch.int64)

    def rebind(self) -> None:
        """Takes the model's buffers anew: a forward pass may have put others in their place, as ``self.mean = ...`` does.

        Raises:
            RuntimeError: if there are other ones than at construction, or of other shapes.
        """
        floats, integers = split_buffers(self._model)
        replace([*(group.tensors for group in self.groups), self.integers], [*by_dtype(floats).values(), integers])

    @torch.no_grad()
    def compute_delta(self) -> bool:
        """Fills the delta with the float buffers minus what they were after the last merge; returns whether it is finite."""
        self.rebind()
        if fill_deltas(self.groups):
            return True
        # An attention mask of -inf, minus itself, is NaN: what has not changed adds nothing.
        for group in self.groups:
            values = group.gather_(torch.empty_like(group.weights))
            unchanged = (values == group.weights) | (values.isnan() & group.weights.isnan())
            group.delta.masked_fill_(unchanged, 0.0)
        return all(all_finite(group.delta) for group in self.groups)

    @torch.no_grad()
    def start_(self, weight: float | None) -> None:
        """Starts to merge, beside what is exchanged until :meth:`finish_`. COLLECTIVE.

        Args:
            weight: this rank's; they sum to 1 over ranks. 0 contributes zeros, whatever the delta holds. None: the deltas are
                sums already.
        """
        # What was under way when an exchange failed is not waited for.
        self._under_way = []
        if weight is not None:
            for group in self.groups:
                scale_(group, weight)
                self._under_way.append(self._transport.allreduce_sum_async_(group.delta, name=group.name))
        if self.integers:
            self._maxima = torch.cat([b.reshape(-1).to(torch.int64) for b in self.integers])
            self._under_way.append(self._transport.allreduce_max_async_(self._maxima, name="integer_buffers"))

    @torch.no_grad()
    def finish_(self) -> None:
        """Replaces the float buffers by the ranks' weighted mean, and integer ones by their maximum. COLLECTIVE."""
        for pending in self._under_way:
            pending.wait()
        for group in self.groups:
            group.weights.add_(group.delta)
            load_(group, range(len(group.tensors)))
        if self.integers:
            maxima = self._maxima.split([b.numel() for b in self.integers])
            for buffer, value in zip(self.integers, maxima, strict=True):
                buffer.copy_(value.view(buffer.shape))

    def state_dict(self) -> dict[str, Any]:
        """Returns the float buffers, flat, by name of their group, and the integer ones."""
        return {
            "weights": {group.name: group.weights for group in self.groups},
            "integers": list(self.integers),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads buffers of the same shapes, into the model as well."""
        for group in self.groups:
            group.weights.copy_(state["weights"][group.name])
            load_(group, range(len(group.tensors)))
        for tensor, value in zip(self.integers, state["integers"], strict=True):
            tensor.copy_(value)
