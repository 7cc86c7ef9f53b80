"""The global model as flat vectors, and the way of a rank's model to its delta and back.

Memory beyond the model: two copies of its trainable parameters and float buffers, the global model and the delta. The
outer step's velocity is a third, where it is on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.compress.policy import TensorInfo
from hvd_adaptive.core.outer import OuterStep
from hvd_adaptive.exchange.compressed import CompressedSum
from hvd_adaptive.train.row_merge import RowMerge, RowRange, all_finite
from hvd_adaptive.train.touched_rows import TouchedRows
from hvd_adaptive.transport.base import Transport


@dataclass(slots=True)
class _Group:
    """Tensors of one kind, flattened one after the other.

    Attributes:
        name: names the exchange, the same on every rank.
        tensors: the model's own tensors, in the model's order, each once.
        weights: the flat global model, fp64 for fp64 tensors, else fp32, shape (num_elements,).
        delta: same shape and dtype.
        row_ranges: the sparse parameters among ``tensors``, by position there.
        infos: names and shapes of parameters.
    """

    name: str
    tensors: list[Tensor]
    weights: Tensor
    delta: Tensor
    row_ranges: dict[int, RowRange] = field(default_factory=dict)
    infos: list[TensorInfo] = field(default_factory=list)

    def rest(self) -> list[slice]:
        """The elements outside the row ranges, where there are any, ascending."""
        bounds = [0, *(b for r in self.row_ranges.values() for b in (r.part.start, r.part.stop)), self.delta.numel()]
        return [slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]

    def slices(self, flat: Tensor) -> list[Tensor]:
        sizes = [t.numel() for t in self.tensors]
        return [part.view(t.shape) for part, t in zip(flat.split(sizes), self.tensors, strict=True)]


class FlatBuffers:
    """A model's buffers, which forward passes change on each rank by itself: float ones meet as a weighted mean, since a
    momentum could make a variance negative; integer ones as their maximum.

    Args:
        model: any module; the ranks' buffers are equal now.
        transport: the world.

    Attributes:
        groups: the float buffers.
        integers: the integer ones.
        payload_bytes: bytes of the deltas.
    """

    def __init__(self, model: nn.Module, transport: Transport) -> None:
        self._transport = transport
        buffers = list(model.buffers())
        self.groups = _group("buffers", [b for b in buffers if b.is_floating_point()])
        self.integers = [b for b in buffers if not b.is_floating_point()]
        self.payload_bytes = sum(g.delta.numel() * g.delta.element_size() for g in self.groups)

    @torch.no_grad()
    def compute_delta(self) -> bool:
        """Fills the delta with the float buffers minus what they were after the last merge; returns whether it is finite."""
        return _fill_deltas(self.groups)

    @torch.no_grad()
    def merge_(self, weight: float) -> None:
        """Replaces the buffers by the ranks' weighted mean or maximum. COLLECTIVE.

        Args:
            weight: this rank's; they sum to 1 over ranks. 0 contributes zeros, whatever the delta holds.
        """
        for group in self.groups:
            _scale_(group, weight)
            self._transport.allreduce_sum_(group.delta, name=group.name)
        self.apply_()

    @torch.no_grad()
    def apply_(self) -> None:
        """Moves the float buffers by the summed deltas; integer ones take the ranks' maximum. COLLECTIVE."""
        for group in self.groups:
            group.weights.add_(group.delta)
            _load_(group, range(len(group.tensors)))
        if self.integers:
            flat = torch.cat([b.reshape(-1).to(torch.int64) for b in self.integers])
            self._transport.allreduce_max_(flat, name="integer_buffers")
            for buffer, value in zip(
                self.integers, flat.split([b.numel() for b in self.integers]), strict=True
            ):
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
            _load_(group, range(len(group.tensors)))
        for tensor, value in zip(self.integers, state["integers"], strict=True):
            tensor.copy_(value)


class FlatModel:
    """A model whose replicas differ between merges and agree after them.

    Trainable parameters take the outer step, buffers (BatchNorm's running statistics) do as :class:`FlatBuffers` says. Frozen
    parameters are broadcast once and stay. A tied parameter counts once.

    Construction is COLLECTIVE: all ranks start from rank 0's parameters and buffers.

    Args:
        model: any module; floating-point parameters on one device.
        transport: the world.
        touched: the sparse parameters whose touched rows are known, by ``id`` of the parameter.

    Attributes:
        device: where the model is.
        compressed: sums the parameters' deltas in encoded form, where it is set.

    Raises:
        ValueError: for a model without trainable parameters, with complex ones, or on several devices.
    """

    def __init__(
        self, model: nn.Module, transport: Transport, touched: Mapping[int, TouchedRows] | None = None
    ) -> None:
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

        marks = {
            id(t): touched[id(p)]
            for p, t in zip((p for p in parameters if p.requires_grad), trainable, strict=True)
            if touched and id(p) in touched
        }
        self.parameter_groups = _group("parameters", trainable, marks)
        named = [name for name, p in model.named_parameters() if p.requires_grad]
        names = {id(t): name for name, t in zip(named, trainable, strict=True)}
        for group in self.parameter_groups:
            group.infos = [TensorInfo(names[id(t)], tuple(t.shape)) for t in group.tensors]
        self.compressed: CompressedSum | None = None
        self.buffers = FlatBuffers(model, transport)
        self.num_parameters = sum(p.numel() for p in trainable)
        self.payload_bytes = self._dense_bytes = sum(
            g.delta.numel() * g.delta.element_size() for g in self.groups
        )
        self.row_ranges = [r for g in self.parameter_groups for r in g.row_ranges.values()]
        for row_range in self.row_ranges:
            row_range.touched.clear()

    def rebind(self) -> None:
        """Takes the model's tensors anew, for a loop that may have put other ones of the same shapes in their place.

        Raises:
            RuntimeError: if there are other ones than at construction, or of other shapes.
        """
        self.check_trainable()
        trainable = [p.detach() for p in self._model.parameters() if p.requires_grad]
        buffers = list(self._model.buffers())
        floats, integers = ([b for b in buffers if b.is_floating_point() is kind] for kind in (True, False))
        found = [*_by_dtype(trainable).values(), *_by_dtype(floats).values(), integers]
        held = [*(group.tensors for group in self.groups), self.buffers.integers]
        if [[t.shape for t in tensors] for tensors in found] != [[t.shape for t in tensors] for tensors in held]:
            raise RuntimeError(
                "the model has other parameters or buffers, or of another shape or dtype, than when merges began"
            )
        for tensors, others in zip(held, found, strict=True):
            tensors[:] = others

    @property
    def groups(self) -> list[_Group]:
        """All groups: those of parameters first."""
        return [*self.parameter_groups, *self.buffers.groups]

    @torch.no_grad()
    def compute_delta(self, *, verify: bool = False) -> bool:
        """Fills the delta with model minus global model; returns whether it is finite.

        Args:
            verify: look for changes in rows of sparse parameters that no step touched.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
        """
        self.check_trainable()
        return _fill_deltas(self.groups, verify=verify)

    def check_trainable(self) -> None:
        """Raises RuntimeError if a parameter was frozen or unfrozen since construction."""
        if [p.requires_grad for p in self._model.parameters()] != self._trainable:
            raise RuntimeError(
                "requires_grad of a parameter changed during the session; close it and make a new Session after freezing "
                "or unfreezing, so that the ranks exchange the right parameters"
            )

    @torch.no_grad()
    def norm_per_parameter(self) -> float:
        """Returns the L2 norm of this rank's trainable parameters over their number."""
        squares = sum(float(t.double().square().sum()) for g in self.parameter_groups for t in g.tensors)
        return float(squares) ** 0.5 / self.num_parameters

    @torch.no_grad()
    def merge_(
        self, outer: OuterStep, *, weight: float, buffer_weight: float, rows: RowMerge | None = None
    ) -> None:
        """Sums the ranks' weighted deltas, moves the global model, and loads it into the model. COLLECTIVE.

        Args:
            outer: the outer step, for trainable parameters.
            weight: this rank's merge weight; 0 contributes zeros, whatever the delta holds.
            buffer_weight: this rank's weight for float buffers; those sum to 1 over ranks.
            rows: what the ranks decided about the rows of sparse parameters, after its exchange.
        """
        self.payload_bytes = self._dense_bytes + (rows.message_bytes if rows else 0)
        sparse = rows is not None and rows.sparse
        if self.compressed is not None:
            self.compressed.begin_round()
        for group in self.parameter_groups:
            if sparse and group.row_ranges:
                self._sum_rows_(group, weight)
            else:
                _scale_(group, weight)
                self._sum_(group)
        self.apply_(outer, sparse=sparse)
        self.buffers.merge_(buffer_weight)

    @torch.no_grad()
    def apply_(self, outer: OuterStep, *, sparse: bool = False) -> None:
        """Moves the global parameters by the summed deltas and loads them into the model.

        Args:
            outer: the outer step.
            sparse: whether row ranges hold sums of their union's rows only.
        """
        outer.begin()
        for group in self.parameter_groups:
            if sparse:
                outer.apply_(group.weights, group.delta, group.rest())
                for part in group.row_ranges.values():
                    part.apply_(outer, group.weights, group.delta)
                _load_(group, [i for i in range(len(group.tensors)) if i not in group.row_ranges])
            else:
                outer.apply_(group.weights, group.delta)
                _load_(group, range(len(group.tensors)))
        for part in self.row_ranges:
            part.touched.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the global model: flat weights by name of their group, buffers, frozen parameters."""
        return {
            "weights": {group.name: group.weights for group in self.parameter_groups},
            "buffers": self.buffers.state_dict(),
            "frozen": [p.detach() for p in self._model.parameters() if not p.requires_grad],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a global model of the same shapes, into the model as well."""
        for group in self.parameter_groups:
            group.weights.copy_(state["weights"][group.name])
        self.buffers.load_state_dict(state["buffers"])
        frozen = [p for p in self._model.parameters() if not p.requires_grad]
        for tensor, value in zip(frozen, state["frozen"], strict=True):
            tensor.copy_(value)
        self.restore_()

    @torch.no_grad()
    def restore_(self) -> None:
        """Loads the global model back into the model, undoing local steps."""
        for group in self.groups:
            _load_(group, range(len(group.tensors)))
        for part in self.row_ranges:
            part.touched.clear()

    @torch.no_grad()
    def load_(self, values: Iterable[Tensor]) -> None:
        """Loads flat values, one tensor a parameter group and of its shape, into the model's parameters."""
        for group, flat in zip(self.parameter_groups, values, strict=True):
            for tensor, value in zip(group.tensors, group.slices(flat), strict=True):
                tensor.copy_(value)

    def _sum_(self, group: _Group) -> None:
        if self.compressed is None:
            self._transport.allreduce_sum_(group.delta, name=group.name)
        else:
            self.payload_bytes += self.compressed.sum_(group.delta, group.name, group.infos) - group.delta.nbytes

    def _sum_rows_(self, group: _Group, factor: float) -> None:
        for part in group.rest():
            rest = group.delta[part]
            rest.mul_(factor) if factor else rest.zero_()
            self._transport.allreduce_sum_(rest, name=f"{group.name}.{part.start}")
        for row_range in group.row_ranges.values():
            packed = row_range.pack_(factor)
            self.payload_bytes -= (row_range.num_rows * row_range.row_bytes) - packed.nbytes
            if packed.numel():
                self._transport.allreduce_sum_(packed, name=f"{group.name}.rows.{row_range.part.start}")
            row_range.unpack_()


@torch.no_grad()
def model_hash(model: nn.Module, *, buffers: bool = True) -> str:
    """Returns the SHA-256 of all parameters' bytes, and all buffers' unless told otherwise, in the model's order."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *(model.buffers() if buffers else ())):
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _group(kind: str, tensors: list[Tensor], touched: Mapping[int, TouchedRows] | None = None) -> list[_Group]:
    groups = []
    for dtype, members in _by_dtype(tensors).items():
        flat = torch.cat([t.reshape(-1).to(dtype) for t in members])
        name = f"{kind}.{str(dtype).removeprefix('torch.')}"
        group = _Group(name=name, tensors=members, weights=flat, delta=torch.zeros_like(flat))
        start = 0
        for index, tensor in enumerate(members):
            if touched and id(tensor) in touched:
                group.row_ranges[index] = RowRange(
                    touched[id(tensor)], tensor, group.weights, group.delta, start
                )
            start += tensor.numel()
        groups.append(group)
    return groups


def _by_dtype(tensors: list[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """The tensors by the dtype of their global values, where there are any."""
    found = {
        dtype: [t for t in tensors if (t.dtype == torch.float64) == (dtype == torch.float64)]
        for dtype in (torch.float32, torch.float64)
    }
    return {dtype: members for dtype, members in found.items() if members}


def _fill_deltas(groups: list[_Group], *, verify: bool = False) -> bool:
    finite = True
    for group in groups:
        for index, (tensor, weights, delta) in enumerate(
            zip(group.tensors, group.slices(group.weights), group.slices(group.delta), strict=True)
        ):
            if index in group.row_ranges:
                finite &= group.row_ranges[index].compute_delta_(verify=verify)
            else:
                # Half-precision parameters hold the rounded global model: that is what they started from.
                torch.sub(tensor.to(delta.dtype), weights.to(tensor.dtype).to(delta.dtype), out=delta)
        finite &= all(all_finite(group.delta[part]) for part in group.rest())
    return finite


def _load_(group: _Group, indices: Iterable[int]) -> None:
    slices = group.slices(group.weights)
    for index in indices:
        group.tensors[index].copy_(slices[index])


def _scale_(group: _Group, factor: float) -> None:
    # Not delta * 0: NaN times 0 is NaN.
    if not factor:
        group.delta.zero_()
        return
    for part in group.rest():
        group.delta[part].mul_(factor)
    for row_range in group.row_ranges.values():
        row_range.scale_(factor)
