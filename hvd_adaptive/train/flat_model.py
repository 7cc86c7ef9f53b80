"""The global model as flat vectors, and the way of a rank's model to its delta and back.

Memory beyond the model: two copies of its trainable parameters and float buffers, the global model and the delta. The
outer step's velocity is a third, where it is on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.core.outer import OuterStep
from hvd_adaptive.transport.base import Transport


@dataclass(slots=True)
class _Group:
    """Tensors of one kind, flattened one after the other.

    Attributes:
        name: names the exchange, the same on every rank.
        tensors: the model's own tensors, in the model's order, each once.
        weights: the flat global model, fp64 for fp64 tensors, else fp32, shape (num_elements,).
        delta: same shape and dtype.
    """

    name: str
    tensors: list[Tensor]
    weights: Tensor
    delta: Tensor

    def slices(self, flat: Tensor) -> list[Tensor]:
        sizes = [t.numel() for t in self.tensors]
        return [part.view(t.shape) for part, t in zip(flat.split(sizes), self.tensors, strict=True)]


class FlatModel:
    """A model whose replicas differ between merges and agree after them.

    Trainable parameters take the outer step. Float buffers (BatchNorm's running statistics) take the weighted mean, since a
    momentum could make a variance negative; integer buffers take the maximum. Frozen parameters are broadcast once
    and stay. A tied parameter counts once.

    Construction is COLLECTIVE: all ranks start from rank 0's parameters and buffers.

    Attributes:
        device: where the model is.

    Args:
        model: any module; floating-point parameters on one device.
        transport: the world.

    Raises:
        ValueError: for a model without trainable parameters, with complex ones, or on several devices.
    """

    def __init__(self, model: nn.Module, transport: Transport) -> None:
        self._model = model
        self._transport = transport
        parameters = list(model.parameters())
        self._trainable = [p.requires_grad for p in parameters]
        trainable = [p.detach() for p in parameters if p.requires_grad]
        buffers = list(model.buffers())
        if not trainable:
            raise ValueError("model must have a parameter with requires_grad=True, got none")
        devices = {t.device for t in (*parameters, *buffers)}
        if len(devices) > 1:
            raise ValueError(f"model must be on one device, got {', '.join(sorted(map(str, devices)))}")
        if any(t.is_complex() for t in (*parameters, *buffers)):
            raise ValueError(
                "model must have real parameters and buffers: view complex ones as real (torch.view_as_real)"
            )
        transport.broadcast_([*(p.detach() for p in parameters), *buffers])
        self.device = trainable[0].device

        floats = [b for b in buffers if b.is_floating_point()]
        self._integers = [b for b in buffers if not b.is_floating_point()]
        self.parameter_groups = _group("parameters", trainable)
        self.buffer_groups = _group("buffers", floats)
        self.num_parameters = sum(p.numel() for p in trainable)
        self.payload_bytes = sum(g.delta.numel() * g.delta.element_size() for g in self._groups)

    @property
    def _groups(self) -> list[_Group]:
        return [*self.parameter_groups, *self.buffer_groups]

    @torch.no_grad()
    def compute_delta(self) -> bool:
        """Fills the delta with model minus global model; returns whether it is finite.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
        """
        if [p.requires_grad for p in self._model.parameters()] != self._trainable:
            raise RuntimeError(
                "requires_grad of a parameter changed during the session; close it and make a new Session after freezing "
                "or unfreezing, so that the ranks exchange the right parameters"
            )
        finite = True
        for group in self._groups:
            for tensor, weights, delta in zip(
                group.tensors, group.slices(group.weights), group.slices(group.delta), strict=True
            ):
                # Half-precision parameters hold the rounded global model: that is what they started from.
                torch.sub(tensor.to(delta.dtype), weights.to(tensor.dtype).to(delta.dtype), out=delta)
            # A finite sum of squares proves all elements finite; an overflow does not prove the contrary.
            if group.delta.numel() and not torch.isfinite(torch.dot(group.delta, group.delta)):
                finite = finite and bool(torch.isfinite(group.delta).all())
        return finite

    @torch.no_grad()
    def norm_per_parameter(self) -> float:
        """Returns the L2 norm of this rank's trainable parameters over their number."""
        squares = sum(float(t.double().square().sum()) for g in self.parameter_groups for t in g.tensors)
        return float(squares) ** 0.5 / self.num_parameters

    @torch.no_grad()
    def merge_(self, outer: OuterStep, *, weight: float, buffer_weight: float) -> None:
        """Sums the ranks' weighted deltas, moves the global model, and loads it into the model. COLLECTIVE.

        Args:
            outer: the outer step, for trainable parameters.
            weight: this rank's merge weight; 0 contributes zeros, whatever the delta holds.
            buffer_weight: this rank's weight for float buffers; those sum to 1 over ranks.
        """
        for groups, factor in ((self.parameter_groups, weight), (self.buffer_groups, buffer_weight)):
            for group in groups:
                # Not delta * 0: NaN times 0 is NaN.
                group.delta.mul_(factor) if factor else group.delta.zero_()
                self._transport.allreduce_sum_(group.delta, name=group.name)
        for group in self.parameter_groups:
            outer.apply_(group.weights, group.delta)
        for group in self.buffer_groups:
            group.weights.add_(group.delta)
        for group in self._groups:
            for tensor, weights in zip(group.tensors, group.slices(group.weights), strict=True):
                tensor.copy_(weights)
        if self._integers:
            flat = torch.cat([b.reshape(-1).to(torch.int64) for b in self._integers])
            self._transport.allreduce_max_(flat, name="integer_buffers")
            for buffer, value in zip(
                self._integers, flat.split([b.numel() for b in self._integers]), strict=True
            ):
                buffer.copy_(value.view(buffer.shape))

    def state_dict(self) -> dict[str, Any]:
        """Returns the global model: flat weights by name of their group, integer buffers, frozen parameters."""
        return {
            "weights": {group.name: group.weights for group in self._groups},
            "integers": list(self._integers),
            "frozen": [p.detach() for p in self._model.parameters() if not p.requires_grad],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a global model of the same shapes, into the model as well."""
        for group in self._groups:
            group.weights.copy_(state["weights"][group.name])
        frozen = [p for p in self._model.parameters() if not p.requires_grad]
        for own, values in ((self._integers, state["integers"]), (frozen, state["frozen"])):
            for tensor, value in zip(own, values, strict=True):
                tensor.copy_(value)
        self.restore_()

    @torch.no_grad()
    def restore_(self) -> None:
        """Loads the global model back into the model, undoing local steps."""
        for group in self._groups:
            for tensor, weights in zip(group.tensors, group.slices(group.weights), strict=True):
                tensor.copy_(weights)


@torch.no_grad()
def model_hash(model: nn.Module, *, buffers: bool = True) -> str:
    """Returns the SHA-256 of all parameters' bytes, and all buffers' unless told otherwise, in the model's order."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *(model.buffers() if buffers else ())):
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _group(kind: str, tensors: list[Tensor]) -> list[_Group]:
    groups = []
    for dtype in (torch.float32, torch.float64):
        members = [t for t in tensors if (t.dtype == torch.float64) == (dtype == torch.float64)]
        if members:
            flat = torch.cat([t.reshape(-1).to(dtype) for t in members])
            name = f"{kind}.{str(dtype).removeprefix('torch.')}"
            groups.append(_Group(name=name, tensors=members, weights=flat, delta=torch.zeros_like(flat)))
    return groups
