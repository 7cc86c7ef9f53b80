"""The max-min and sign codes in plain torch operations: the definition that the fast kernels are tested against.

A bucket of values x becomes unit = (max - min) / (2^bits - 1) and codes floor((x - min) * (1 / unit) + r), with r = 0.5 for
nearest rounding, or uniform in [0, 1) for stochastic rounding, and decodes to code * unit + min (CGX, arXiv 2111.08617). Every
operation is rounded to fp32 by itself: no fused multiply-add anywhere, so that all devices decode the same bits.

    payload of max-min    (unit, min) of each bucket, fp32; then the codes: 8 fill ``bits`` bytes, little-endian
    payload of sign       mean |x| of each bucket, fp32; then one bit a value, 1 for a value >= 0

The last bucket may be shorter. Payloads are padded with zeros to a multiple of 4 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Below the smallest normal number 1 / unit would overflow, and a unit would be rounded by a large part of itself.
SMALLEST_UNIT = 2.0**-126

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


def uniform(num: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns random numbers in [0, 1), multiples of 2^-24, fp32, shape (num,): a hash of key and position."""
    position = torch.arange(num, dtype=torch.int64, device=device)
    bits = (position & _MASK) ^ (key & _MASK)
    bits = ((bits ^ bits >> 16) * 0x7FEB352D & _MASK) ^ (key >> 32)
    bits = (bits ^ bits >> 15) * 0x846CA68B & _MASK
    bits = bits ^ bits >> 16
    return (bits >> 8).to(torch.float32) * 2.0**-24


def maxmin_bytes(num_elements: int, bits: int, bucket: int) -> int:
    """Returns the size of a max-min payload, a multiple of 4."""
    num_buckets = -(-num_elements // bucket)
    return -(-(8 * num_buckets + bits * -(-num_elements // 8)) // 4) * 4


def sign_bytes(num_elements: int, bucket: int) -> int:
    """Returns the size of a sign payload, a multiple of 4."""
    return 4 * -(-num_elements // bucket) + 4 * -(-num_elements // 32)


def maxmin_encode(values: Tensor, payload: Tensor, bits: int, bucket: int, key: int | None) -> None:
    """Writes the max-min code of ``values`` into ``payload``.

    A bucket with a value that is not finite, or whose range overflows fp32, decodes to NaN as a whole.

    Args:
        values: fp32, contiguous, shape (num_elements,).
        payload: uint8, contiguous, shape (maxmin_bytes(num_elements, bits, bucket),).
        bits: of a code, 1 to 8.
        bucket: values that share a unit; a multiple of 8.
        key: of the random numbers; None rounds to the nearest.
    """
    num, num_buckets = values.numel(), -(-values.numel() // bucket)
    payload.zero_()
    if not num:
        return
    # Repeating the last value changes neither minimum nor maximum of the last bucket.
    padded = torch.cat([values, values[-1:].expand(num_buckets * bucket - num)]).view(num_buckets, bucket)
    low = padded.amin(1) + 0.0  # -0.0 becomes 0.0, whichever of the two was found
    span = padded.amax(1) - low
    unit = torch.where(span > 0, (span / (2**bits - 1)).clamp(min=SMALLEST_UNIT), torch.zeros_like(span))
    inverse = torch.where(span > 0, 1.0 / unit, torch.zeros_like(unit))
    broken = ~torch.isfinite(span)
    unit[broken] = low[broken] = float("nan")
    inverse[broken] = 0.0
    scaled = (padded - low.nan_to_num(0.0)[:, None]) * inverse[:, None]
    noise = 0.5 if key is None else uniform(padded.numel(), key, values.device).view_as(padded)
    codes = (scaled + noise).nan_to_num(0.0, 0.0, 0.0).floor().clamp(max=2**bits - 1)
    meta = torch.stack([unit, low], dim=1).reshape(-1)
    payload[: 8 * num_buckets].view(torch.float32).copy_(meta)
    codes = codes.reshape(-1)[:num].to(torch.int64)
    codes = torch.cat([codes, codes.new_zeros(-num % 8)]).view(-1, 8)
    words = (codes << torch.arange(0, 8 * bits, bits, device=values.device)).sum(1)
    shifts = torch.arange(0, 8 * bits, 8, device=values.device)
    packed = (words[:, None] >> shifts & 0xFF).to(torch.uint8).view(-1)
    payload[8 * num_buckets : 8 * num_buckets + packed.numel()].copy_(packed)


def maxmin_decode(payload: Tensor, out: Tensor, bits: int, bucket: int, add: int) -> None:
    """Decodes a max-min payload into ``out``.

    Args:
        payload: uint8, as `maxmin_encode` wrote it for as many values as ``out`` has.
        out: fp32, contiguous, shape (num_elements,).
        bits: as in the encoding.
        bucket: as in the encoding.
        add: 0 replaces ``out``, 1 adds to it, -1 subtracts from it.
    """
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


def sign_encode(values: Tensor, payload: Tensor, bucket: int) -> None:
    """Writes the sign code of ``values`` into ``payload``; see `maxmin_encode` for shapes.

    A bucket with a value that is not finite decodes to values that are not finite.
    """
    num, num_buckets = values.numel(), -(-values.numel() // bucket)
    payload.zero_()
    if not num:
        return
    padded = torch.cat([values, values.new_zeros(num_buckets * bucket - num)]).view(num_buckets, bucket)
    counts = torch.full((num_buckets,), bucket, dtype=torch.float64, device=values.device)
    counts[-1] = num - (num_buckets - 1) * bucket
    # The fp64 sum of equal fp32 values is exact, so that a constant bucket decodes exactly.
    means = (padded.abs().sum(1, dtype=torch.float64) / counts).to(torch.float32)
    payload[: 4 * num_buckets].view(torch.float32).copy_(means)
    positive = torch.cat([(values >= 0).to(torch.int32), values.new_zeros(-num % 8, dtype=torch.int32)])
    packed = (positive.view(-1, 8) << torch.arange(8, device=values.device, dtype=torch.int32)).sum(1)
    payload[4 * num_buckets : 4 * num_buckets + packed.numel()].copy_(packed.to(torch.uint8))


def sign_decode(payload: Tensor, out: Tensor, bucket: int, add: int) -> None:
    """Decodes a sign payload into ``out``; see `maxmin_decode`."""
    num, num_buckets = out.numel(), -(-out.numel() // bucket)
    if not num:
        return
    means = payload[: 4 * num_buckets].view(torch.float32).repeat_interleave(bucket)[:num]
    packed = payload[4 * num_buckets : 4 * num_buckets + -(-num // 8)]
    positive = (packed[:, None] >> torch.arange(8, device=out.device, dtype=torch.uint8) & 1).view(-1)[:num]
    _store(torch.where(positive.bool(), means, -means), out, add)


def _store(values: Tensor, out: Tensor, add: int) -> None:
    if add == 0:
        out.copy_(values)
    elif add > 0:
        out.add_(values)
    else:
        out.sub_(values)
