"""Which samples a rank computes next: a shared cursor over the mega-batch, turned into sample rows.

The cursor counts WORK (samples, or non-zeros), so that a claim of a given size is a batch of a given cost. Everything
here is a pure function of the seed, the ledger and the cursor's values; the atomic add itself lives in comm/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What has been consumed: every sample of ``epochs < epoch``, and the first ``cursor`` of this epoch's order.

    Only a completed merge moves it, so it is exact after a failure, for any number of ranks.
    """

    epoch: int = 0
    cursor: int = 0

    def advance(self, num_samples: int, dataset_size: int) -> Ledger:
        """Returns the ledger after ``num_samples`` more samples of this epoch; a finished epoch opens the next.

        Raises:
            ValueError: if the samples reach beyond the epoch.
        """
        cursor = self.cursor + num_samples
        if num_samples < 0 or cursor > dataset_size:
            raise ValueError(
                f"num_samples must keep the cursor within the epoch, got {self.cursor} + {num_samples} of {dataset_size}"
            )
        return (
            Ledger(epoch=self.epoch + 1)
            if cursor == dataset_size
            else Ledger(epoch=self.epoch, cursor=cursor)
        )


def epoch_order(dataset_size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the seeded permutation of an epoch, shape (dataset_size,); the same on every rank and machine."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(dataset_size)


def round_size(cursor: int, *, dataset_size: int, mega_batch: int, unit: int = 1) -> int:
    """Returns how many samples the round that starts at ``cursor`` takes.

    What is left of the epoch is cut evenly into rounds of about ``mega_batch``, so no epoch ends with a stub that
    costs a whole merge; a mega-batch larger than the epoch is one round an epoch. A round is a whole number of ``unit``
    samples, except the last of an epoch, which is no single sample: BatchNorm refuses one.
    """
    remaining = dataset_size - cursor
    num_units = -(-remaining // unit)
    num_rounds = min(num_units, max(1, round(remaining / mega_batch)))
    size = min(remaining, -(-num_units // num_rounds) * unit)
    return remaining if unit > 1 and remaining - size == 1 else size


class MegaBatch:
    """The samples of one round in their order, addressed by work.

    Args:
        rows: sample rows in dispatch order, int64, shape (num_samples,).
        work: work of those samples, int64 >= 0, shape (num_samples,), or None when one sample is one unit. A sample
            without work (an empty row) still counts as one unit, so that every sample lies in exactly one claim.
    """

    def __init__(self, rows: NDArray[np.int64], work: NDArray[np.int64] | None = None) -> None:
        self.rows = rows
        self._starts = None
        self.total_work = len(rows)
        if work is not None:
            ends = np.cumsum(np.maximum(work, 1))
            self._starts = np.concatenate(([0], ends[:-1])) if len(rows) else ends
            self.total_work = int(ends[-1]) if len(rows) else 0

    def claimed(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the rows whose work begins in [start, stop): disjoint claims give disjoint rows, gapless ones all rows.

        A claim that falls inside one heavy sample is empty: its claimant asks again.
        """
        if self._starts is None:
            return self.rows[start:stop]
        first, last = np.searchsorted(self._starts, (start, stop))
        return self.rows[first:last]

    def num_rows_before(self, stop: int) -> int:
        """Returns how many rows the claims of [0, stop) have."""
        return len(self.claimed(0, stop))


# Of their fair part of what is left, what ranks claim at once at most.
_AHEAD_PART = 0.5
# And of a round's beginning without a claim, as workers need time to read it.
_SETTLED_PART = 0.75
# So many that claim one batch at a time leave the thread that serves the cursor most of its time.
_MOST_CLAIMANTS = 64


def batches_ahead(num_claimants: int) -> int:
    """Returns how many batches each claims at once far from a round's end, so that the cursor is not asked too often.

    Args:
        num_claimants: how many claim from the cursor: ranks, or hosts whose ranks claim together.
    """
    return -(-num_claimants // _MOST_CLAIMANTS)


# Samples: BatchNorm refuses one.
_SMALLEST_CLAIM = 2.0


def own_parts(shares: NDArray[np.float64], total_work: int, *, unit: int = 1) -> NDArray[np.int64]:
    """Returns where each rank's part of a mega-batch begins, and where the last one ends: int64, shape (world_size + 1,).

    Args:
        shares: one number >= 0 a rank, of any scale, shape (world_size,).
        total_work: work of the mega-batch.
        unit: parts are whole numbers of so much work, but for what is left at the mega-batch's end.
    """
    num_units = -(-total_work // unit)
    edges = np.rint(np.concatenate(([0.0], np.cumsum(shares))) / shares.sum() * num_units)
    return np.minimum(edges.astype(np.int64) * unit, total_work)


def first_claims(
    batch_work: NDArray[np.float64],
    shares: NDArray[np.float64],
    total_work: int,
    *,
    most: int,
    unit: int = 1,
    equally_many: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns how many whole batches each rank takes of a round's beginning without a claim, and the work of one of its batches:
    int64, shape (world_size,) both. All ranks know them before the round begins, so that their batches can be read by then.

    They are at most three quarters of a rank's fair part: the rest follows the ranks' speeds. Where each rank has equally many
    whole batches they are all of it.

    Args:
        batch_work: work of each rank's batch, shape (world_size,), > 0.
        shares: the ranks' shares of their summed speed, shape (world_size,).
        total_work: work of the round.
        most: batches of a rank.
        unit: batches are whole numbers of so much work.
        equally_many: each rank has as many batches of a round as every other one.
    """
    sizes = np.maximum(1, np.rint(batch_work / unit).astype(np.int64)) * unit
    parts = total_work * sizes / sizes.sum() if equally_many else _SETTLED_PART * shares * total_work
    counts = np.minimum(most, (parts / sizes).astype(np.int64))
    # A single sample is left to no claim: BatchNorm refuses it.
    return np.maximum(0, counts - (total_work - counts @ sizes == 1)), sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRule:
    """How much one rank claims at a time in one round, or how much several ranks do together.

    Attributes:
        full_claim: work of this rank's whole batch, or of one of each of these ranks, > 0.
        others_full_claims: the sum of the other ranks' whole batches, >= 0.
        speed_share: this rank's speed, or that of these, over the sum of all ranks'; 1 where nobody else takes of this part.
        work_per_sample: mean work of a sample in this mega-batch, > 0.
        least: work of the smallest claim of any rank, whole, >= 1.
        unit: a claim is a whole number of so much work, but for the last one.
    """

    full_claim: float
    others_full_claims: float
    speed_share: float
    work_per_sample: float
    least: int
    unit: int = 1

    @classmethod
    def of_round(
        cls,
        rank: int | Sequence[int],
        *,
        batch_sizes: NDArray[np.float64],
        speed_shares: NDArray[np.float64],
        work_per_sample: float,
        dynamic: bool,
        unit: int = 1,
        pads: bool = False,
    ) -> ClaimRule:
        """Returns a rank's rule, or that of several which claim together.

        Args:
            rank: whose, or theirs.
            batch_sizes: the ranks' batch sizes, samples, shape (world_size,).
            speed_shares: the ranks' shares of their summed speed, shape (world_size,).
            work_per_sample: mean work of a sample in this mega-batch.
            dynamic: ranks claim from a shared cursor; else each from a part of its own.
            unit: samples of which a batch is a whole number, but for the last one.
            pads: the last one is padded, so it may have any number of samples.
        """
        # A batch size is in samples, a claim in work.
        full_claims = batch_sizes * work_per_sample
        ranks = [rank] if isinstance(rank, int) else list(rank)
        full_claim = float(full_claims[ranks].sum())
        return cls(
            full_claim=full_claim,
            others_full_claims=max(0.0, float(full_claims.sum()) - full_claim),
            speed_share=float(speed_shares[ranks].sum()) if dynamic else 1.0,
            work_per_sample=work_per_sample,
            least=1 if pads else max(1, int(min(_SMALLEST_CLAIM * work_per_sample, full_claims.min()))),
            unit=unit,
        )

    def claim(
        self, remaining: int, *, pending: float, ceiling: float = math.inf, others_claimed: float = math.inf
    ) -> int:
        """Returns how much work to claim; 0: leave it to the others, until what is pending is computed.

        Args:
            remaining: as for :meth:`size`.
            pending: as for :meth:`size`.
            ceiling: as for :meth:`size`.
            others_claimed: as for :meth:`size`.
        """
        if pending and self.leaves(remaining, pending=pending, others_claimed=others_claimed):
            return 0
        return self.size(remaining, pending=pending, ceiling=ceiling, others_claimed=others_claimed)

    def size(
        self, remaining: int, *, pending: float, ceiling: float = math.inf, others_claimed: float = math.inf
    ) -> int:
        """Returns how much work to claim; see :func:`claim_size`.

        Args:
            remaining: unclaimed work of the mega-batch, or of the rank's own part, >= 1.
            pending: work this rank has claimed and not computed yet. The claim of the next batch is made when the one
                before begins to compute, which then is what is pending.
            ceiling: largest batch that fits this rank's memory, samples.
            others_claimed: work that the other ranks have claimed in this round, computed or not.
        """
        num_units = claim_size(
            remaining=-(-remaining // self.unit),
            full_claim=min(self.full_claim, ceiling * self.work_per_sample) / self.unit,
            own_pending=pending / self.unit,
            others_full_claims=self.others_full_claims / self.unit,
            others_claimed=others_claimed / self.unit,
            speed_share=self.speed_share,
            smallest=self._smallest / self.unit,
        )
        return min(num_units * self.unit, remaining)

    def size_together(self, remaining: int, *, num_ahead: int) -> int:
        """Returns how much work ranks claim at once, to hand it out among themselves.

        Far from the end these are some batches for each, at most half of their fair part of what is left: whoever becomes slower
        meanwhile keeps nobody waiting. Near the end they claim as one rank does, a batch for each and less.

        Args:
            remaining: unclaimed work of the mega-batch, >= 1.
            num_ahead: the most batches for each of them, >= 1.
        """
        num_batches = min(num_ahead, int(_AHEAD_PART * self.speed_share * remaining / self.full_claim))
        if num_batches > 1:
            return min(remaining, max(1, round(num_batches * self.full_claim / self.unit)) * self.unit)
        return self.size(remaining, pending=self.full_claim)

    def left_beside(self, remaining: int, taken: int) -> int:
        """Returns how much work the cursor leaves while ranks hand out among themselves what they took from it, on the average.

        Args:
            remaining: what it had left when they took it.
            taken: what they took; others take as much for their speed meanwhile, and hold half of that.
        """
        return max(0, remaining - int(taken / self.speed_share / 2))

    def leaves(self, remaining: int, *, pending: float, others_claimed: float) -> bool:
        """Returns whether a rank that holds so much work should leave the rest to the others, as it would be the last one: it has
        its fair part, or with its smallest claim would be farther above than it is below now.

        Args:
            remaining: unclaimed work of the mega-batch, >= 1.
            pending: work this rank has claimed and not computed yet.
            others_claimed: work that the other ranks have claimed in this round, computed or not.
        """
        if self.others_full_claims == 0.0 or self.speed_share == 1.0:
            return False
        ahead = _others_pending(pending, self.full_claim, others=self.others_full_claims, claimed=others_claimed)
        fair = self.speed_share * (remaining + pending + ahead) - pending
        # Whoever holds several batches computes them all before it asks again, and then waits until what is left has been read.
        floor = _floor(self.full_claim, self._smallest, pending)
        return fair < (floor / 2 if pending <= self.full_claim else -floor)

    @property
    def _smallest(self) -> float:
        return _SMALLEST_CLAIM * self.work_per_sample if self.unit == 1 else float(self.unit)


def claim_size(
    *,
    remaining: int,
    full_claim: float,
    own_pending: float,
    others_full_claims: float,
    speed_share: float,
    smallest: float = _SMALLEST_CLAIM,
    others_claimed: float = math.inf,
) -> int:
    """Returns how much work a rank claims, so that all ranks finish the mega-batch together.

    Far from the end that is a full batch. Near it, the work not yet computed is estimated as what is unclaimed, plus
    what this rank holds, plus as many batches for each other rank, half of one being computed; a rank takes its share of
    that by speed, less what it holds (guided self-scheduling weighted by speed, as in Hummel et al.'s weighted
    factoring). Against plain guided self-scheduling this halves the waiting in short rounds at unequal speeds and cuts
    fewer small batches.

    Args:
        remaining: unclaimed work of the mega-batch, >= 1.
        full_claim: work of this rank's whole batch, > 0.
        own_pending: work this rank has claimed and not computed yet, >= 0.
        others_full_claims: the sum of the other ranks' whole batches, >= 0.
        speed_share: this rank's speed over the sum of all ranks' speeds, in (0, 1].
        smallest: work of the smallest batch to cut, > 0; two samples by default, because BatchNorm refuses one.
        others_claimed: work that the other ranks have claimed so far; they hold no more.

    Returns:
        Work to claim, from 1 to ``remaining``. A claim is at least ``smallest`` and a sixteenth of a batch, a quarter where
        more than a batch is pending, and so is what it leaves, unless there was less.
    """
    floor = _floor(full_claim, smallest, own_pending)
    ahead = _others_pending(own_pending, full_claim, others=others_full_claims, claimed=others_claimed)
    fair = speed_share * (remaining + own_pending + ahead) - own_pending
    size = max(1, round(min(full_claim, max(fair, floor))))
    return remaining if remaining - size < floor else size


def _floor(full_claim: float, smallest: float, own_pending: float) -> float:
    # A sixteenth of a batch: a smaller one costs more in overhead than it saves in waiting. Whoever holds several batches would
    # cut many such pieces before it has computed the first of them.
    return min(max(smallest, full_claim / (4 if own_pending > full_claim else 16)), full_claim)


def _others_pending(own_pending: float, full_claim: float, *, others: float, claimed: float) -> float:
    # As many batches as this rank holds, of each of which half of the first is computed.
    return min((max(own_pending / full_claim, 1.0) - 0.5) * others, claimed)


# Steps that ranks which make them together promise each other at once: what a signal at the first of them waits for.
_AHEAD_S, _MOST_AHEAD = 0.2, 32


def steps_ahead(step_s: float) -> int:
    """Returns how many synchronous steps a rank promises at once: those of about 0.2 s, at least 1 and at most 32.

    Args:
        step_s: seconds of a step, >= 0.
    """
    return max(1, min(_MOST_AHEAD, int(_AHEAD_S / max(step_s, 1e-9))))
