"""What the ranks tell each other about a loader, and the shares that follow: pure functions of gathered numbers.

All goes in one vector that Horovod sums: a row a rank, zeros elsewhere, so that the sum holds every row. Other than an
allgather this works beside ranks that have called hvd.join() (their rows stay zero) and under Gloo. Behind the rows stands
rank 0's proposal, derived from the exchange before: ranks that derived it each for themselves could differ in the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_adaptive.algorithm.share_balance import ShareBalance, StepWindow
from hvd_adaptive.algorithm.statistics import Array, Gathered, Statistics
from hvd_adaptive.wrap.reasons import Reason, unmask

# What shares follow, and of how many steps at the least: a step or two say more of the machine's other work than of speeds.
_POOLED = ("timed_steps", "timed_samples", "timed_global_samples", "compute_s", "compute_sq")
_LEAST_STEPS = 4
# What unequal shares must save to be tried at the first look that shows it. On a machine that does other things as well a few
# steps show a rank a fifth slower than it is.
_SURE_GAIN = 0.3


@dataclass
class Window(Statistics):
    """One rank's numbers since the last exchange; ``present`` is 0 for one that has called hvd.join().

    ``num_samples`` and ``global_samples`` are of batches with unequal shares.
    """

    present: int = 1
    reasons: int = 0
    num_delivered: int = 0
    num_handed: int = 0
    checksum: int = 0
    dataset: int = 0
    num_samples: int = 0
    global_samples: int = 0
    num_steps: int = 0
    timed_steps: int = 0
    timed_samples: int = 0
    timed_global_samples: int = 0
    compute_s: float = 0.0
    compute_sq: float = 0.0
    wait_s: float = 0.0
    smallest: int = 1
    num_batches: int = 0
    wall_steps: int = 0
    wall_s: float = 0.0
    rates: int = 0
    adds_up: int = 0
    targets: int = 0
    are_weighted: int = 0


def pack(window: Window, proposal: Array, *, world_size: int, rank: int) -> Array:
    """Returns this rank's addend to the exchanged vector, the table of statistics and the proposal behind each other."""
    table = window.table(rank=rank, world_size=world_size)
    return np.concatenate([table.ravel(), proposal if rank == 0 else np.zeros(world_size)])


def unpack(summed: Array, *, world_size: int) -> tuple[Gathered, Array]:
    """Returns the ranks' numbers by field, each of shape (world_size,), and rank 0's proposal, shape (world_size,)."""
    return Window.by_name(summed[:-world_size].reshape(world_size, -1)), summed[-world_size:]


def judge(gathered: Gathered) -> set[Reason]:
    """Returns why shares must be equal; the same on every rank.

    Raises:
        RuntimeError: if the shares of the last batches did not add up to the global batches: samples were lost or counted twice.
    """
    if not gathered["present"].all():
        return {Reason.JOIN}
    reasons = unmask(int(np.bitwise_or.reduce(gathered["reasons"].astype(np.int64))))
    if len(set(gathered["num_delivered"])) > 1:
        reasons.add(Reason.OUT_OF_STEP)
    elif not reasons and (len(set(gathered["checksum"])) > 1 or not gathered["checksum"].all()):
        reasons.add(Reason.UNION)
    if len(set(gathered["dataset"])) > 1:
        reasons.add(Reason.DATASET)
    if len(set(gathered["rates"])) > 1:
        reasons.add(Reason.RATES)
    if Reason.NO_FORWARD not in reasons and len(set(gathered["adds_up"])) > 1:
        reasons.add(Reason.SUM_LOSS)
    codes = set(gathered["targets"])
    if Reason.NO_FORWARD not in reasons and gathered["are_weighted"].any() and (len(codes) > 1 or 0 in codes):
        reasons.add(Reason.WEIGHTED_LOSS)
    expected = gathered["global_samples"]
    if not reasons and (gathered["num_samples"].sum() != expected[0] or (expected != expected[0]).any()):
        raise RuntimeError(
            f"the ranks computed {gathered['num_samples'].astype(int).tolist()} samples of global batches of "
            f"{expected.astype(int).tolist()}: shares did not add up. This is a fault in hvd_adaptive or in the "
            "script's sampler; run with --shares equal and report it"
        )
    return reasons


class Proof:
    """Whether unequal shares make steps shorter, by the wall clock: if not, equal ones are better.

    The model of the ranks' speeds may be wrong about ranks that share their cores, about small batches, or for a few steps at the
    start. So steps with unequal shares are compared with those that had equal ones.
    """

    # What must be saved; steps until it is judged; and what counts of the windows before.
    LEAST_GAIN = 0.03
    STEPS = 16.0
    KEPT = 0.7
    # Looks for which equal shares are kept when they were better; twice as many each time in a row.
    FIRST_REST = 4

    def __init__(self) -> None:
        # Steps and their seconds, with equal shares and with others.
        self._equal, self._other = np.zeros(2), np.zeros(2)
        self._rest, self._next_rest = 0, self.FIRST_REST

    @property
    def is_resting(self) -> bool:
        """Whether equal shares are kept because others were no better."""
        return self._rest > 0

    def rejects(self, gathered: Gathered) -> bool:
        """Takes in a window; returns whether the shares must be equal now."""
        self._rest = max(self._rest - 1, 0)
        seen = np.array([gathered["wall_steps"].mean(), gathered["wall_s"].mean()])
        samples = gathered["timed_samples"]
        if not seen[0] or not samples.any():
            return self._rest > 0
        if np.ptp(samples) == 0:
            self._equal = self.KEPT * self._equal + seen
            return self._rest > 0
        if self._rest:
            # What was on its way when they were given up.
            return True
        self._other = self.KEPT * self._other + seen
        if self._other[0] < self.STEPS or not self._equal[0]:
            return False
        saving = 1.0 - (self._other[1] / self._other[0]) / (self._equal[1] / self._equal[0])
        if saving > self.LEAST_GAIN:
            self._next_rest = self.FIRST_REST
            return False
        self._other = np.zeros(2)
        self._rest, self._next_rest = self._next_rest, 2 * self._next_rest
        return True


class Controller:
    """Rank 0's: turns gathered numbers into the next proposal.

    Args:
        world_size: number of ranks.
        pinned: fixed proportions; None: by measured speeds.

    Attributes:
        proposal: each rank's part of the global batch, shape (world_size,); zeros stand for equal shares.
        why_equal: why shares are equal now, once speeds are known; None if they are not.
    """

    def __init__(self, world_size: int, *, pinned: tuple[float, ...] | None) -> None:
        self._pinned = None if pinned is None else np.array(pinned) / sum(pinned)
        self._balance = ShareBalance(world_size)
        self._sizes: Array | None = None
        self._pool = {name: np.zeros(world_size) for name in _POOLED}
        self._proof = Proof()
        self._is_suspected = False
        self.world_size = world_size
        self.why_equal: str | None = None
        self._why_next: str | None = None
        self.proposal = np.zeros(world_size) if self._pinned is None else self._pinned

    def propose(self, gathered: Gathered, upper: int | None) -> None:
        """Takes in a window and changes the proposal.

        Args:
            gathered: the ranks' numbers by field.
            upper: most samples in a batch of any rank; None: no bound.
        """
        # The proposal of the exchange before holds from this one on.
        self.why_equal = self._why_next
        pool = {name: self._pool[name] + gathered[name] for name in _POOLED}
        steps = pool["timed_steps"]
        if steps.min() < _LEAST_STEPS:
            self._pool = pool
            return
        self._pool = {name: np.zeros(self.world_size) for name in _POOLED}
        window = StepWindow(steps, pool["timed_samples"], pool["compute_s"], pool["compute_sq"])
        self._balance.learn(window)
        if self._pinned is not None or not self._balance.is_ready:
            return
        total = float(pool["timed_global_samples"][0] / steps[0])
        low = np.full(self.world_size, min(float(gathered["smallest"].max()), total / self.world_size))
        high = np.full(self.world_size, np.inf if upper is None else max(upper, total / self.world_size))
        equal = np.full(self.world_size, total / self.world_size)
        sizes = equal if self._sizes is None else self._sizes * (total / self._sizes.sum())
        if self._proof.rejects(gathered):
            self._sizes, self._is_suspected = equal, False
            self._balance.end_trial()
        else:
            self._sizes = self._moved(sizes, equal, self._balance.next(sizes, lower=low, upper=high))
        self.proposal = self._sizes / self._sizes.sum()
        no_better = f"others have not made steps {self._proof.LEAST_GAIN:.0%} shorter by the wall clock"
        alike = "the ranks' speeds do not differ by more than noise"
        if self._balance.is_trial:
            alike = "equal ones are tried for a look"
        elif self._is_suspected:
            alike = "another look must confirm that the ranks' speeds differ"
        self._why_next = None if np.ptp(self.proposal) > 1e-9 else no_better if self._proof.is_resting else alike

    def _moved(self, sizes: Array, equal: Array, target: Array) -> Array:
        """Returns the next sizes: a first step away from equal ones, for a modest gain, must be wanted in more than one look."""
        if np.ptp(sizes) > 1e-9 * sizes.max() or np.ptp(target) <= 1e-9 * target.max():
            self._is_suspected = False
            return target
        gain = 1.0 - float(self._balance.seconds(target).max() / self._balance.seconds(equal).max())
        if gain >= _SURE_GAIN or self._is_suspected or self._balance.is_sure:
            self._is_suspected = False
            return target
        self._is_suspected = True
        return sizes
