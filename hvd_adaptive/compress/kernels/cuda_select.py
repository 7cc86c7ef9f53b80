"""Sums of squares and the selection of large values in Triton, in one pass each. See :mod:`.cuda_codes`."""

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
    least = tl.load(threshold)
    least = tl.where(least == least, least, float("inf"))
    if SAMPLED:
        # Not magnitude >= least, which would lose NaN; zeros are not worth sending.
        above = valid & ((magnitude < least) == 0) & (magnitude != 0.0)
        return above, above & (magnitude < 0.0)
    return valid & ((magnitude <= least) == 0), valid & (magnitude == least)


@triton.jit(do_not_specialize=["values", "threshold", "counts", "num", "num_programs"])
def count_large(
    values, threshold, counts, num: tl.int64, num_programs: tl.int64, SAMPLED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """How many of a program's values are above the threshold, and how many at it."""
    program = tl.program_id(0).to(tl.int64)
    place = program * TILE + tl.arange(0, TILE)
    x = tl.load(values + place, mask=place < num, other=0.0)
    above, level = _is_large(x, place < num, threshold, SAMPLED)
    tl.store(counts + program, tl.sum(above.to(tl.int32), axis=0))
    tl.store(counts + num_programs + program, tl.sum(level.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["values", "threshold", "counts", "places", "entries", "num", "num_programs", "num_entries"])
def store_large(
    values, threshold, counts, places, entries, num: tl.int64, num_programs: tl.int64, num_entries: tl.int64,
    SAMPLED: tl.constexpr, TAKE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The chosen values and their places. counts: of both kinds, up to each program's own. TAKE: what is chosen becomes 0."""
    program = tl.program_id(0).to(tl.int64)
    place = program * TILE + tl.arange(0, TILE)
    x = tl.load(values + place, mask=place < num, other=0.0)
    above, level = _is_large(x, place < num, threshold, SAMPLED)
    all_above = tl.load(counts + num_programs - 1)
    num_level = tl.maximum(num_entries - all_above, 0)
    above_now, level_now = above.to(tl.int64), level.to(tl.int64)
    above_before = tl.load(counts + program) - tl.sum(above_now, axis=0) + tl.cumsum(above_now, axis=0) - above_now
    level_before = (
        tl.load(counts + num_programs + program) - tl.sum(level_now, axis=0) + tl.cumsum(level_now, axis=0) - level_now
    )
    taken = (above & (above_before < num_entries)) | (level & (level_before < num_level))
    slot = tl.minimum(above_before, num_entries) + tl.minimum(level_before, num_level)
    tl.store(places + slot, place.to(tl.int32), mask=taken)
    tl.store(entries + slot, x, mask=taken)
    if TAKE:
        tl.store(values + place, x - x, mask=taken)
