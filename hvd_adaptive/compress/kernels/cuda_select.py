"""Sums of squares, and large values: their selection, and their addition at their places. See :mod:`.cuda_codes`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["values", "partial", "num"])
def squares(values, partial, num: tl.int64, TILE: tl.constexpr):
    """One sum for each program. Squares of fp32 values are exact in fp64, and far from its end."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((TILE,), tl.float64)
    for start in range(program * TILE, num, tl.num_programs(0).to(tl.int64) * TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(values + place, mask=place < num, other=0.0).to(tl.float64)
        total += x * x
    tl.store(partial + program, tl.sum(total, axis=0))


@triton.jit
def _is_large(x, valid, threshold, SAMPLED: tl.constexpr):
    # Whether a value is taken for sure, and whether it is one of those at the threshold, of which some are.
    magnitude = tl.abs(x)
    least = tl.load(threshold + tl.program_id(1))
    least = tl.where(least == least, least, float("inf"))
    if SAMPLED:
        # Not magnitude >= least, which would lose NaN; zeros are not worth sending.
        above = valid & ((magnitude < least) == 0) & (magnitude != 0.0)
        return above, above & (magnitude < 0.0)
    return valid & ((magnitude <= least) == 0), valid & (magnitude == least)


@triton.jit
def _counts_of(counts):
    # Where a row's counts of both kinds are.
    num_programs = tl.num_programs(0).to(tl.int64)
    above = counts + tl.program_id(1) * num_programs
    return above, above + tl.num_programs(1) * num_programs


@triton.jit(do_not_specialize=["values", "threshold", "counts", "num"])
def count_large(values, threshold, counts, num: tl.int64, SAMPLED: tl.constexpr, TILE: tl.constexpr):
    """How many of a program's values are above its row's threshold, and how many at it."""
    program, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = program * TILE + tl.arange(0, TILE)
    x = tl.load(values + row * num + place, mask=place < num, other=0.0)
    above, level = _is_large(x, place < num, threshold, SAMPLED)
    above_counts, level_counts = _counts_of(counts)
    tl.store(above_counts + program, tl.sum(above.to(tl.int32), axis=0))
    tl.store(level_counts + program, tl.sum(level.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["values", "threshold", "counts", "places", "entries", "num", "num_entries"])
def store_large(
    values, threshold, counts, places, entries, num: tl.int64, num_entries: tl.int64,
    SAMPLED: tl.constexpr, TAKE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The chosen values and their places, the same bytes for both. TAKE: what is chosen becomes 0.

    counts: of both kinds, up to each program's own. places and entries: one row's payload after the other's.
    """
    program, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = program * TILE + tl.arange(0, TILE)
    x = tl.load(values + row * num + place, mask=place < num, other=0.0)
    above, level = _is_large(x, place < num, threshold, SAMPLED)
    above_counts, level_counts = _counts_of(counts)
    all_above = tl.load(above_counts + tl.num_programs(0) - 1)
    num_level = tl.maximum(num_entries - all_above, 0)
    above_now, level_now = above.to(tl.int64), level.to(tl.int64)
    above_before = tl.load(above_counts + program) - tl.sum(above_now, axis=0) + tl.cumsum(above_now, axis=0) - above_now
    level_before = tl.load(level_counts + program) - tl.sum(level_now, axis=0) + tl.cumsum(level_now, axis=0) - level_now
    taken = (above & (above_before < num_entries)) | (level & (level_before < num_level))
    slot = tl.minimum(above_before, num_entries) + tl.minimum(level_before, num_level)
    tl.store(places + row * 2 * num_entries + slot, place.to(tl.int32), mask=taken)
    tl.store(entries + (row * 2 + 1) * num_entries + slot, x, mask=taken)
    if TAKE:
        tl.store(values + row * num + place, x - x, mask=taken)


@triton.jit
def _entries_before(places, num_entries, end):
    # Places ascend, but for those that pad a payload: 0 after the first one.
    low, high = num_entries * 0, num_entries
    while low < high:
        middle = (low + high) // 2
        place = tl.load(places + middle)
        is_before = (place < end) & ((place > 0) | (middle == 0))
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit(
    do_not_specialize=[
        "places", "entries", "out", "num", "piece", "num_entries", "last_entries", "num_peers", "peer_words"
    ]
)  # fmt: skip
def decode_large(
    places, entries, out, num: tl.int64, piece: tl.int64, num_entries: tl.int64, last_entries: tl.int64, num_peers: tl.int64,
    peer_words: tl.int64, ADD: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A span of a piece, from all peers. places and entries are the same bytes: one peer's pieces after the other's.

    A program alone changes its span, one peer after the other, so that the sum has the peers' order.

    num_entries: of a whole piece; last_entries: of the last one. STEP: no fewer than threads, as for an encoder's residual.
    """
    which = tl.program_id(1).to(tl.int64)
    here = tl.minimum(piece, num - which * piece)
    own_entries = tl.where((which + 1) * piece < num, num_entries, last_entries)
    first = tl.program_id(0).to(tl.int64) * SPAN
    last = tl.minimum(first + SPAN, here)
    own, step = out + which * piece, tl.arange(0, STEP)
    if ADD == 0:
        for start in range(first, last, STEP):
            tl.store(own + start + step, tl.zeros((STEP,), tl.float32), mask=start + step < last)
    for peer in range(num_peers):
        at = peer * peer_words + which * 2 * num_entries
        end = _entries_before(places + at, own_entries, last)
        # Each thread has to see what the others have stored.
        tl.debug_barrier()
        for start in range(_entries_before(places + at, own_entries, first), end, STEP):
            slot = start + step
            target = own + tl.load(places + at + slot, mask=slot < end, other=0)
            x = tl.load(entries + at + own_entries + slot, mask=slot < end, other=0.0)
            before = tl.load(target, mask=slot < end, other=0.0)
            tl.store(target, before - x if ADD < 0 else before + x, mask=slot < end)
