"""Which samples a rank computes next: a shared cursor over the mega-batch, turned into sample rows.

The cursor counts WORK (samples, or non-zeros), so that a claim of a given size is a batch of a given cost. Everything
here is a pure function of the seed, the ledger and the cursor's values; the atomic add itself lives in transport/.
"""

from __future__ import annotations

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
    samples, except the last of an epoch.
    """
    remaining = dataset_size - cursor
    num_units = -(-remaining // unit)
    num_rounds = min(num_units, max(1, round(remaining / mega_batch)))
    return min(remaining, -(-num_units // num_rounds) * unit)


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


def claim_size(
    *,
    remaining: int,
    full_claim: float,
    own_pending: float,
    others_full_claims: float,
    speed_share: float,
    smallest: float = 2.0,
) -> int:
    """Returns how much work a rank claims, so that all ranks finish the mega-batch together.

    Far from the end that is a full batch. Near it, the work not yet computed is estimated as what is unclaimed, plus
    what this rank holds, plus half a batch for each other rank; a rank takes its share of that by speed, less what it
    holds (guided self-scheduling weighted by speed, as in Hummel et al.'s weighted factoring). Against plain guided
    self-scheduling this halves the waiting in short rounds at unequal speeds and cuts fewer small batches.

    Args:
        remaining: unclaimed work of the mega-batch, >= 1.
        full_claim: work of this rank's whole batch, > 0.
        own_pending: work this rank has claimed and not computed yet, >= 0.
        others_full_claims: the sum of the other ranks' whole batches, >= 0.
        speed_share: this rank's speed over the sum of all ranks' speeds, in (0, 1].
        smallest: work of the smallest batch to cut, > 0; two samples by default, because BatchNorm refuses one.

    Returns:
        Work to claim, from 1 to ``remaining``. A claim is at least ``smallest`` and a sixteenth of a batch (a smaller one
        costs more in overhead than it saves in waiting), and so is what it leaves, unless there was less.
    """
    floor = min(max(smallest, full_claim / 16), full_claim)
    fair = speed_share * (remaining + own_pending + 0.5 * others_full_claims) - own_pending
    size = max(1, round(min(full_claim, max(fair, floor))))
    return remaining if remaining - size < floor else size
