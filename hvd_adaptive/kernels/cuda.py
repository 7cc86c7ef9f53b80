"""The max-min code for CUDA tensors, in Triton: the same bits as the torch reference. Imported only where they are met.

One program a bucket, whose values are rows of eight. Multiplication and addition are not fused (``enable_fp_fusion``), and
divisions are rounded to nearest. TRITON_INTERPRET=1 runs these kernels on CPU tensors, for tests.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvd_adaptive.kernels.reference import SMALLEST_UNIT


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _encode_kernel(
    values: Any, meta: Any, packed: Any, num: Any, key0: Any, key1: Any, smallest_unit: Any,
    BUCKET: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, RANDOM: tl.constexpr,
) -> None:  # fmt: skip
    bucket = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, 8)
    inside = row[:, None] * 8 + column[None, :]
    place = bucket * BUCKET + inside
    valid = (inside < BUCKET) & (place < num)
    x = tl.load(values + place, mask=valid, other=0.0)
    infinity = float("inf")
    low = tl.min(tl.min(tl.where(valid, x, infinity), axis=1), axis=0)
    high = tl.max(tl.max(tl.where(valid, x, -infinity), axis=1), axis=0)
    low = tl.where(low == 0.0, 0.0, low)
    span = high - low
    num_broken = tl.sum(tl.sum(tl.where(tl.abs(x) < infinity, 0, 1), axis=1), axis=0)
    broken = (num_broken > 0) | (span == infinity)
    top: tl.constexpr = 2**BITS - 1
    spread = (span > 0.0) & (broken == 0)
    unit = tl.where(spread, tl.maximum(tl.div_rn(span, top * 1.0), smallest_unit), 0.0)
    inverse = tl.where(spread, tl.div_rn(1.0, tl.where(spread, unit, 1.0)), 0.0)
    scaled = (x - low) * inverse
    if RANDOM:
        h = place.to(tl.uint32) ^ key0.to(tl.uint32)
        h = ((h ^ (h >> 16)) * 0x7FEB352D).to(tl.uint32) ^ key1.to(tl.uint32)
        h = ((h ^ (h >> 15)).to(tl.int64) * 0x846CA68B).to(tl.uint32)
        h = h ^ (h >> 16)
        rounded = scaled + (h >> 8).to(tl.float32) * 5.9604644775390625e-08
    else:
        rounded = scaled + 0.5
    codes = tl.minimum(tl.where(valid & (broken == 0), rounded, 0.0).to(tl.int32), top).to(tl.int64)
    words = tl.sum(codes << (column * BITS)[None, :].to(tl.int64), axis=1)
    first = bucket * BUCKET + row * 8
    target = first[:, None] // 8 * BITS + column[None, :]
    stored = (column < BITS)[None, :] & ((row * 8 < BUCKET) & (first < num))[:, None]
    tl.store(packed + target, ((words[:, None] >> (column * 8)[None, :].to(tl.int64)) & 255).to(tl.uint8), mask=stored)
    missing = float("nan")
    tl.store(meta + 2 * bucket, tl.where(broken, missing, unit))
    tl.store(meta + 2 * bucket + 1, tl.where(broken, missing, low))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _decode_kernel(
    meta: Any, packed: Any, out: Any, num: Any,
    BUCKET: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
) -> None:  # fmt: skip
    bucket = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, 8)
    first = bucket * BUCKET + row * 8
    source = first[:, None] // 8 * BITS + column[None, :]
    there = (column < BITS)[None, :] & ((row * 8 < BUCKET) & (first < num))[:, None]
    loaded = tl.load(packed + source, mask=there, other=0).to(tl.int64)
    words = tl.sum(loaded << (column * 8)[None, :].to(tl.int64), axis=1)
    codes = (words[:, None] >> (column * BITS)[None, :].to(tl.int64)) & (2**BITS - 1)
    unit, low = tl.load(meta + 2 * bucket), tl.load(meta + 2 * bucket + 1)
    value = codes.to(tl.float32) * unit + low
    inside = row[:, None] * 8 + column[None, :]
    place = bucket * BUCKET + inside
    valid = (inside < BUCKET) & (place < num)
    if ADD > 0:
        value = tl.load(out + place, mask=valid, other=0.0) + value
    elif ADD < 0:
        value = tl.load(out + place, mask=valid, other=0.0) - value
    tl.store(out + place, value, mask=valid)


def maxmin_encode(values: Tensor, payload: Tensor, bits: int, bucket: int, key: int | None) -> None:
    """Writes the max-min code of ``values``; see :func:`hvd_adaptive.kernels.reference.maxmin_encode`."""
    num, num_buckets = values.numel(), -(-values.numel() // bucket)
    if not num:
        return
    meta = payload[: 8 * num_buckets].view(torch.float32)
    packed = payload[8 * num_buckets :]
    packed[bits * -(-num // 8) :] = 0
    first, second = (key or 0) & 0xFFFFFFFF, (key or 0) >> 32
    with _device_of(values):
        _encode_kernel[(num_buckets,)](
            values, meta, packed, num, _signed(first), _signed(second), SMALLEST_UNIT,
            BUCKET=bucket, BITS=bits, ROWS=_rows(bucket), RANDOM=key is not None, enable_fp_fusion=False,
        )  # fmt: skip


def maxmin_decode(payload: Tensor, out: Tensor, bits: int, bucket: int, add: int) -> None:
    """Decodes a max-min payload; see :func:`hvd_adaptive.kernels.reference.maxmin_decode`."""
    num, num_buckets = out.numel(), -(-out.numel() // bucket)
    if not num:
        return
    meta = payload[: 8 * num_buckets].view(torch.float32)
    with _device_of(out):
        _decode_kernel[(num_buckets,)](
            meta, payload[8 * num_buckets :], out, num,
            BUCKET=bucket, BITS=bits, ROWS=_rows(bucket), ADD=add, enable_fp_fusion=False,
        )  # fmt: skip


def _rows(bucket: int) -> int:
    return int(triton.next_power_of_2(bucket // 8))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
