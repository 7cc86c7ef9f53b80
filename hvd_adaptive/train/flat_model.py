"""The global model as flat vectors, and the way of a rank's model to its delta and back.

Memory beyond the model: two copies of its trainable parameters and float buffers, the global model and the delta. The
outer step's velocity is a third, where it is on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hvd_adaptive.core.outer import OuterStep
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
    """

    name: str
    tensors: list[Tensor]
    weights: Tensor
    delta: Tensor
    row_ranges: dict[int, RowRange] = field(default_factory=dict)

    def rest(self) -> list[slice]:
        """The elements outside the row ranges, where there are any, ascending."""
        bounds = [0, *(b for r in self.row_ranges.values() for b in (r.part.start, r.part.stop)), self.delta.numel()]
        return [slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]

    def slices(self, flat: Tensor) -> list[Tensor]:
        sizes = [t.numel() for t in self.tensors]
        return [part.view(t.shape) for part, t in zip(flat.split(sizes), self.tensors, strict=True)]


class FlatModel:
    """A model whose replicas differ between merges and agree after them.

    Trainable parameters take the outer step. Float buffers (BatchNorm's running statistics) take the weighted mean, since a
    momentum could make a variance negative; integer buffers take the maximum. Frozen parameters are broadcast once
    and stay. A tied parameter counts once.

    Construction is COLLECTIVE: all ranks start from rank 0's parameters and buffers.

    Args:
        model: any module; floating-point parameters on one device.
        transport: the world.
        touched: the sparse parameters whose touched rows are known, by ``id`` of the parameter.

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

        floats = [b for b in buffers if b.is_floating_point()]
        self._integers = [b for b in buffers if not b.is_floating_point()]
        marks = {
            id(t): touched[id(p)]
            for p, t in zip((p for p in parameters if p.requires_grad), trainable, strict=True)
            if touched and id(p) in touched
        }
        self.parameter_groups = _group("parameters", trainable, marks)
        self.buffer_groups = _group("buffers", floats)
        self.num_parameters = sum(p.numel() for p in trainable)
        self.payload_bytes = self._dense_bytes = sum(
            g.delta.numel() * g.delta.element_size() for g in self._groups
        )
        self.row_ranges = [r for g in self.parameter_groups for r in g.row_ranges.values()]
        for row_range in self.row_ranges:
            row_range.touched.clear()

    @property
    def _groups(self) -> list[_Group]:
        return [*self.parameter_groups, *self.buffer_groups]

    @torch.no_grad()
    def compute_delta(self, *, verify: bool = False) -> bool:
        """Fills the delta with model minus global model; returns whether it is finite.

        Args:
            verify: look for changes in rows of sparse parameters that no step touched.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
        """
        finite = self.compute_buffer_delta()
        for group in self.parameter_groups:
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

    @torch.no_grad()
    def compute_buffer_delta(self) -> bool:
        """Fills the delta of float buffers; returns whether it is finite. Part of :meth:`compute_delta`.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
        """
        if [p.requires_grad for p in self._model.parameters()] != self._trainable:
            raise RuntimeError(
                "requires_grad of a parameter changed during the session; close it and make a new Session after freezing "
                "or unfreezing, so that the ranks exchange the right parameters"
            )
        for group in self.buffer_groups:
            for tensor, weights, delta in zip(
                group.tensors, group.slices(group.weights), group.slices(group.delta), strict=True
            ):
                torch.sub(tensor.to(delta.dtype), weights.to(tensor.dtype).to(delta.dtype), out=delta)
        return all(all_finite(g.delta) for g in self.buffer_groups)

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
        for group in self.parameter_groups:
            if rows is not None and rows.sparse and group.row_ranges:
                self._sum_rows_(group, weight)
            else:
                self._scale_(group, weight)
                self._transport.allreduce_sum_(group.delta, name=group.name)
        for group in self.parameter_groups:
            if rows is not None and rows.sparse:
                outer.apply_(group.weights, group.delta, group.rest())
                for part in group.row_ranges.values():
                    part.apply_(outer, group.weights, group.delta)
                self._load_(group, [i for i in range(len(group.tensors)) if i not in group.row_ranges])
            else:
                outer.apply_(group.weights, group.delta)
                self._load_(group, range(len(group.tensors)))
        for part in self.row_ranges:
            part.touched.clear()
        self.merge_buffers_(buffer_weight)

    @torch.no_grad()
    def merge_buffers_(self, weight: float) -> None:
        """Merges float buffers by weight and integer ones by maximum. COLLECTIVE; part of :meth:`merge_`."""
        for group in self.buffer_groups:
            self._scale_(group, weight)
            self._transport.allreduce_sum_(group.delta, name=group.name)
            group.weights.add_(group.delta)
            self._load_(group, range(len(group.tensors)))
        if self._integers:
            flat = torch.cat([b.reshape(-1).to(torch.int64) for b in self._integers])
            self._transport.allreduce_max_(flat, name="integer_buffers")
            for buffer, value in zip(
                self._integers, flat.split([b.numel() for b in self._integers]), strict=True
            ):
                buffer.copy_(value.view(buffer.shape))

    @torch.no_grad()
    def restore_(self) -> None:
        """Loads the global model back into the model, undoing local steps."""
        for group in self._groups:
            self._load_(group, range(len(group.tensors)))
        for part in self.row_ranges:
            part.touched.clear()

    @torch.no_grad()
    def load_(self, values: Iterable[Tensor]) -> None:
        """Loads flat values, one tensor a parameter group and of its shape, into the model's parameters."""
        for group, flat in zip(self.parameter_groups, values, strict=True):
            for tensor, value in zip(group.tensors, group.slices(flat), strict=True):
                tensor.copy_(value)

    def _load_(self, group: _Group, indices: Iterable[int]) -> None:
        slices = group.slices(group.weights)
        for index in indices:
            group.tensors[index].copy_(slices[index])

    def _scale_(self, group: _Group, factor: float) -> None:
        # Not delta * 0: NaN times 0 is NaN.
        if not factor:
            group.delta.zero_()
            return
        for part in group.rest():
            group.delta[part].mul_(factor)
        for row_range in group.row_ranges.values():
            row_range.scale_(factor)

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
    for dtype in (torch.float32, torch.float64):
        members = [t for t in tensors if (t.dtype == torch.float64) == (dtype == torch.float64)]
        if members:
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
