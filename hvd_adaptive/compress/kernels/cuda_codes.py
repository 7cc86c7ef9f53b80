"""Codes of equally spaced levels and plain number formats in Triton: the same bits as the torch reference.

Imported only where CUDA tensors are met.

One program codes one bucket, whose values are rows of eight, ROWS of them at a time: a large bucket is a loop, as registers
would not hold it. An encoder reads its bucket twice, once for its scale and once for its codes; the second time it lies in a
cache. A decoder adds up all peers' payloads in their order.

Arguments have no annotations, since Triton looks their names up on the GPU's side; ``num`` alone has one, which keeps
large counts from being a type of their own. Nothing is specialised on an argument's value or alignment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_adaptive.compress.kernels.reference import MOST_SPAN, SMALLEST_UNIT

_SMALLEST_UNIT = tl.constexpr(SMALLEST_UNIT)
_MOST_SPAN = tl.constexpr(MOST_SPAN)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _weighted(values, residual, place, valid, weight, FEEDBACK: tl.constexpr):
    x = tl.load(values + place, mask=valid, other=0.0) * weight
    if FEEDBACK:
        x = tl.load(residual + place, mask=valid, other=0.0) + x
    return x


@triton.jit
def _store_codes(packed, codes, first, stored, BITS: tl.constexpr):
    # codes: eight a row, zero where there is no value. first: of each row among the piece's values.
    column = tl.arange(0, 8)
    words = tl.sum(codes.to(tl.int64) << (column * BITS)[None, :].to(tl.int64), axis=1)
    target = first[:, None] // 8 * BITS + column[None, :]
    part = (words[:, None] >> (column * 8)[None, :].to(tl.int64)) & 255
    tl.store(packed + target, part.to(tl.uint8), mask=(column < BITS)[None, :] & stored[:, None])


@triton.jit
def _load_codes(packed, first, stored, BITS: tl.constexpr):
    column = tl.arange(0, 8)
    source = first[:, None] // 8 * BITS + column[None, :]
    part = tl.load(packed + source, mask=(column < BITS)[None, :] & stored[:, None], other=0)
    words = tl.sum(part.to(tl.int64) << (column * 8)[None, :].to(tl.int64), axis=1)
    return (words[:, None] >> (column * BITS)[None, :].to(tl.int64)) & (2**BITS - 1)


@triton.jit
def _store_padding(packed, num, BITS: tl.constexpr):
    # Payloads end at a multiple of 4 bytes.
    place = (num + 7) // 8 * BITS + tl.arange(0, 4)
    tl.store(packed + place, tl.zeros_like(place).to(tl.uint8), mask=place < ((num + 7) // 8 * BITS + 3) // 4 * 4)


@triton.jit
def _piece_of(meta, payload, bucket, num, piece, piece_bytes, BUCKET: tl.constexpr):
    # Where a bucket's scale and its piece's codes are, how many values the piece holds, and the bucket's number in it.
    which = bucket * BUCKET // piece
    here = tl.minimum(piece, num - which * piece)
    local = bucket - which * piece // BUCKET
    own_meta = meta + which * piece_bytes // 4 + 2 * local
    return own_meta, payload + which * piece_bytes + 8 * ((here + BUCKET - 1) // BUCKET), here, local


@triton.jit(
    do_not_specialize=["values", "residual", "meta", "payload", "num", "piece", "piece_bytes", "weight", "key0", "key1"]
)
def levels_encode(
    values, residual, meta, payload, num: tl.int64, piece: tl.int64, piece_bytes: tl.int64, weight, key0, key1,
    BUCKET: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, RANDOM: tl.constexpr, SPREAD: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    """One bucket's unit, lowest level and codes, with a SPREAD of the normal code; with FEEDBACK of values plus residual, which
    then holds what the code loses.

    meta and payload are the same bytes: one piece's payload after the other's.
    """
    bucket = tl.program_id(0).to(tl.int64)
    own_meta, packed, here, local = _piece_of(meta, payload, bucket, num, piece, piece_bytes, BUCKET)
    row, column = tl.arange(0, ROWS), tl.arange(0, 8)
    tile = row[:, None] * 8 + column[None, :]
    lows = tl.full((ROWS, 8), _INFINITY, tl.float32)
    highs = tl.full((ROWS, 8), -_INFINITY, tl.float32)
    squares = tl.zeros((ROWS, 8), tl.float64)
    broken_ones = tl.zeros((ROWS, 8), tl.int32)
    for start in range(0, BUCKET, ROWS * 8):
        inside = start + tile
        place = bucket * BUCKET + inside
        valid = (inside < BUCKET) & (place < num)
        x = _weighted(values, residual, place, valid, weight, FEEDBACK)
        if SPREAD > 0:
            squares += tl.where(valid, x, 0.0).to(tl.float64) * x.to(tl.float64)
        else:
            lows = tl.minimum(lows, tl.where(valid, x, _INFINITY))
            highs = tl.maximum(highs, tl.where(valid, x, -_INFINITY))
        broken_ones |= tl.where(tl.abs(x) < _INFINITY, 0, 1)
    top: tl.constexpr = 2**BITS - 1
    if SPREAD > 0:
        count = tl.minimum(here - local * BUCKET, BUCKET).to(tl.float64)
        low, most = 0.0, _MOST_SPAN
        span = (tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / count) * (SPREAD * top)).to(tl.float32)
    else:
        low = tl.min(tl.min(lows, axis=1), axis=0)
        low, most = tl.where(low == 0.0, 0.0, low), _INFINITY  # -0.0 becomes 0.0
        span = tl.max(tl.max(highs, axis=1), axis=0) - low
    broken = (tl.max(tl.max(broken_ones, axis=1), axis=0) > 0) | (span >= most)
    spread = (span > 0.0) & (broken == 0)
    unit = tl.where(spread, tl.maximum(tl.div_rn(span, top * 1.0), _SMALLEST_UNIT), 0.0)
    inverse = tl.where(spread, tl.div_rn(1.0, tl.where(spread, unit, 1.0)), 0.0)
    if SPREAD > 0:
        low = unit * (-0.5 * top)
        low = tl.where(low == 0.0, 0.0, low)
    missing = float("nan")
    kept_unit, kept_low = tl.where(broken, missing, unit), tl.where(broken, missing, low)
    products, norms = tl.zeros((ROWS, 8), tl.float64), tl.zeros((ROWS, 8), tl.float64)
    if local == 0:
        _store_padding(packed, here, BITS)
    for start in range(0, BUCKET, ROWS * 8):
        inside = start + tile
        place = bucket * BUCKET + inside
        valid = (inside < BUCKET) & (place < num)
        x = _weighted(values, residual, place, valid, weight, FEEDBACK)
        scaled = (x - low) * inverse
        if RANDOM:
            h = place.to(tl.uint32) ^ key0.to(tl.uint32)
            h = ((h ^ (h >> 16)) * 0x7FEB352D).to(tl.uint32) ^ key1.to(tl.uint32)
            h = ((h ^ (h >> 15)).to(tl.int64) * 0x846CA68B).to(tl.uint32)
            h = h ^ (h >> 16)
            rounded = scaled + (h >> 8).to(tl.float32) * 5.9604644775390625e-08
        else:
            rounded = scaled + 0.5
        codes = tl.maximum(tl.minimum(tl.where(valid & (broken == 0), rounded, 0.0).to(tl.int32), top), 0)
        if SPREAD > 0:
            steps = tl.where(valid, 2 * codes - top, 0)
            products += tl.where(valid, x, 0.0).to(tl.float64) * steps.to(tl.float64)
            norms += (steps * steps).to(tl.float64)
        elif FEEDBACK:
            tl.store(residual + place, x - (codes.to(tl.float32) * kept_unit + kept_low), mask=valid)
        inside_row = start + row * 8
        first = local * BUCKET + inside_row
        _store_codes(packed, codes, first, (inside_row < BUCKET) & (first < here), BITS)
    if SPREAD > 0:
        fitted = 2.0 * tl.sum(tl.sum(products, axis=1), axis=0) / tl.sum(tl.sum(norms, axis=1), axis=0)
        fitted = tl.where(spread, tl.maximum(fitted.to(tl.float32), _SMALLEST_UNIT), 0.0)
        kept_unit = tl.where(broken, missing, fitted)
        kept_low = tl.where(broken, missing, tl.where(spread, fitted * (-0.5 * top), 0.0))
    tl.store(own_meta, kept_unit)
    tl.store(own_meta + 1, kept_low)
    if SPREAD > 0 and FEEDBACK:
        # Once more, now that the unit is known.
        for start in range(0, BUCKET, ROWS * 8):
            inside = start + tile
            place = bucket * BUCKET + inside
            valid = (inside < BUCKET) & (place < num)
            x = _weighted(values, residual, place, valid, weight, FEEDBACK)
            rounded = (x - low) * inverse + 0.5
            codes = tl.maximum(tl.minimum(tl.where(valid & (broken == 0), rounded, 0.0).to(tl.int32), top), 0)
            tl.store(residual + place, x - (codes.to(tl.float32) * kept_unit + kept_low), mask=valid)


@triton.jit
def _add(value, out, place, valid, ADD: tl.constexpr):
    if ADD > 0:
        value = tl.load(out + place, mask=valid, other=0.0) + value
    elif ADD < 0:
        value = tl.load(out + place, mask=valid, other=0.0) - value
    tl.store(out + place, value, mask=valid)


@triton.jit
def _decoded(meta, packed, first, stored, BITS: tl.constexpr):
    codes = _load_codes(packed, first, stored, BITS)
    return codes.to(tl.float32) * tl.load(meta) + tl.load(meta + 1)


@triton.jit(do_not_specialize=["meta", "payload", "out", "num", "piece", "piece_bytes", "num_peers", "peer_bytes"])
def levels_decode(
    meta, payload, out, num: tl.int64, piece: tl.int64, piece_bytes: tl.int64, num_peers: tl.int64, peer_bytes: tl.int64,
    BUCKET: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A part of a bucket, from all peers. meta and payload are the same bytes: one peer's pieces after the other's."""
    bucket = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, 8)
    own_meta, packed, here, local = _piece_of(meta, payload, bucket, num, piece, piece_bytes, BUCKET)
    inside_row = tl.program_id(1) * (ROWS * 8) + row * 8
    first = local * BUCKET + inside_row
    stored = (inside_row < BUCKET) & (first < here)
    value = _decoded(own_meta, packed, first, stored, BITS)
    for peer in range(1, num_peers):
        value += _decoded(own_meta + peer * peer_bytes // 4, packed + peer * peer_bytes, first, stored, BITS)
    inside = inside_row[:, None] + column[None, :]
    place = bucket * BUCKET + inside
    valid = (inside < BUCKET) & (place < num)
    _add(value, out, place, valid, ADD)


@triton.jit
def _bf16_bits(x):
    # To the nearest, even ones where there are two, by integers: Triton's interpreter would cut.
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0).to(tl.int16)


@triton.jit(do_not_specialize=["values", "residual", "numbers", "num", "piece", "piece_numbers", "weight"])
def cast_encode(
    values, residual, numbers, num: tl.int64, piece: tl.int64, piece_numbers: tl.int64, weight,
    TILE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """A part of a piece as numbers of another type, with zeros up to a multiple of 4 bytes; FEEDBACK as for `levels_encode`.

    numbers: bf16 as int16.
    """
    SIZE: tl.constexpr = numbers.dtype.element_ty.primitive_bitwidth // 8
    which = tl.program_id(1).to(tl.int64)
    here = tl.minimum(piece, num - which * piece)
    inside = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place, valid = which * piece + inside, inside < here
    x = tl.where(valid, _weighted(values, residual, place, valid, weight, FEEDBACK), 0.0)
    if numbers.dtype.element_ty == tl.int16:
        number = _bf16_bits(x)
        kept = (number.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        number = x.to(numbers.dtype.element_ty)
        kept = number.to(tl.float32)
    tl.store(numbers + which * piece_numbers + inside, number, mask=inside < (here * SIZE + 3) // 4 * 4 // SIZE)
    if FEEDBACK:
        tl.store(residual + place, x - kept, mask=valid)


@triton.jit(do_not_specialize=["numbers", "out", "num", "piece", "piece_numbers", "num_peers", "peer_numbers"])
def cast_decode(
    numbers, out, num: tl.int64, piece: tl.int64, piece_numbers: tl.int64, num_peers: tl.int64, peer_numbers: tl.int64,
    TILE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A part of a piece, from all peers."""
    which = tl.program_id(1).to(tl.int64)
    here = tl.minimum(piece, num - which * piece)
    inside = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid, own = inside < here, numbers + which * piece_numbers + inside
    value = tl.load(own, mask=valid, other=0.0).to(tl.float32)
    for peer in range(1, num_peers):
        value += tl.load(own + peer * peer_numbers, mask=valid, other=0.0).to(tl.float32)
    _add(value, out, which * piece + inside, valid, ADD)
