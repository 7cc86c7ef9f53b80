"""Shares of a fixed global batch: how many samples each rank computes in a synchronous step, and which.

Every rank calls these with the same numbers and must get the same integers, on any processor: a difference would lose
samples. So sums are exact (``math.fsum``) and run over plain floats, not over arrays whose order of summation varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# The ranks' samples of a step's global batch.
SharesAt = Callable[[int], Sequence[int]]


def integer_shares(
    targets: Sequence[float], total: int, *, lower: int = 1, upper: Sequence[int] | None = None
) -> list[int]:
    """Splits ``total`` samples into whole shares in proportion to ``targets``, within bounds.

    Where no bound binds, a share is its exact proportion rounded up or down; which ones go up is by the largest
    remainder, and by rank where remainders are equal. What a bound takes away is spread over the others in proportion.

    Args:
        targets: one number >= 0 a rank, of any scale: fractions, speeds or sizes; all zero means equal.
        total: samples to split, >= 0.
        lower: fewest samples of a rank, >= 0.
        upper: most samples of each rank; None: no bound.

    Returns:
        Samples of each rank; their sum is ``total``.

    Raises:
        ValueError: for targets that are negative or not finite, or bounds that ``total`` cannot meet.
    """
    num_ranks = len(targets)
    most = [total] * num_ranks if upper is None else list(upper)
    if not num_ranks or any(not math.isfinite(t) or t < 0 for t in targets):
        raise ValueError(f"targets must be finite numbers >= 0, one a rank, got {list(targets)}")
    if total < num_ranks * lower or total > sum(most) or min(most) < lower:
        bound = f"at least {lower}" + ("" if upper is None else f" and at most {most}")
        raise ValueError(f"{total} samples cannot be split over {num_ranks} ranks with {bound} samples each")
    exact = [0.0] * num_ranks
    free, fixed, remaining = list(range(num_ranks)), [False] * num_ranks, total
    while free:
        weight = math.fsum(targets[r] for r in free)
        for r in free:
            exact[r] = remaining * targets[r] / weight if weight else remaining / len(free)
        low, high = [r for r in free if exact[r] < lower], [r for r in free if exact[r] > most[r]]
        missing = math.fsum(lower - exact[r] for r in low)
        over = math.fsum(exact[r] - most[r] for r in high)
        # The larger violation pushes the other ranks further the other way, so that side is settled.
        settled = low if missing >= over else high
        for r in settled:
            exact[r], fixed[r] = lower if missing >= over else most[r], True
        free = [r for r in free if not fixed[r]]
        remaining = total - round(math.fsum(x for x, done in zip(exact, fixed, strict=True) if done))
        if not settled:
            break
    shares = [math.floor(x) for x in exact]
    by_remainder = sorted((shares[r] - exact[r], r) for r in range(num_ranks) if shares[r] < most[r])
    for _, r in by_remainder[: total - sum(shares)]:
        shares[r] += 1
    return shares


def stub_shares(shares: Sequence[int], total: int, *, lower: int, unit: int = 1) -> list[int]:
    """Splits a global batch that is smaller than the others by their shares.

    Where it does not hold ``lower`` samples for every rank, the ranks with the largest shares take it and the others
    get none. What fills no micro-batch is left to the last rank that gets any.

    Args:
        shares: the ranks' shares of a whole global batch.
        total: samples to split, >= 1.
        lower: fewest samples of a rank that gets any, >= 1.
        unit: samples of a micro-batch, of which shares are whole numbers; 1: shares may have any size.
    """
    if unit > 1:
        result = [unit * share for share in stub_shares(shares, -(-total // unit), lower=max(1, lower // unit))]
        result[max(r for r, share in enumerate(result) if share)] -= sum(result) - total
        return result
    num_active = min(len(shares), max(1, total // lower))
    active = sorted(sorted(range(len(shares)), key=lambda r: (-shares[r], r))[:num_active])
    parts = integer_shares([shares[r] for r in active], total, lower=min(lower, total // num_active))
    result = [0] * len(shares)
    for r, part in zip(active, parts, strict=True):
        result[r] = part
    return result


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's micro-batch of a global batch.

    Attributes:
        start: first of its rows, counted from the round's first.
        stop: the row after its last; equal to ``start`` for an empty part.
        batch_start: first row of the global batch.
        batch_stop: the row after the global batch's last.
        ends_step: the last micro-batch before the optimizer's step.
    """

    start: int
    stop: int
    batch_start: int
    batch_stop: int
    ends_step: bool

    @property
    def weight(self) -> float:
        """Share of the global batch, b / B, in [0, 1]."""
        return (self.stop - self.start) / (self.batch_stop - self.batch_start)


def global_batches(
    num_rows: int, *, total: int, shares_at: SharesAt, lower: int, unit: int = 1
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yields the first row of each global batch of a round, the row after its last, and every rank's share of it.

    Args:
        num_rows: rows of the round, >= 0.
        total: rows of a global batch; the last one may be smaller.
        shares_at: gives the ranks' shares of a whole global batch; asked for a step when its batch is due.
        lower: fewest samples of a rank that gets any in the smaller one.
        unit: samples of a micro-batch, of which shares are whole numbers; 1: shares may have any size.
    """
    for step, first in enumerate(range(0, num_rows, total)):
        last, shares = min(first + total, num_rows), shares_at(step)
        is_whole = last - first == total
        yield first, last, shares if is_whole else stub_shares(shares, last - first, lower=lower, unit=unit)


def cut_round(
    num_rows: int,
    *,
    total: int,
    shares_at: SharesAt,
    rank: int,
    num_micro_batches: int = 1,
    smallest: int = 1,
    unit: int = 1,
) -> Iterator[Part]:
    """Yields a rank's micro-batches of a round: the same number on every rank, together every row exactly once.

    The rows are cut into global batches, whatever the number of ranks and their shares; a rank takes a contiguous part of
    each and cuts it as evenly as it can. Only in the last one, which may be smaller, can parts be empty.

    Args:
        num_rows: rows of the round, >= 0.
        total: rows of a global batch.
        shares_at: gives the ranks' samples of a step's global batch, each >= ``num_micro_batches * smallest``; they add up
            to ``total``. Asked for a step when its first micro-batch is due.
        rank: whose micro-batches.
        num_micro_batches: micro-batches a step.
        smallest: fewest samples in a micro-batch that has any, where there are so many.
        unit: parts are whole numbers of so many samples, but for one part of the last global batch; 1: they may have any size.
    """
    lower = smallest * num_micro_batches
    for first, last, mine in global_batches(num_rows, total=total, shares_at=shares_at, lower=lower, unit=unit):
        position = first + sum(mine[:rank])
        pieces = min(num_micro_batches, max(1, mine[rank] // smallest))
        even, rest = divmod(mine[rank], pieces)
        for number in range(num_micro_batches):
            count = even + (number < rest) if number < pieces else 0
            yield Part(position, position + count, first, last, number == num_micro_batches - 1)
            position += count
