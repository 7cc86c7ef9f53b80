"""A round of claims as events on one clock."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvd_adaptive.algorithm.ledger import ClaimRule
from hvd_adaptive.simulate.step_times import StepTimes


@dataclass
class Cursor:
    """What ranks claim from.

    Attributes:
        position: work claimed so far.
        stop: where the work ends.
        trip_s: seconds of a claim on its way there, and back.
        service_s: seconds that a claim takes of the thread that serves it.
        free_s: second at which that thread is free.
    """

    position: int
    stop: int
    trip_s: float = 0.0
    service_s: float = 0.0
    free_s: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is anything left."""
        return self.position < self.stop

    def take(self, now: float, size: Callable[[int], int]) -> tuple[float, int]:
        """Serves a claim that arrives now.

        Returns:
            The second at which it is answered, its way back apart, and the work; 0 where nothing is left.
        """
        served = self.free_s = (now if now > self.free_s else self.free_s) + self.service_s
        remaining = self.stop - self.position
        taken = size(remaining) if remaining else 0
        self.position += taken
        return served, taken


@dataclass(kw_only=True)
class Pool(Cursor):
    """What ranks take from the cursor at once, and hand out among themselves; a real run's is
    :class:`hvd_adaptive.engine.claim_pool.PooledCursor`.

    Attributes:
        cursor: all ranks'.
        rule: of the pool's ranks together.
        num_ahead: batches for each of them at once, far from the end.
        left: work that others still leave to these ranks, beside the pool's own, by :meth:`ClaimRule.left_beside`.
    """

    cursor: Cursor
    rule: ClaimRule
    num_ahead: int
    position: int = 0
    stop: int = 0
    left: int = 0

    @property
    def is_open(self) -> bool:
        """Whether there is anything left, here or behind it."""
        return super().is_open or self.cursor.is_open

    def take(self, now: float, size: Callable[[int], int]) -> tuple[float, int]:
        """Serves a claim, for which the pool may have to be filled; whoever comes meanwhile waits."""
        served = self.free_s = (now if now > self.free_s else self.free_s) + self.service_s
        if self.position == self.stop:
            trip_s, together = self.cursor.trip_s, functools.partial(self.rule.size_together, num_ahead=self.num_ahead)
            answered, taken = self.cursor.take(served + trip_s, together)
            served = self.free_s = answered + trip_s
            if not taken:
                return served, 0
            left = self.cursor.stop - self.cursor.position
            self.position, self.stop, self.left = 0, taken, self.rule.left_beside(left, taken)
        held = self.stop - self.position
        wanted = min(size(self.left + math.ceil(held / self.rule.speed_share)), held)
        wanted = held if wanted and held - wanted < self.rule.least else wanted
        self.position += wanted
        return served, wanted


@dataclass
class Times:
    """What the ranks did in a round up to its merge: numbers by rank.

    Attributes:
        busy_s: seconds in steps.
        claim_s: seconds waiting for batches.
        end_s: second at which the rank has computed its last batch and knows that there is no other.
        samples: samples computed.
        steps: steps made.
    """

    busy_s: list[float] = field(default_factory=list)
    claim_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def play_claims(
    start_s: float,
    cursors: Sequence[Cursor],
    rules: Sequence[ClaimRule],
    steps: StepTimes,
    *,
    total_work: int,
    first_batch_s: float,
) -> Times:
    """Plays a round of claims as events, the earliest first.

    As in a real run, a rank claims its next batch when the one before begins to compute, and has nothing to do when that is
    over before the claim is answered. Near the end it may leave the rest to others.

    Args:
        start_s: second at which all ranks begin.
        cursors: where each rank claims; ranks may share one.
        rules: each rank's size of claims.
        steps: how long steps take.
        total_work: work of the round, over all ranks.
        first_batch_s: seconds from a rank's first claim to its batch.
    """
    count = len(rules)
    times = Times([0.0] * count, [0.0] * count, [start_s] * count, [0] * count, [0] * count)
    busy_s, claim_s, end_s, samples, made = times.busy_s, times.claim_s, times.end_s, times.samples, times.steps
    pending = [0] * count
    events = [(start_s + cursor.trip_s, rank) for rank, cursor in enumerate(cursors)]
    heapq.heapify(events)

    def size_for(rank: int, remaining: int) -> int:
        others = total_work - remaining - samples[rank]
        return rules[rank].claim(remaining, pending=pending[rank], others_claimed=others)

    while events:
        now, rank = events[0]
        cursor = cursors[rank]
        served, size = cursor.take(now, functools.partial(size_for, rank))
        begin = served + cursor.trip_s
        if not size and pending[rank] and cursor.is_open:
            # It leaves the rest to others, and asks again when its batch is computed.
            pending[rank] = 0
            heapq.heapreplace(events, (max(begin, end_s[rank]) + cursor.trip_s, rank))
            continue
        if not made[rank]:
            begin += first_batch_s
        if begin > end_s[rank]:
            claim_s[rank] += begin - end_s[rank]
        else:
            begin = end_s[rank]
        if not size:
            end_s[rank] = begin
            steps.leave(rank)
            heapq.heappop(events)
            continue
        seconds = steps.one(rank, size)
        busy_s[rank] += seconds
        samples[rank] += size
        made[rank] += 1
        end_s[rank] = begin + seconds
        pending[rank] = size
        heapq.heapreplace(events, (begin + cursor.trip_s, rank))
    return times
