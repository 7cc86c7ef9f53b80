"""The global model as flat vectors, and the way of a rank's model to its delta and back.

Memory beyond the model: two copies of its trainable parameters and float buffers, the global model and the delta. The
outer step's velocity is a third, where it is on. With ``outer_state="host"`` only the delta is on the GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.comm.island_world import ShardWorld
from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.compress.kernels.dispatch import sum_of_squares
from hvd_adaptive.compress.policy import TensorInfo
from hvd_adaptive.engine.device_copies import host_bytes, memory_of
from hvd_adaptive.engine.flat_buffers import FlatBuffers
from hvd_adaptive.engine.flat_group import (
    FlatGroup,
    by_dtype,
    check_same_kinds,
    fill_deltas,
    kinds,
    load_,
    make_groups,
    replace,
    scale_,
    scale_rest_,
)
from hvd_adaptive.engine.merge_rule import MergeRule
from hvd_adaptive.engine.row_merge import RowMerge
from hvd_adaptive.engine.shards import is_sharded, local, reshard
from hvd_adaptive.engine.touched_rows import TouchedRows
from hvd_adaptive.exchange.compressed import CompressedSum


class FlatModel:
    """A model whose replicas differ between merges and agree after them.

    Trainable parameters take the outer step, buffers (BatchNorm's running statistics) do as :class:`FlatBuffers` says. Frozen
    parameters are broadcast once and stay. A tied parameter counts once. Of a model in shards, this is of the rank's own ones.

    Construction is COLLECTIVE: all ranks start from rank 0's parameters and buffers, or from the first island's shards.

    Args:
        model: any module; floating-point parameters on one device.
        transport: the world; a :class:`ShardWorld` for a model in shards.
        touched: the sparse parameters whose touched rows are known, by ``id`` of the parameter.
        on_host: the global parameters are in host memory, and come to the model's device piece by piece.

    Attributes:
        device: where the model is.
        state_device: where the global parameters are.
        compressed: sums the parameters' deltas in encoded form, where it is set.
        rule: weighs rows or coordinates, where it is set.

    Raises:
        ValueError: for a model without trainable parameters, with complex parameters, or on several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Collectives,
        touched: Mapping[int, TouchedRows] | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        self._model = model
        self._transport = transport
        check_kinds(model)
        whole: Any = transport.whole if isinstance(transport, ShardWorld) else transport
        reshard(model)
        self._kinds = kinds(model.named_parameters())
        parameters = list(model.parameters())
        self._trainable = [p.requires_grad for p in parameters]
        trainable = [local(p) for p in parameters if p.requires_grad]
        buffers = list(model.buffers())
        devices = {t.device for t in (*parameters, *buffers)}
        if len(devices) > 1:
            raise ValueError(f"model must be on one device, got {', '.join(sorted(map(str, devices)))}")
        whole.broadcast_([*(p.detach() for p in parameters if not is_sharded(p)), *buffers])
        if transport is not whole:
            transport.broadcast_([local(p) for p in parameters if is_sharded(p)])
        self.device = trainable[0].device
        self._watch([p for p in parameters if p.requires_grad])

        marks = {
            id(t): touched[id(p)]
            for p, t in zip((p for p in parameters if p.requires_grad), trainable, strict=True)
            if touched and id(p) in touched
        }
        self.parameter_groups = make_groups("parameters", trainable, marks, on_host=on_host)
        self.state_device = torch.device("cpu") if on_host else self.device
        named = [name for name, p in model.named_parameters() if p.requires_grad]
        names = {id(t): name for name, t in zip(named, trainable, strict=True)}
        places = {id(t): place for place, t in enumerate(trainable)}
        for group in self.parameter_groups:
            group.infos = [TensorInfo(names[id(t)], tuple(t.shape)) for t in group.tensors]
            group.positions = [places[id(t)] for t in group.tensors]
        self.compressed: CompressedSum | None = None
        self.rule: MergeRule | None = None
        self.buffers = FlatBuffers(model, whole)
        self.num_parameters = sum(p.numel() for p in trainable)
        self.payload_bytes = self._dense_bytes = sum(
            g.delta.numel() * g.delta.element_size() for g in self.groups
        )
        self.row_ranges = [r for g in self.parameter_groups for r in g.row_ranges.values()]
        for row_range in self.row_ranges:
            row_range.touched.clear()
        self.mark()

    def rebind(self) -> None:
        """Takes the trainable parameters anew: a loop may have put others in their place, as by ``p.data = p.data.clamp(...)``.

        Raises:
            RuntimeError: if there are other ones than at construction, or of other shapes; see :func:`check_same_kinds`.
        """
        check_trainable(self._model, self._trainable)
        reshard(self._model)
        check_same_kinds("parameter", self._kinds, kinds(self._model.named_parameters()))
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        tensors = by_dtype([local(p) for p in parameters])
        replace([group.tensors for group in self.parameter_groups], list(tensors.values()))
        for group in self.parameter_groups:
            for index, row_range in group.row_ranges.items():
                row_range.rebind(group.tensors[index])
        self._watch(parameters)

    def follow(self) -> bool:
        """As :meth:`rebind`, if a parameter has other memory than at the last one; returns whether one has. Quick."""
        is_other = [p.data_ptr() for p in self._watched] != self._addresses
        if is_other:
            self.rebind()
        return is_other

    def mark(self) -> None:
        """Takes note that the parameters are as a merge leaves them."""
        self._left = [(p.data_ptr(), p._version) for p in self._watched]

    def was_written(self) -> bool:
        """Returns whether a parameter was written to since :meth:`mark`, as far as PyTorch counts it; False for a sharded model,
        whose parameters come and go. Quick."""
        if any(is_sharded(p) for p in self._model.parameters()):
            return False
        return self._left != [(p.data_ptr(), p._version) for p in self._watched]

    def _watch(self, parameters: list[nn.Parameter]) -> None:
        # A sharded one's memory is another one while a pass has it whole.
        self._watched = [p for p in parameters if not is_sharded(p)]
        self._addresses = [p.data_ptr() for p in self._watched]

    @property
    def groups(self) -> list[FlatGroup]:
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
        self.rebind()
        finite = fill_deltas(self.parameter_groups, verify=verify)
        return self.buffers.compute_delta() and finite

    @torch.no_grad()
    def norm_per_parameter(self) -> float:
        """Returns the L2 norm of this rank's trainable parameters over their number."""
        squares = [sum_of_squares(t) for g in self.parameter_groups for t in g.tensors]
        return float(sum(torch.stack(squares).tolist())) ** 0.5 / self.num_parameters

    @torch.no_grad()
    def delta_norm(self) -> float:
        """Returns the L2 norm of the deltas of all parameters, without row ranges."""
        return float(sum(sum_of_squares(group.delta) for group in self.parameter_groups)) ** 0.5

    def weigh_(self, weights: NDArray[np.float64]) -> None:
        """Finds this rank's weight in each row or coordinate for the merge that follows, where :attr:`rule` is set. COLLECTIVE.

        Args:
            weights: the ranks' scalar weights, shape (world_size,), which sum to 1. A rank with 0 takes no part.
        """
        if self.rule is None:
            return
        ranges = {
            group.positions[index]: part for group in self.parameter_groups for index, part in group.row_ranges.items()
        }
        unions = {place: part.union for place, part in ranges.items()}
        factors = self.rule.exchange(self._transport, weights=weights, unions=unions, coded=self.compressed is not None)
        for place, part in ranges.items():
            part.factor = factors[place].view(part.num_rows, -1).to(part.dtype)
        for group in self.parameter_groups:
            group.factors = [factors[place].to(group.delta.dtype) for place in group.positions]

    @torch.no_grad()
    def merge_(
        self, outer: OuterStep, *, weight: float, buffer_weight: float, rows: RowMerge | None = None
    ) -> None:
        """Sums the ranks' weighted deltas, moves the global model, and loads it into the model. COLLECTIVE.

        Args:
            outer: the outer step, for trainable parameters.
            weight: this rank's merge weight; 0 contributes zeros, whatever the delta holds. Weights by row or coordinate
                (:meth:`weigh_`) take its place.
            buffer_weight: this rank's weight for float buffers; those sum to 1 over ranks.
            rows: what the ranks decided about the rows of sparse parameters, after its exchange.
        """
        self.payload_bytes = self._dense_bytes + sum(part.message_bytes for part in (rows, self.rule) if part is not None)
        sparse = rows is not None and rows.sparse
        if self.compressed is not None:
            self.compressed.begin_round()
        # First, so that Horovod hears of both at once: each time that it looks takes milliseconds.
        self.buffers.start_(buffer_weight)
        for group in self.parameter_groups:
            if sparse and group.row_ranges:
                self._sum_rows_(group, weight)
            else:
                self._sum_(group, weight)
        self.apply_(outer, sparse=sparse)
        self.buffers.finish_()

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
                load_(group, [i for i in range(len(group.tensors)) if i not in group.row_ranges])
            else:
                outer.apply_(group.weights, group.delta)
                load_(group, range(len(group.tensors)))
        for part in self.row_ranges:
            part.touched.clear()
        self.mark()

    def state_dict(self) -> dict[str, Any]:
        """Returns the global model: flat weights by name of their group, buffers, frozen parameters."""
        return {
            "weights": {group.name: group.weights for group in self.parameter_groups},
            "buffers": self.buffers.state_dict(),
            "frozen": self._frozen(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a global model of the same shapes, into the model as well.

        Raises:
            RuntimeError: if the model has other parameters or buffers than at construction, or of other shapes.
        """
        # Other memory than at the last merge, as by `p.data = ...` or memory_format=channels_last, would keep its values.
        self.rebind()
        for group in self.parameter_groups:
            group.weights.copy_(state["weights"][group.name])
        self.buffers.load_state_dict(state["buffers"])
        for tensor, value in zip(self._frozen(), state["frozen"], strict=True):
            tensor.copy_(value)
        self.restore_()

    def _frozen(self) -> list[Tensor]:
        reshard(self._model)
        return [local(p) for p in self._model.parameters() if not p.requires_grad]

    @torch.no_grad()
    def restore_(self) -> None:
        """Loads the global model back into the model, undoing local steps."""
        reshard(self._model)
        for group in self.groups:
            load_(group, range(len(group.tensors)))
        for part in self.row_ranges:
            part.touched.clear()
        self.mark()

    @torch.no_grad()
    def load_(self, values: Iterable[Tensor]) -> None:
        """Loads flat values, one tensor a parameter group and of its shape, into the model's parameters."""
        for group, flat in zip(self.parameter_groups, values, strict=True):
            for tensor, value in zip(group.tensors, group.slices(flat), strict=True):
                tensor.copy_(value)

    def _sum_(self, group: FlatGroup, weight: float) -> None:
        if self.compressed is not None and weight and group.factors is None:
            # Encoding multiplies on its way.
            encoded = self.compressed.sum_(group.delta, group.name, group.infos, weight=weight)
            self.payload_bytes += encoded - group.delta.nbytes
            return
        scale_(group, weight)
        if self.compressed is None:
            self._transport.allreduce_sum_(group.delta, name=group.name)
        else:
            self.payload_bytes += self.compressed.sum_(group.delta, group.name, group.infos) - group.delta.nbytes

    def _sum_rows_(self, group: FlatGroup, factor: float) -> None:
        scale_rest_(group, factor)
        for part in group.rest():
            rest = group.delta[part]
            self._transport.allreduce_sum_(rest, name=f"{group.name}.{part.start}")
        for row_range in group.row_ranges.values():
            packed = row_range.pack_(factor)
            self.payload_bytes -= (row_range.num_rows * row_range.row_bytes) - packed.nbytes
            if packed.numel():
                self._transport.allreduce_sum_(packed, name=f"{group.name}.rows.{row_range.part.start}")
            row_range.unpack_()


@torch.no_grad()
def model_hash(model: nn.Module, *, buffers: bool = True) -> str:
    """Returns the SHA-256 of all parameters' bytes, and all buffers' unless told otherwise, in the model's order; of a model in
    shards, of this rank's."""
    digest = hashlib.sha256()
    reshard(model)
    tensors = (*model.parameters(), *(model.buffers() if buffers else ()))
    for part in host_bytes([local(tensor) for tensor in tensors]):
        digest.update(memory_of(part))
    return digest.hexdigest()


def has_batch_norm(model: nn.Module) -> bool:
    """Returns whether a layer normalizes by the statistics of its batch, which must not be a single sample then."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


def check_kinds(model: nn.Module) -> None:
    """Raises ValueError for a model without trainable parameters, or with complex parameters; complex buffers are none."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model must have a parameter with requires_grad=True, got none")
    if found := [name for name, p in model.named_parameters() if p.is_complex()]:
        raise ValueError(
            f"model must have real parameters, got {len(found)} complex, the first is {found[0]}: keep it as "
            "nn.Parameter(torch.view_as_real(w)), and call torch.view_as_complex in forward"
        )


def check_trainable(model: nn.Module, trainable: list[bool]) -> None:
    """Raises RuntimeError unless the model has the parameters that it had, frozen or not as then.

    Args:
        model: it.
        trainable: ``requires_grad`` of each parameter then.
    """
    if [p.requires_grad for p in model.parameters()] != trainable:
        raise RuntimeError(
            "parameters of the model were added, removed, frozen or unfrozen during the session: close it and make a new Session "
            "after such a change, so that the ranks exchange the right ones"
        )
