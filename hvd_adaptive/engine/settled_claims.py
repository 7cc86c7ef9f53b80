"""The first claims of a round, settled before it begins: workers read these batches while the ranks still merge."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_adaptive.algorithm.ledger import MegaBatch, first_claims
from hvd_adaptive.engine.batches import BatchSource, Rows
from hvd_adaptive.engine.claims import Claim, Claims, ClaimSize

# A round that came out shorter than was expected leaves its ranks' speeds at least so much to decide.
_MOST_PART = 0.9


@dataclass(frozen=True, eq=False)
class SettledClaims:
    """What each rank takes of the next round's beginning: rank by rank, some whole batches. The same on every rank.

    Attributes:
        source: of the batches.
        rows: of all of these claims, the round's first ones.
        starts: where each rank's claims begin, and where the last rank's end, in work; int64, shape (world_size + 1,).
        sizes: work of each rank's batch, int64, shape (world_size,).
        most_part: of a round they are no larger part.
    """

    source: BatchSource
    rows: Rows
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    most_part: float

    @classmethod
    def after(
        cls,
        mega_batch: MegaBatch,
        source: BatchSource,
        *,
        batch_sizes: NDArray[np.float64],
        shares: NDArray[np.float64],
        unit: int,
        equally_many: bool = False,
    ) -> SettledClaims | None:
        """Settles claims of the round after this one, which is expected to be as long; None at the end of an epoch.

        Args:
            mega_batch: this round.
            source: of the batches; knows what follows.
            batch_sizes: the ranks', samples, shape (world_size,).
            shares: the ranks' shares of their summed speed, shape (world_size,).
            unit: batches are whole numbers of so many samples.
            equally_many: each rank has as many batches of a round as every other one.
        """
        rows, work = (part if part is None else part[: len(mega_batch.rows)] for part in source.following)
        assert rows is not None
        if not len(rows):
            return None
        coming = MegaBatch(rows, work)
        batch_work = batch_sizes * (coming.total_work / len(rows))
        counts, sizes = first_claims(
            batch_work, shares, coming.total_work, most=source.num_prefetched, unit=unit, equally_many=equally_many
        )
        starts = np.concatenate(([0], np.cumsum(counts * sizes)))
        return cls(source, coming.claimed(0, int(starts[-1])), starts, sizes, 1.0 if equally_many else _MOST_PART)

    def fit(self, source: BatchSource, mega_batch: MegaBatch) -> bool:
        """Returns whether they are of this round, now that it begins."""
        is_same = self.source is source and np.array_equal(self.rows, mega_batch.rows[: len(self.rows)])
        return is_same and self.total_work <= self.most_part * mega_batch.total_work

    @property
    def total_work(self) -> int:
        """Work of all of them, which no rank claims."""
        return int(self.starts[-1])

    def of_rank(self, rank: int) -> list[Claim]:
        """Returns a rank's, in the order in which it computes them."""
        first, last, size = int(self.starts[rank]), int(self.starts[rank + 1]), int(self.sizes[rank])
        return [(start, start + size) for start in range(first, last, size)]

    def rows_of_rank(self, rank: int, work: NDArray[np.int64] | None) -> list[Rows]:
        """Returns the rows of each of a rank's claims.

        Args:
            rank: whose.
            work: of the rows, int64; None: one each.
        """
        coming = MegaBatch(self.rows, None if work is None else work[: len(self.rows)])
        return [coming.claimed(start, stop) for start, stop, *_ in self.of_rank(rank)]


class FirstClaims:
    """A rank's settled claims, and then those of other claims.

    Args:
        own: the settled ones.
        claims: where the rank goes on.
    """

    def __init__(self, own: Sequence[Claim], claims: Claims) -> None:
        self._own = deque(own)
        self._claims = claims

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes the next piece; ``size`` counts for those that are not settled."""
        return self._own.popleft() if self._own else self._claims.claim(size)

    def close(self) -> None:
        """Closes the other claims; what is settled is computed in any case."""
        self._claims.close()

    @property
    def end(self) -> int | None:
        """Of the other claims."""
        return self._claims.end
