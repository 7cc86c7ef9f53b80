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
        if num_peers > 1 and out.is_cuda:
            # A GPU adds in no order that is promised: peers' values lie side by side, and then add up in one launch.
            apart = torch.zeros(num_peers, out.numel(), device=out.device)
            self._add_entries(payload, apart, 1, piece)
            dispatch.cast_decode(apart.view(torch.uint8).view(-1), out, dtype=torch.float32, add=0, num_peers=num_peers)
            return
        if add == 0:
            out.zero_()
        for sent in payload.view(num_peers, -1):
            self._add_entries(sent, out.view(1, -1), -1 if add < 0 else 1, piece)

    def _add_entries(self, payload: Tensor, out: Tensor, sign: int, piece: int | None) -> None:
        """Adds what each peer has sent to its row of ``out``, or subtracts it."""
        num_peers, num = out.shape
        words, numbers = (payload.view(dtype).view(num_peers, -1) for dtype in (torch.int32, torch.float32))
        peers = torch.arange(0, num_peers * num, num, device=out.device)
        at = 0
        for first, num_rows, size in _groups(num, piece):
            num_entries = self.num_entries(size)
            own = slice(at, at + num_rows * 2 * num_entries)
            places, values = (sent[:, own].unflatten(1, (num_rows, 2 * num_entries)) for sent in (words, numbers))
            rows = torch.arange(first, first + num_rows * size, size, device=out.device)
            index = places[..., :num_entries] + (peers[:, None] + rows)[..., None]
            # Places repeat only with value 0, so that the order of additions does not matter.
            out.view(-1).index_add_(0, index.view(-1), values[..., num_entries:].reshape(-1), alpha=sign)
            at = own.stop


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
