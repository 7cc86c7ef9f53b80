"""Top-k: the largest values and their places (arXiv 1704.05021, 1809.07599). Biased: use it with error feedback."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.compress.kernels import dispatch
from hvd_adaptive.compress.kernels.reference import each_payload, each_piece, with_residual

_NUM_SAMPLES = 65536
_MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TopK(ValueCodec):
    """The ceil(fraction x num_elements) entries of largest magnitude, 8 bytes each (int32 place, fp32 value).

    ``sampled`` takes the threshold from up to 65,536 evenly spaced values instead of sorting all: many times faster on
    large tensors. Where too many values reach that threshold, those at the front are sent; where too few, the rest of
    the payload holds zeros. A value that is not finite counts as the largest.

    Attributes:
        fraction: of the values that are sent, in (0, 1].
        sampled: take the threshold from a sample.

    Raises:
        ValueError: naming the requirement; also for tensors of 2^31 values or more.
    """

    fraction: float = 0.01
    sampled: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"topk: fraction must be in (0, 1], got {self.fraction}")

    @property
    def spec(self) -> str:
        """See :class:`~hvd_adaptive.compress.codec.ValueCodec`."""
        return f"topk:{self.fraction}" + (",sampled" if self.sampled else "")

    @property
    def granularity(self) -> int:
        """See :class:`~hvd_adaptive.compress.codec.ValueCodec`."""
        return 1

    def num_entries(self, num_elements: int) -> int:
        """Returns how many of that many values are sent."""
        return min(num_elements, math.ceil(self.fraction * num_elements))

    def payload_bytes(self, num_elements: int) -> int:
        """See :class:`~hvd_adaptive.compress.codec.ValueCodec`."""
        return 8 * self.num_entries(num_elements)

    def _encode(
        self, values: Tensor, payload: Tensor, key: int, residual: Tensor | None, weight: float, piece: int | None
    ) -> None:
        if min(values.numel(), piece or values.numel()) > _MAX_ELEMENTS:
            raise ValueError(f"topk takes up to {_MAX_ELEMENTS} values at once, got {values.numel()}")
        values = with_residual(values, residual, weight)
        for own, span in each_piece(payload, values.numel(), piece, self.payload_bytes):
            self._select(values[span], own, take=residual is not None)

    def _select(self, values: Tensor, payload: Tensor, *, take: bool) -> None:
        """Writes the largest values and their places; with ``take`` they become 0, which is what the residual keeps of them."""
        num_entries = self.num_entries(values.numel())
        places = payload[: 4 * num_entries].view(torch.int32)
        entries = payload[4 * num_entries :].view(torch.float32)
        sampled = self.sampled and values.numel() > _NUM_SAMPLES
        if sampled:
            sample = values[:: values.numel() // _NUM_SAMPLES].abs()
            threshold = sample.topk(max(1, round(self.fraction * sample.numel()))).values[-1]
        elif values.is_cuda:
            threshold = values.abs().topk(num_entries).values[-1]
        else:
            # One sort of what is sent is less than passes over all values, on one core.
            found = values.abs().topk(num_entries, sorted=False).indices.sort().values
            places.copy_(found)
            entries.copy_(values[found])
            if take:
                values[found] -= entries
            return
        dispatch.select_large(values, threshold, places, entries, sampled=sampled, take=take)

    def _decode(self, payload: Tensor, out: Tensor, add: int, num_peers: int, piece: int | None) -> None:
        for own, part, sign in each_payload(payload, out, add, num_peers, piece, self.payload_bytes):
            self._store(own, part, sign)

    def _store(self, payload: Tensor, out: Tensor, add: int) -> None:
        num_entries = self.num_entries(out.numel())
        places = payload[: 4 * num_entries].view(torch.int32).to(torch.int64)
        values = payload[4 * num_entries :].view(torch.float32)
        if add == 0:
            out.zero_()
        # Places repeat only with value 0, so that the order of additions does not matter.
        out.index_add_(0, places, values if add >= 0 else -values)
