"""How much is computed between two merges: a fixed amount, or what keeps communication a small part."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.combinations import goes_with_merges_beside_steps
from hvd_adaptive.config import Config

# A hiccup of one merge must not double the rounds: the median of so many counts.
_NUM_MEASURED = 3
# A period changes at most by this factor from one round to the next.
_MAX_FACTOR = 2.0
# Rounds of a measured merge period leave room for this many merges an epoch.
LEAST_MERGES_AN_EPOCH = 4
# Where no mega-batch was set.
DEFAULT_MERGES_AN_EPOCH = 8
# What the fastest rank computes between two merges while these take at most a tenth of the time, where short rounds learn better
# from equally many samples: benchmarks/records/2026-11-24-period.md, and 2026-11-25-short-rounds.md for ranks that differ.
STEPS_OF_SHORT_ROUNDS = 5
# The same where merges go beside steps, so many in a round: benchmarks/records/2026-11-26-beside-steps.md.
STEPS_BESIDE_MERGES, MERGES_PER_ROUND = 3, 8
# Updates of the fastest rank before the outer step of Adam and its kin begins, and before merges of a whole model go beside
# steps. While a model changes fast, momentum over merges and late sums do lasting harm:
# benchmarks/records/2026-11-25-late-outer-step.md, and 2026-11-26-beside-steps.md.
ADAM_START = 100
# The same for merges in fragments, whose sums are less late: when some rounds have told what merges take. Seldom merges do more
# harm: benchmarks/records/2026-11-27-late-sums.md.
FRAGMENTS_START = 20
# Merges get fewer bits where rounds in which they take their share of the time would be so many times as long as short ones:
# benchmarks/records/2026-11-30-two-bits.md.
NARROW_LINK = 4.0
# Ranks are alike where the slowest has so much of the fastest one's speed.
_ALIKE = 0.75
_SHORT_ROUNDS_SHARE = 0.1


def capped_mega_batch(config: Config, planned: int, dataset_size: int, world_size: int) -> int:
    """Returns the samples of the next round: where none were set, few data still have eight merges an epoch.

    Args:
        config: the rules.
        planned: samples of the round on data of any size.
        dataset_size: samples of an epoch.
        world_size: number of ranks; each has a batch in a round.
    """
    if config.mega_batch is not None or config.merge_period == "auto":
        return planned
    return min(planned, max(-(-dataset_size // DEFAULT_MERGES_AN_EPOCH), world_size * config.batch_size))


def with_short_rounds(config: Config, world_size: int, *, beside_steps: bool) -> Config:
    """Returns the configuration with few steps between two merges, more where merges take long, unless their number is set.

    After few steps the ranks' models have hardly moved apart, so that less is lost by their average.

    Args:
        config: the rules.
        world_size: number of ranks.
        beside_steps: whether merges may go beside steps, so that a round can have several.
    """
    if config.mega_batch is not None or config.merge_period == "fixed":
        return config
    share = config.merge_share if config.merge_period == "auto" else _SHORT_ROUNDS_SHARE
    beside_steps = beside_steps and world_size > 1 and config.dispatch == "dynamic"
    if config.merges_per_round is None and beside_steps and goes_with_merges_beside_steps(config):
        config = dataclasses.replace(config, merges_per_round=MERGES_PER_ROUND)
    samples = steps_of_short_rounds(config) * world_size * config.batch_size
    return dataclasses.replace(config, mega_batch=samples, merge_period="auto", merge_share=share)


def steps_of_short_rounds(config: Config) -> int:
    """Returns a rank's steps of a short round."""
    return STEPS_BESIDE_MERGES * (config.merges_per_round or 1) if config.merges_beside_steps else STEPS_OF_SHORT_ROUNDS


def least_mega_batch(communication_s: float, rest_s: float, *, share: float) -> float:
    """Returns the fewest samples of a round in which communication takes at most a share of the time.

    Args:
        communication_s: seconds of communication a round.
        rest_s: seconds of everything else a sample, over all ranks, > 0.
        share: in (0, 1).
    """
    return communication_s * (1 - share) / (share * rest_s)


def are_alike(shares: Array) -> bool:
    """Returns whether merges may go beside steps, and ranks take equally many batches. Where one rank is far slower than another,
    sums come late.

    Args:
        shares: of each rank in the ranks' summed speed, shape (world_size,).
    """
    return bool(shares.min() >= _ALIKE * shares.max())


def part_of_short_rounds(num_updates: Array, config: Config, *, merges: int) -> float:
    """Returns how much shorter a short round is where ranks differ: the fastest one makes all steps between two merges, every
    other one at least one.

    Args:
        num_updates: of each rank in a round, shape (world_size,).
        config: the rules.
        merges: of the short round.

    Returns:
        A part of the starting round, in (0, 1].
    """
    steps = STEPS_BESIDE_MERGES if merges > 1 else STEPS_OF_SHORT_ROUNDS
    longer = merges * max(steps / max(1e-9, num_updates.max()), 1 / max(1e-9, num_updates.min()))
    return min(1.0, longer * float(num_updates.mean()) / steps_of_short_rounds(config))


class MergePeriod:
    """The mega-batch of the next round. Every rank feeds it the same gathered numbers and gets the same answer.

    ``fixed``: the starting one. ``auto``: the least for which communication takes at most ``share`` of a round:
    `least_mega_batch`.

    No period is shorter than the starting one, or the part of it that :meth:`observe` is told, nor longer than ``largest``. It at
    most doubles or halves at a time.

    Args:
        rule: ``fixed`` or ``auto``.
        start: samples between two merges over all ranks, > 0.
        share: the part of a round that communication may take, in (0, 1).

    Attributes:
        mega_batch: samples of the next round over all ranks.
        communication_share: the part that communication took, by the median of the last three rounds; 0 before any.
        sample_s: seconds of everything else for a sample over all ranks, by the same rounds; 0 before any.
        stretch: how many times as long as the shortest rounds those are in which communication takes its share; half of it while
            one round was measured, and 0 before.
    """

    def __init__(self, rule: str, *, start: int, share: float) -> None:
        self._rule = rule
        self._start = start
        self._share = share
        self.mega_batch = start
        self.communication_share = self.sample_s = self.stretch = 0.0
        self._has_begun = False
        # Rows of (communication seconds, other seconds a sample, part of the start), the latest last.
        self._measured = np.zeros((0, 3))

    def observe(
        self, *, num_samples: int, round_s: float, communication_s: float, largest: int, part: float = 1.0
    ) -> None:
        """Sets the next mega-batch from the round that is over. The first one counts not: in it connections, kernels and workers
        start, which no later merge waits for.

        Args:
            num_samples: samples of the round over all ranks, > 0.
            round_s: seconds of the round, > 0.
            communication_s: seconds of it that the merge and its control took, waiting for slower ranks excluded.
            largest: samples that no period may pass, unless it starts there.
            part: no period is shorter than this part of the starting one, by what the ranks did in this round; in (0, 1].
        """
        if not self._has_begun:
            self._has_begun = True
            return
        rest_s = max(round_s - communication_s, 1e-9) / num_samples
        self._measured = np.vstack((self._measured, (communication_s, rest_s, part)))[-_NUM_MEASURED:]
        communication_s, rest_s, part = np.median(self._measured, axis=0)
        self.communication_share = float(communication_s / (communication_s + rest_s * num_samples))
        self.sample_s = float(rest_s)
        wanted = self._start * part
        if self._rule == "auto":
            least = least_mega_batch(communication_s, rest_s, share=self._share)
            self.stretch = least / wanted / (2 if len(self._measured) == 1 else 1)
            wanted = max(wanted, least)
        wanted = min(wanted, max(largest, self._start))
        low, high = self.mega_batch / _MAX_FACTOR, self.mega_batch * _MAX_FACTOR
        self.mega_batch = round(min(max(wanted, low), high))

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes."""
        state = {"mega_batch": self.mega_batch, "start": self._start, "measured": self._measured.copy()}
        return state | {"has_begun": self._has_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from the state of another one; its seconds are those of the ranks that measured them.

        Another number of ranks may start at another mega-batch: what became of it is kept in proportion.
        """
        self.mega_batch = round(int(state["mega_batch"]) * self._start / int(state["start"]))
        measured = np.array(state["measured"], dtype=np.float64)
        self._has_begun = bool(state.get("has_begun", True))
        # Older ones know no part of the start: what they measured is measured again.
        self._measured = measured if measured.shape[1:] == (3,) else np.zeros((0, 3))
