"""Gradients that are exchanged together: a flat tensor of dense ones, or a sparse one by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hvd_adaptive.comm.horovod_collectives import gathered_share
from hvd_adaptive.comm.protocols import Group, Pending
from hvd_adaptive.compress.policy import Policy, TensorInfo
from hvd_adaptive.exchange.compressed import CompressedSum
from hvd_adaptive.exchange.pipeline import Task


@dataclass(eq=False)
class Slot:
    """A parameter's place.

    Attributes:
        info: its name and shape.
        parameter: itself.
        passes_left: backward passes until its gradient is complete.
        bucket: where its gradient goes, once that is known.
    """

    info: TensorInfo
    parameter: nn.Parameter
    passes_left: int
    bucket: Bucket = field(init=False)


class Bucket(Protocol):
    """What is exchanged together.

    Attributes:
        slots: the parameters in it.
    """

    slots: list[Slot]

    def prepare(self, total: CompressedSum) -> None:
        """Gets ready for the first exchange. COLLECTIVE."""

    def missing(self) -> list[Slot]:
        """Returns the parameters whose gradient of this step has not come."""

    def take(self, slot: Slot) -> None:
        """Takes a parameter's gradient, whatever it is, or zeros for None."""

    def tasks(self, total: CompressedSum, world: Group, factor: float) -> list[Task]:
        """Returns the exchange of the gradients times the factor."""

    def finish(self, total: CompressedSum) -> int:
        """Makes ready for the next step, and returns the bytes of this rank's gradients in encoded form."""

    def values(self) -> Tensor:
        """Returns the summed values."""


class DenseBucket:
    """See :class:`Bucket`. The parameters' gradients are views of one tensor, those of one codec side by side; copies of their
    views, for parameters that are not contiguous (channels_last), so that a gradient lies in memory as its parameter does.

    Args:
        name: of the exchange, equal on all ranks.
        slots: of one type and device.
        policy: the codecs.
    """

    def __init__(self, name: str, slots: Sequence[Slot], policy: Policy) -> None:
        self._name = name
        codecs = list(dict.fromkeys(policy.codec(slot.info) for slot in slots))
        self.slots = sorted(slots, key=lambda slot: codecs.index(policy.codec(slot.info)))
        first = slots[0].parameter
        sizes = [slot.info.size for slot in self.slots]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        # ``data``: they count the loop's changes in place, not those of the exchange.
        self._views = {
            slot: part.view(slot.info.shape).data for slot, part in zip(self.slots, self._flat.split(sizes), strict=True)
        }
        # A fused optimizer step reads both by one index, and would take other elements without a word.
        self._strided = {
            slot: torch.empty_like(slot.parameter.detach()) for slot in self.slots if not slot.parameter.is_contiguous()
        }
        self._missing = dict.fromkeys(self.slots)
        for slot in self.slots:
            slot.bucket = self

    def prepare(self, total: CompressedSum) -> None:
        total.prepare(self._flat, self._name, [slot.info for slot in self.slots])

    def missing(self) -> list[Slot]:
        return list(self._missing)

    def take(self, slot: Slot) -> None:
        """See :class:`Bucket`.

        Raises:
            RuntimeError: if the gradient is sparse.
        """
        gradient, view = slot.parameter.grad, self._views[slot]
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise RuntimeError(
                f"the gradient of {slot.info.name} is sparse, but was not on any rank in the first step, which decides how "
                "gradients are exchanged: let the first step use that layer on some rank, or give it dense gradients"
            )
        elif gradient is not view:
            view.copy_(gradient)
        slot.parameter.grad = view
        self._missing.pop(slot, None)

    def tasks(self, total: CompressedSum, world: Group, factor: float) -> list[Task]:
        return total.tasks(self._flat, self._name, weight=factor)

    def finish(self, total: CompressedSum) -> int:
        self._missing = dict.fromkeys(self.slots)
        for slot, gradient in self._strided.items():
            slot.parameter.grad = gradient.copy_(self._views[slot])
        return total.payload_bytes(self._name)

    def values(self) -> Tensor:
        return self._flat


class SparseBucket:
    """See :class:`Bucket`. A sparse gradient, whose rows every rank gets and adds up.

    Args:
        name: of the exchange, equal on all ranks.
        slot: of the parameter.
        sparse_dim: number of sparse dimensions.
    """

    def __init__(self, name: str, slot: Slot, sparse_dim: int) -> None:
        self._name = name
        self.slots = [slot]
        self._sparse_dim = sparse_dim
        self._is_missing = True
        self._payload_bytes = 0
        slot.bucket = self

    def prepare(self, total: CompressedSum) -> None:
        pass

    def missing(self) -> list[Slot]:
        return self.slots if self._is_missing else []

    def take(self, slot: Slot) -> None:
        parameter = slot.parameter
        if parameter.grad is None:
            empty = parameter.new_zeros((self._sparse_dim, 0), dtype=torch.int64)
            values = parameter.new_zeros((0, *parameter.shape[self._sparse_dim :]))
            parameter.grad = torch.sparse_coo_tensor(empty, values, parameter.shape, check_invariants=False)
        elif not parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_sparse(self._sparse_dim)
        self._is_missing = False

    def tasks(self, total: CompressedSum, world: Group, factor: float) -> list[Task]:
        return [self._sum(world, factor)]

    def finish(self, total: CompressedSum) -> int:
        self._is_missing = True
        return self._payload_bytes

    def values(self) -> Tensor:
        gradient = self.slots[0].parameter.grad
        assert gradient is not None
        return gradient._values()

    def _sum(self, world: Group, factor: float) -> Task:
        parameter = self.slots[0].parameter
        assert parameter.grad is not None
        gradient = parameter.grad.coalesce()
        values = gradient.values() if factor == 1.0 else gradient.values() * factor
        payload = _pack(gradient.indices(), values)
        self._payload_bytes = payload.numel()
        blocks = yield from self._gather(world, payload, gradient.sparse_dim(), values)
        indices, values = _unpack(blocks, gradient.indices(), values)
        total = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        parameter.grad = total.coalesce()

    def _gather(
        self, world: Group, payload: Tensor, sparse_dim: int, values: Tensor
    ) -> Generator[Pending | None, Any, Sequence[Tensor]]:
        """Returns the payloads of all ranks: as a rule from one gather. More than it can take goes in parts.

        No rank knows the others' sizes before. The first part says them, so that all ranks know how many parts follow.
        """
        share = gathered_share(world.world_size)
        received = yield world.allgather_bytes_async(payload[:share], receive_bytes=None, name=self._name)
        sizes: list[int] = []
        start = 0
        while start < received.numel():
            sizes.append(_payload_bytes(int(received[start : start + 8].view(torch.int64)), sparse_dim, values))
            start += min(sizes[-1], share)
        parts = [received.split([min(size, share) for size in sizes])]
        for start in range(share, max(sizes), share):
            lengths = [min(max(size - start, 0), share) for size in sizes]
            received = yield world.allgather_bytes_async(
                payload[start : start + share], receive_bytes=lengths, name=f"{self._name}.part{len(parts)}"
            )
            parts.append(received.split(lengths))
        return parts[0] if len(parts) == 1 else [torch.cat(of_rank) for of_rank in zip(*parts, strict=True)]


def _pack(indices: Tensor, values: Tensor) -> Tensor:
    """Number of entries, indices and values as bytes; each part a multiple of 8 bytes."""
    # An argument of a kernel, no copy.
    count = torch.full((1,), values.shape[0], dtype=torch.int64, device=indices.device)
    raw = values.contiguous().view(-1).view(torch.uint8)
    padding = raw.new_zeros(-raw.numel() % 8)
    return torch.cat([count.view(torch.uint8), indices.contiguous().view(-1).view(torch.uint8), raw, padding])


def _row_bytes(values: Tensor) -> int:
    return values.element_size() * math.prod(values.shape[1:])


def _payload_bytes(count: int, sparse_dim: int, values: Tensor) -> int:
    """What `_pack` makes of so many entries with values like these."""
    content = 8 + 8 * count * sparse_dim + _row_bytes(values) * count
    return content + -content % 8


def _unpack(payloads: Sequence[Tensor], indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' entries, in rank order, of the types and inner shapes of this rank's."""
    row_bytes, sparse_dim = _row_bytes(values), indices.shape[0]
    all_indices, all_values = [], []
    for payload in payloads:
        # The padding is shorter than an entry.
        count = (payload.numel() - 8) // (8 * sparse_dim + row_bytes)
        middle = 8 + 8 * count * sparse_dim
        all_indices.append(payload[8:middle].view(torch.int64).view(sparse_dim, count))
        all_values.append(payload[middle : middle + row_bytes * count].view(values.dtype).view(count, *values.shape[1:]))
    return torch.cat(all_indices, dim=1), torch.cat(all_values)


def fill_buckets(slots: Sequence[Slot], bucket_elements: int) -> list[list[Slot]]:
    """Cuts parameters into buckets of one type and device each, in their order.

    Args:
        slots: the parameters.
        bucket_elements: a bucket is closed when it has as many.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    buckets: list[list[Slot]] = []
    for slot in slots:
        key = (slot.parameter.dtype, slot.parameter.device)
        bucket = open_buckets.get(key, [])
        if bucket and sum(other.info.size for other in bucket) + slot.info.size > bucket_elements:
            buckets.append(open_buckets.pop(key))
            bucket = []
        open_buckets[key] = [*bucket, slot]
    return list(itertools.chain(buckets, open_buckets.values()))
