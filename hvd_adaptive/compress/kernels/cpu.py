"""Codes of equally spaced levels for CPU tensors, compiled by numba: the same bits as the torch reference.

One thread; the interpreter's lock is free meanwhile. Each bucket goes through a block of bytes that stays in the first cache, so
that both loops over it, rounding and packing, become vector instructions. LLVM may not reorder or fuse floating-point
operations here, as fastmath is off. The first call compiles for about two seconds; the result is kept on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hvd_adaptive.compress.kernels.reference import MOST_SPAN, SMALLEST_UNIT

_options: Any = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}
_SMALLEST_UNIT = np.float32(SMALLEST_UNIT)
_MOST_SPAN, _INFINITY = np.float32(MOST_SPAN), np.float32(np.inf)
_INT_MAX = np.int32(0x7FFFFFFF)
_NONE = np.int32(0)
_HALF = np.float32(0.5)
_STEP = np.float32(2.0**-24)
_NAN = np.float32(np.nan)
_ZERO = np.float32(0)
_ONE = np.float32(1)
_U16, _U15, _U8 = np.uint32(16), np.uint32(15), np.uint32(8)
_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
LANES = 16  # partial sums of squares


@njit(**_options)
def _span(words: Any) -> Any:
    # Floats compare like these integers, which LLVM may reduce in any order; NaN lies beyond infinity
    # on its side, and so becomes an end where there is one.
    least, most = _INT_MAX, np.int32(-_INT_MAX)
    for j in range(len(words)):
        word = words[j]
        ordered = np.int32(word ^ ((word >> np.int32(31)) & _INT_MAX))
        least = min(least, ordered)
        most = max(most, ordered)
    return least, most


@njit(**_options)
def _root_mean_square(values: Any, sums: Any) -> Any:
    sums[:] = 0
    whole = len(values) // LANES * LANES
    for j in range(0, whole, LANES):
        for k in range(LANES):
            sums[k] += np.float64(values[j + k]) * np.float64(values[j + k])
    for j in range(whole, len(values)):
        sums[j - whole] += np.float64(values[j]) * np.float64(values[j])
    total = 0.0
    for k in range(LANES):
        total += sums[k]
    return np.sqrt(total / len(values))


@njit(**_options)
def _fitted_unit(values: Any, codes: Any, top: Any, sums: Any) -> Any:
    # Of the levels with these codes, the distance with which least is lost.
    sums[:] = 0
    squares, whole = np.int64(0), len(values) // LANES * LANES
    for j in range(0, whole, LANES):
        for k in range(LANES):
            place = np.int32(2) * np.int32(codes[j + k]) - top
            sums[k] += np.float64(values[j + k]) * np.float64(place)
            squares += np.int64(place * place)
    for j in range(whole, len(values)):
        place = np.int32(2) * np.int32(codes[j]) - top
        sums[j - whole] += np.float64(values[j]) * np.float64(place)
        squares += np.int64(place * place)
    total = 0.0
    for k in range(LANES):
        total += sums[k]
    return np.float32(2.0 * total / np.float64(squares))


@njit(**_options)
def _round_nearest(values: Any, codes: Any, low: Any, inverse: Any, top: Any) -> None:
    for j in range(len(values)):
        scaled = (values[j] - low) * inverse
        codes[j] = np.uint8(max(min(np.int32(scaled + _HALF), top), _NONE))


@njit(**_options)
def _round_random(values: Any, codes: Any, low: Any, inverse: Any, top: Any, first: Any, key0: Any, key1: Any) -> None:
    for j in range(len(values)):
        h = np.uint32(np.uint32(first + np.uint32(j)) ^ key0)
        h = np.uint32(np.uint32(h ^ np.uint32(h >> _U16)) * _M1) ^ key1
        h = np.uint32(np.uint32(h ^ np.uint32(h >> _U15)) * _M2)
        h = np.uint32(h ^ np.uint32(h >> _U16))
        noise = np.float32(np.int32(h >> _U8)) * _STEP
        scaled = (values[j] - low) * inverse
        codes[j] = np.uint8(max(min(np.int32(scaled + noise), top), _NONE))


@njit(**_options)
def _squeeze(words: Any, bits: Any) -> None:
    # In each word, moves the low ``bits`` of its 8 bytes together: pairs of codes, then fours, then eights.
    one, two, four = np.uint64(8 - bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    low1 = np.uint64((1 << bits) - 1) * np.uint64(0x0001000100010001)
    low2 = np.uint64((1 << (2 * bits)) - 1) * np.uint64(0x0000000100000001)
    low4 = (np.uint64(1) << np.uint64(4 * bits)) - np.uint64(1)
    high1, high2, high4 = low1 << np.uint64(bits), low2 << np.uint64(2 * bits), low4 << np.uint64(4 * bits)
    for j in range(len(words)):
        word = words[j]
        word = (word & low1) | ((word >> one) & high1)
        word = (word & low2) | ((word >> two) & high2)
        words[j] = (word & low4) | ((word >> four) & high4)


@njit(**_options)
def _spread(words: Any, bits: Any) -> None:
    # The way back.
    one, two, four = np.uint64(8 - bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    low1 = np.uint64((1 << bits) - 1) * np.uint64(0x0001000100010001)
    low2 = np.uint64((1 << (2 * bits)) - 1) * np.uint64(0x0000000100000001)
    low4 = (np.uint64(1) << np.uint64(4 * bits)) - np.uint64(1)
    high1, high2, high4 = low1 << np.uint64(bits), low2 << np.uint64(2 * bits), low4 << np.uint64(4 * bits)
    for j in range(len(words)):
        word = words[j]
        word = (word & low4) | ((word & high4) << four)
        word = (word & low2) | ((word & high2) << two)
        words[j] = (word & low1) | ((word & high1) << one)


@njit(inline="always")
def _store_bytes(words: Any, packed: Any, num: Any) -> None:
    for j in range(len(words)):
        word = words[j]
        for k in range(num):
            packed[num * j + k] = np.uint8((word >> np.uint64(8 * k)) & np.uint64(255))


@njit(inline="always")
def _load_bytes(words: Any, packed: Any, num: Any) -> None:
    for j in range(len(words)):
        word = np.uint64(0)
        for k in range(num):
            word |= np.uint64(packed[num * j + k]) << np.uint64(8 * k)
        words[j] = word


@njit(**_options)
def _pack(codes: Any, packed: Any, bits: Any) -> None:
    # codes: a whole number of eights; overwritten. A constant number of bytes makes each case a loop without branches.
    if bits == 8:
        for j in range(len(packed)):
            packed[j] = codes[j]
        return
    if bits == 4:
        pairs = codes.view(np.uint16)
        for j in range(len(packed)):
            pair = pairs[j]
            packed[j] = np.uint8(pair | (pair >> 4))
        return
    words = codes.view(np.uint64)
    _squeeze(words, bits)
    if bits == 1:
        _store_bytes(words, packed, 1)
    elif bits == 2:
        _store_bytes(words, packed, 2)
    elif bits == 3:
        _store_bytes(words, packed, 3)
    elif bits == 5:
        _store_bytes(words, packed, 5)
    elif bits == 6:
        _store_bytes(words, packed, 6)
    else:
        _store_bytes(words, packed, 7)


@njit(**_options)
def _unpack(packed: Any, codes: Any, bits: Any) -> None:
    if bits == 8:
        for j in range(len(packed)):
            codes[j] = packed[j]
        return
    if bits == 4:
        pairs = codes.view(np.uint16)
        for j in range(len(packed)):
            byte = np.uint16(packed[j])
            pairs[j] = np.uint16((byte & 15) | ((byte & 0xF0) << 4))
        return
    words = codes.view(np.uint64)
    if bits == 1:
        _load_bytes(words, packed, 1)
    elif bits == 2:
        _load_bytes(words, packed, 2)
    elif bits == 3:
        _load_bytes(words, packed, 3)
    elif bits == 5:
        _load_bytes(words, packed, 5)
    elif bits == 6:
        _load_bytes(words, packed, 6)
    else:
        _load_bytes(words, packed, 7)
    _spread(words, bits)


@njit(**_options)
def levels_encode(
    values: Any, residual: Any, meta: Any, packed: Any, bits: Any, bucket: Any, spread: Any,
    random: Any, key0: Any, key1: Any, first: Any,
) -> None:
    """Writes (unit, low) into ``meta``, fp32, shape (num_buckets, 2), and codes into ``packed``; see the reference.

    ``spread`` is 0 for levels from the minimum to the maximum. ``first`` is the place of the first value among those that share
    the key.

    A residual that is not empty is added to the values, and then holds what the code has lost: all while a bucket is in the
    first cache.
    """
    num, feedback = len(values), len(residual) > 0
    source = residual if feedback else values
    words = source.view(np.int32)
    top = np.int32((1 << bits) - 1)
    codes = np.zeros(bucket, np.uint8)
    ends = np.empty(2, np.int32)
    floats = ends.view(np.float32)
    sums = np.empty(LANES)
    for b in range(len(meta)):
        start, stop = b * bucket, min((b + 1) * bucket, num)
        part = source[start:stop]
        if feedback:
            own = values[start:stop]
            for j in range(len(part)):
                part[j] += own[j]
        unit, inverse = _ZERO, _ZERO
        if spread:
            low, span = _ZERO, np.float32(_root_mean_square(part, sums) * (spread * np.float64(top)))
        else:
            least, most = _span(words[start:stop])
            ends[0] = least ^ ((least >> np.int32(31)) & _INT_MAX)
            ends[1] = most ^ ((most >> np.int32(31)) & _INT_MAX)
            low = floats[0] + _ZERO  # -0.0 becomes 0.0
            span = floats[1] - low
        if not span < (_MOST_SPAN if spread else _INFINITY):
            low, unit = _NAN, _NAN
        elif span > 0:
            unit = max(span / np.float32(top), _SMALLEST_UNIT)
            inverse = _ONE / unit
            if spread:
                low = unit * np.float32(np.float32(top) * -_HALF)
        block = codes[: stop - start]
        if np.isnan(low):
            block[:] = 0
        elif random:
            _round_random(part, block, low, inverse, top, np.uint32(first + np.uint32(start)), key0, key1)
        else:
            _round_nearest(part, block, low, inverse, top)
        if spread and unit > 0:
            unit = max(_fitted_unit(part, block, top, sums), _SMALLEST_UNIT)
            low = unit * np.float32(np.float32(top) * -_HALF)
        meta[b, 0], meta[b, 1] = unit, low
        if feedback:
            for j in range(len(part)):
                part[j] -= np.float32(block[j]) * unit + low
        eights = (stop - start + 7) // 8
        codes[stop - start : 8 * eights] = 0
        _pack(codes[: 8 * eights], packed[start // 8 * bits : (start // 8 + eights) * bits], bits)


@njit(**_options)
def levels_decode(meta: Any, packed: Any, out: Any, bits: Any, bucket: Any, add: Any) -> None:
    """Replaces, raises or lowers ``out`` by the decoded values; see the reference."""
    num = len(out)
    codes = np.zeros(bucket, np.uint8)
    for b in range(len(meta)):
        start, stop = b * bucket, min((b + 1) * bucket, num)
        eights = (stop - start + 7) // 8
        _unpack(packed[start // 8 * bits : (start // 8 + eights) * bits], codes[: 8 * eights], bits)
        unit, low = meta[b, 0], meta[b, 1]
        part = out[start:stop]
        if add == 0:
            for j in range(len(part)):
                part[j] = np.float32(codes[j]) * unit + low
        elif add > 0:
            for j in range(len(part)):
                part[j] += np.float32(codes[j]) * unit + low
        else:
            for j in range(len(part)):
                part[j] -= np.float32(codes[j]) * unit + low
