"""Which parts of a flat tensor are exchanged together: those of one codec. Pure functions, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_adaptive.compress.codec import SUMMABLE, Codec
from hvd_adaptive.compress.policy import Policy, TensorInfo
from hvd_adaptive.exchange.plan import Span

# Parts smaller than this travel together: collectives of their own would cost more than copying them.
PACKED_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors of one codec.

    Attributes:
        codec: theirs.
        spans: where they lie, ascending; neighbours are one span.
        shapes: of the tensors, in order.
        dtype: of the flat tensor.
    """

    codec: Codec
    spans: tuple[Span, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(span.size for span in self.spans)

    @property
    def payload_bytes(self) -> int:
        """Size of one encoded copy."""
        if self.codec.exact and self.dtype in SUMMABLE:
            return self.size * self.dtype.itemsize
        return self.codec.tensor_bytes(self.shapes)


def lay_out(
    policy: Policy, tensors: Sequence[TensorInfo], dtype: torch.dtype, *, packed_elements: int, most_elements: int
) -> list[Run]:
    """Cuts a flat tensor into runs, in the order of their first tensors.

    Args:
        policy: the codec of each tensor.
        tensors: what is in the flat tensor, in order.
        dtype: of the flat tensor.
        packed_elements: runs of one codec that lie apart and are smaller than this are put together,
        most_elements: up to so many elements.
    """
    runs: list[Run] = []
    start = 0
    for tensor in tensors:
        codec, span = policy.codec(tensor), Span(start, start + tensor.size)
        start = span.stop
        if not span.size:
            continue
        if runs and runs[-1].codec == codec:
            last = runs.pop()
            span = Span(last.spans[0].start, span.stop)
            runs.append(Run(codec, (span,), (*last.shapes, tensor.shape), dtype))
        else:
            runs.append(Run(codec, (span,), (tensor.shape,), dtype))
    packed: list[Run] = []
    places: dict[Codec, int] = {}
    for run in runs:
        place = places.get(run.codec)
        if run.size >= packed_elements:
            packed.append(run)
        elif place is not None and packed[place].size + run.size <= most_elements:
            before = packed[place]
            packed[place] = Run(run.codec, before.spans + run.spans, before.shapes + run.shapes, dtype)
        else:
            places[run.codec] = len(packed)
            packed.append(run)
    return packed
