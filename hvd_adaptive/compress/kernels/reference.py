"""Codes of equally spaced levels in plain torch operations: the definition that the fast kernels are tested against.

A bucket of values x becomes codes floor((x - low) * (1 / unit) + r), of at least 0 and at most 2^bits - 1, with r = 0.5 for
nearest rounding, or uniform in [0, 1) for stochastic rounding, and decodes to code * unit + low. Every operation is rounded to
fp32 by itself: no fused multiply-add anywhere, so that all devices decode the same bits.

    max-min    low = min, unit = (max - min) / (2^bits - 1): CGX, arXiv 2111.08617
    normal     the codes by unit = spread * root mean square, low = -unit * (2^bits - 1) / 2; then the unit with which they lose
               least, so that no code loses more than all: 2 sum(x k) / sum(k^2) of k = 2 code - (2^bits - 1)

    payload    (unit, low) of each bucket, fp32; then the codes: 8 fill ``bits`` bytes, little-endian

The last bucket may be shorter. Payloads are padded with zeros to a multiple of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Below the smallest normal number 1 / unit would overflow, and a unit would be rounded by a large part of itself.
SMALLEST_UNIT = 2.0**-126
# From here on the levels of a normal code may be too far from a value for fp32.
MOST_SPAN = 2.0**118

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def mix_key(*parts: int) -> int:
    """Returns a 64-bit key for random numbers from integers such as seed, step, rank and place (splitmix64)."""
    key = 0
    for part in parts:
        key = (key + (part & 0xFFFFFFFFFFFFFFFF) + _GOLDEN) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key


def uniform(num: int, key: int, device: torch.device | str = "cpu", *, first: int = 0) -> Tensor:
    """Returns random numbers in [0, 1), multiples of 2^-24, fp32, shape (num,): a hash of key and position, from ``first`` on."""
    position = torch.arange(first, first + num, dtype=torch.int64, device=device)
    bits = (position & _MASK) ^ (key & _MASK)
    bits = ((bits ^ bits >> 16) * 0x7FEB352D & _MASK) ^ (key >> 32)
    bits = (bits ^ bits >> 15) * 0x846CA68B & _MASK
    bits = bits ^ bits >> 16
    return (bits >> 8).to(torch.float32) * 2.0**-24


def levels_bytes(num_elements: int, bits: int, bucket: int) -> int:
    """Returns the size of a payload, a multiple of 4."""
    num_buckets = -(-num_elements // bucket)
    return -(-(8 * num_buckets + bits * -(-num_elements // 8)) // 4) * 4


def cast_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """Returns the size of a payload of numbers of a type, a multiple of 4."""
    return -(-num_elements * dtype.itemsize // 4) * 4


def cast_encode(
    values: Tensor, payload: Tensor, dtype: torch.dtype,
    residual: Tensor | None = None, weight: float = 1.0, piece: int | None = None,
) -> None:  # fmt: skip
    """Writes ``values``, times a weight, into ``payload`` as numbers of a type; see `levels_encode` for the arguments."""
    values = with_residual(values, residual, weight)
    for own, span in each_piece(payload, values.numel(), piece, lambda num: cast_bytes(num, dtype)):
        numbers, num = own.view(dtype), span.stop - span.start
        numbers[:num].copy_(values[span])
        numbers[num:] = 0
        if residual is not None:
            _store(numbers[:num], residual[span], -1)


def cast_decode(
    payload: Tensor, out: Tensor, dtype: torch.dtype, add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Reads payloads of numbers into ``out``; see `levels_decode`."""
    for own, part, sign in each_payload(payload, out, add, num_peers, piece, lambda num: cast_bytes(num, dtype)):
        _store(own.view(dtype)[: part.numel()], part, sign)


def levels_encode(
    values: Tensor, payload: Tensor, bits: int, bucket: int, key: int | None, spread: float | None = None,
    residual: Tensor | None = None, weight: float = 1.0, piece: int | None = None,
) -> None:  # fmt: skip
    """Writes the code of ``values``, times a weight, into ``payload``.

    A bucket with a value that is not finite, or whose levels overflow fp32, decodes to NaN as a whole.

    Args:
        values: fp32, contiguous, shape (num_elements,).
        payload: uint8, contiguous: a payload of levels_bytes for each piece, one after the other.
        bits: of a code, 1 to 8.
        bucket: values that share a unit; a multiple of 8.
        key: of the random numbers, which go by the place among all values; None rounds to the nearest.
        spread: distance of two levels, in root mean squares of the bucket; None: the levels are from its minimum to its maximum.
        residual: fp32, of the values' shape: is added to the weighted values, and then holds what the code has lost.
        weight: rounded to fp32; the products are rounded to fp32 as well.
        piece: values that each payload holds, but for the last one; a multiple of the bucket. None: one payload.
    """
    values = with_residual(values, residual, weight)
    for own, span in each_piece(payload, values.numel(), piece, lambda num: levels_bytes(num, bits, bucket)):
        _levels_encode(values[span], own, bits, bucket, key, spread, span.start)
        if residual is not None:
            _levels_decode(own, residual[span], bits, bucket, -1)


def _levels_encode(
    values: Tensor, payload: Tensor, bits: int, bucket: int, key: int | None, spread: float | None, first: int
) -> None:
    num, num_buckets, top = values.numel(), -(-values.numel() // bucket), 2**bits - 1
    payload.zero_()
    # Repeating the last value changes neither minimum nor maximum of the last bucket.
    padded = torch.cat([values, values[-1:].expand(num_buckets * bucket - num)]).view(num_buckets, bucket)
    low = padded.amin(1) + 0.0  # -0.0 becomes 0.0, whichever of the two was found
    span = padded.amax(1) - low
    if spread is not None:
        squares = torch.cat([values, values.new_zeros(num_buckets * bucket - num)]).view(num_buckets, bucket).double().square()
        counts = torch.full((num_buckets,), bucket, dtype=torch.float64, device=values.device)
        counts[-1] = num - (num_buckets - 1) * bucket
        span = (torch.sqrt(squares.sum(1) / counts) * (spread * top)).to(torch.float32)
    unit = torch.where(span > 0, (span / top).clamp(min=SMALLEST_UNIT), torch.zeros_like(span))
    if spread is not None:
        low = unit * (-0.5 * top) + 0.0
    inverse = torch.where(span > 0, 1.0 / unit, torch.zeros_like(unit))
    broken = ~torch.isfinite(span) if spread is None else ~(span < MOST_SPAN)
    unit[broken] = low[broken] = float("nan")
    inverse[broken] = 0.0
    scaled = (padded - low.nan_to_num(0.0)[:, None]) * inverse[:, None]
    noise = 0.5 if key is None else uniform(padded.numel(), key, values.device, first=first).view_as(padded)
    codes = (scaled + noise).nan_to_num(0.0, 0.0, 0.0).floor().clamp(0, top)
    if spread is not None:
        inside = (torch.arange(padded.numel(), device=values.device) < num).view_as(padded)
        places = (2 * codes.double() - top) * inside
        fitted = 2 * (padded.double() * places).sum(1) / places.square().sum(1)
        unit = torch.where(span > 0, fitted.to(torch.float32).clamp(min=SMALLEST_UNIT), unit)
        low = unit * (-0.5 * top) + 0.0
        unit[broken] = low[broken] = float("nan")
    meta = torch.stack([unit, low], dim=1).reshape(-1)
    payload[: 8 * num_buckets].view(torch.float32).copy_(meta)
    codes = codes.reshape(-1)[:num].to(torch.int64)
    codes = torch.cat([codes, codes.new_zeros(-num % 8)]).view(-1, 8)
    words = (codes << torch.arange(0, 8 * bits, bits, device=values.device)).sum(1)
    shifts = torch.arange(0, 8 * bits, 8, device=values.device)
    packed = (words[:, None] >> shifts & 0xFF).to(torch.uint8).view(-1)
    payload[8 * num_buckets : 8 * num_buckets + packed.numel()].copy_(packed)


def levels_decode(
    payload: Tensor, out: Tensor, bits: int, bucket: int, add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Decodes payloads into ``out``: those of several peers are added up in their order.

    Args:
        payload: uint8, as `levels_encode` wrote it for as many values as ``out`` has; one peer's after the other's.
        out: fp32, contiguous, shape (num_elements,).
        bits: as in the encoding.
        bucket: as in the encoding.
        add: 0 replaces ``out``, 1 adds to it, -1 subtracts from it; 0 for several peers.
        num_peers: peers that have sent payloads of one size.
        piece: values that each payload of a peer holds, but for the last one; a multiple of the bucket. None: one payload.
    """
    for own, part, sign in each_payload(payload, out, add, num_peers, piece, lambda num: levels_bytes(num, bits, bucket)):
        _levels_decode(own, part, bits, bucket, sign)


def _levels_decode(payload: Tensor, out: Tensor, bits: int, bucket: int, add: int) -> None:
    num, num_buckets = out.numel(), -(-out.numel() // bucket)
    if not num:
        return
    meta = payload[: 8 * num_buckets].view(torch.float32).view(num_buckets, 2)
    packed = payload[8 * num_buckets : 8 * num_buckets + bits * -(-num // 8)].view(-1, bits).to(torch.int64)
    shifts = torch.arange(0, 8 * bits, 8, device=out.device)
    words = (packed << shifts).sum(1)
    codes = words[:, None] >> torch.arange(0, 8 * bits, bits, device=out.device) & (2**bits - 1)
    units, lows = (column.repeat_interleave(bucket)[:num] for column in meta.unbind(1))
    _store(codes.view(-1)[:num].to(torch.float32) * units + lows, out, add)


def sum_of_squares(values: Tensor) -> Tensor:
    """Returns the sum of squares in fp64, shape (): finite where all of fp32 or less are finite. In no order that is promised."""
    return values.detach().double().square().sum()


def select_large(
    values: Tensor, threshold: Tensor, payload: Tensor, *, sampled: bool, take: bool
) -> None:
    """Writes places and values of each row's largest values, in the order of their places, and zeros where there are too few.

    Args:
        values: fp32, contiguous, shape (num_rows, num_elements), num_elements < 2^31.
        threshold: fp32, contiguous, shape (num_rows,): the smallest magnitude that may be taken. NaN, which counts as the
            largest, is always taken.
        payload: uint8, contiguous, shape (num_rows, 8 x num_entries): of each row the places, int32, then the values, fp32.
        sampled: of more values than there is room for, those at the front are taken; zeros are not. Else those above the
            threshold come first, and of those at it the ones at the front.
        take: what is written becomes 0 in ``values`` (NaN where it is not finite).
    """
    num_entries = payload.shape[1] // 8
    places, entries = payload.view(torch.int32)[:, :num_entries], payload.view(torch.float32)[:, num_entries:]
    for row in zip(values, threshold, places, entries, strict=True):
        _select_large(*row, sampled=sampled, take=take)


def _select_large(
    values: Tensor, threshold: Tensor, places: Tensor, entries: Tensor, *, sampled: bool, take: bool
) -> None:
    magnitude, least = values.abs(), threshold.nan_to_num(nan=float("inf"), posinf=float("inf"))
    above = ~(magnitude < least) & (magnitude != 0) if sampled else ~(magnitude <= least)
    if not sampled:
        level = magnitude == least
        above = above | (level & (level.cumsum(0) <= places.numel() - above.sum()))
    found = above.nonzero().view(-1)[: places.numel()]
    places.zero_()
    entries.zero_()
    places[: found.numel()].copy_(found)
    entries[: found.numel()].copy_(values[found])
    if take:
        values[found] -= values[found]


def decode_large(
    payload: Tensor, out: Tensor, num_entries: Callable[[int], int], add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Reads what `select_large` wrote into ``out``, with zeros for all that was not sent.

    Args:
        payload: uint8, contiguous: one peer's payloads after the other's.
        out: fp32, contiguous, shape (num_elements,).
        num_entries: of a payload, from the number of values that it is for.
        add: as for `levels_decode`, and so are ``num_peers`` and ``piece``.
        num_peers: in order.
        piece: values of a payload.
    """
    if add == 0:
        out.zero_()
    size = min(piece or out.numel(), out.numel())
    num_whole = out.numel() // size if size else 0
    whole, whole_bytes = num_whole * size, num_whole * 8 * num_entries(size)
    for sent in payload.view(num_peers, -1):
        _add_rows(sent[:whole_bytes], out[:whole], num_whole, -1 if add < 0 else 1)
        _add_rows(sent[whole_bytes:], out[whole:], 1, -1 if add < 0 else 1)


def _add_rows(payload: Tensor, out: Tensor, num_rows: int, sign: int) -> None:
    # All pieces of a size by one addition: a piece may hold few entries.
    if out.numel():
        places, entries = (payload.view(dtype).view(num_rows, 2, -1) for dtype in (torch.int32, torch.float32))
        starts = torch.arange(0, out.numel(), out.numel() // num_rows, device=out.device)
        # Places repeat only with value 0, so that the order of additions does not matter.
        out.index_add_(0, (places[:, 0] + starts[:, None]).view(-1), entries[:, 1].reshape(-1), alpha=sign)


def with_residual(values: Tensor, residual: Tensor | None, weight: float) -> Tensor:
    """Returns the weighted values, or the residual to which they have been added."""
    weighted = values if weight == 1.0 else values * weight
    return weighted if residual is None else residual.add_(weighted)


def each_payload(
    payload: Tensor, out: Tensor, add: int, num_peers: int, piece: int | None, num_bytes: Callable[[int], int]
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Returns every payload, the part of ``out`` that it is for, and how it is added there; see `levels_decode`.

    Args:
        payload: as for `levels_decode`, and so are ``out``, ``add``, ``num_peers`` and ``piece``.
        out: the values.
        add: for the first peer.
        num_peers: in order.
        piece: values of a payload.
        num_bytes: the size of a payload of that many values.
    """
    for peer, sent in enumerate(payload.view(num_peers, -1)):
        for own, span in each_piece(sent, out.numel(), piece, num_bytes):
            yield own, out[span], add if peer == 0 else 1


def each_piece(
    payload: Tensor, num_elements: int, piece: int | None, num_bytes: Callable[[int], int]
) -> Iterator[tuple[Tensor, slice]]:
    """Returns every payload of one peer, and the values that it is for; nothing for 0 values.

    Args:
        payload: one peer's payloads, one after the other.
        num_elements: values of all payloads.
        piece: values of a payload, but for the last one; None: one payload.
        num_bytes: the size of a payload of that many values.
    """
    size = piece or max(1, num_elements)
    spans = [slice(start, min(start + size, num_elements)) for start in range(0, num_elements, size)]
    return zip(payload.split([num_bytes(span.stop - span.start) for span in spans]), spans, strict=True)


def _store(values: Tensor, out: Tensor, add: int) -> None:
    if add == 0:
        out.copy_(values)
    elif add > 0:
        out.add_(values)
    else:
        out.sub_(values)
