"""Top-k: the largest values and their places (arXiv 1704.05021, 1809.07599). Biased: use it with error feedback."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.compress.kernels import dispatch
from hvd_adaptive.compress.kernels.reference import with_residual

_NUM_SAMPLES = 65536
_MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TopK(ValueCodec):
    """The ceil(fraction x num_elements) entries of largest magnitude: their places, int32, ascending, then their values, fp32.

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
        return f"topk:{self.fraction}" + (",sampled" if self.sampled else "")

    @property
    def granularity(self) -> int:
        return 1

    def num_entries(self, num_elements: int) -> int:
        """Returns how many of that many values are sent."""
        return min(num_elements, math.ceil(self.fraction * num_elements))

    def payload_bytes(self, num_elements: int) -> int:
        return 8 * self.num_entries(num_elements)

    def _encode(
        self, values: Tensor, payload: Tensor, key: int, residual: Tensor | None, weight: float, piece: int | None
    ) -> None:
        values, at = with_residual(values, residual, weight), 0
        for first, num_rows, size in _groups(values.numel(), piece):
            num_bytes = num_rows * self.payload_bytes(size)
            rows = values[first : first + num_rows * size].view(num_rows, size)
            self._select(rows, payload[at : at + num_bytes].view(num_rows, -1), take=residual is not None)
            at += num_bytes

    def _select(self, values: Tensor, payload: Tensor, *, take: bool) -> None:
        """Writes each row's largest values and their places; with ``take`` they become 0, as a residual keeps nothing of them."""
        num_entries, num_elements = payload.shape[1] // 8, values.shape[1]
        sampled = self.sampled and num_elements > _NUM_SAMPLES
        if sampled:
            sample = values[:, :: num_elements // _NUM_SAMPLES].abs()
            threshold = sample.topk(max(1, round(self.fraction * sample.shape[1]))).values[:, -1]
        elif values.is_cuda:
            threshold = values.abs().topk(num_entries).values[:, -1]
        else:
            # One sort of what is sent is less than passes over all values, on one core.
            both = payload.view(torch.int32)[:, :num_entries], payload.view(torch.float32)[:, num_entries:]
            for row, places, entries in zip(values, *both, strict=True):
                found = row.abs().topk(num_entries, sorted=False).indices.sort().values
                places.copy_(found)
                entries.copy_(row[found])
                if take:
                    row[found] -= entries
            return
        dispatch.select_large(values, threshold.contiguous(), payload, sampled=sampled, take=take)

    def _decode(self, payload: Tensor, out: Tensor, add: int, num_peers: int, piece: int | None) -> None:
        dispatch.decode_large(payload, out, self.num_entries, add=add, num_peers=num_peers, piece=piece)


def _groups(num_elements: int, piece: int | None) -> list[tuple[int, int, int]]:
    """Returns the first place, the number and the size of the whole pieces, and of the shorter one at the end.

    Raises:
        ValueError: for pieces of 2^31 values or more.
    """
    size = min(piece or num_elements, num_elements)
    if size > _MAX_ELEMENTS:
        raise ValueError(f"topk takes up to {_MAX_ELEMENTS} values at once, got {size}")
    whole = num_elements // size * size
    return [(0, num_elements // size, size), *([(whole, 1, num_elements - whole)] if whole < num_elements else [])]
