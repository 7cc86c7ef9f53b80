"""What the ranks of ``local`` decide together after a round: merge weights, batch sizes, memory ceilings, and when to merge next.

Every rank has the same gathered statistics and so decides the same; the simulator drives the same object in virtual time.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Protocol

import numpy as np

from hvd_adaptive.algorithm.batch_sizes import next_batch_sizes, speed_shares
from hvd_adaptive.algorithm.merge_period import (
    LEAST_MERGES_AN_EPOCH,
    NARROW_LINK,
    STEPS_BESIDE_MERGES,
    STEPS_OF_SHORT_ROUNDS,
    MergePeriod,
    are_alike,
    part_of_short_rounds,
)
from hvd_adaptive.algorithm.merge_weights import merge_weights
from hvd_adaptive.algorithm.micro_batches import multiple
from hvd_adaptive.algorithm.speed_model import Damping, SpeedModel
from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.algorithm.world_scale import planned_mega_batch
from hvd_adaptive.config import Config

log = logging.getLogger(__name__)

# Rounds, about, by whose speeds ranks are alike or not.
_REMEMBERED_ROUNDS = 4
# Merges go beside steps where rounds with one merge would be so many times as long as short ones, so that it takes its share.
_LONG_ROUNDS = 1.5
# Rounds with one merge that tell what it takes, before there are several.
_LEAST_MEASURED = 2
# So much of a round the sums of its merges may take beside steps. There are half as many merges where in so many such rounds
# every rank waited so much of the time for sums: a link may carry one quickly, and not many after each other.
_SUMS_PART, _CROWDED_ROUNDS, _CROWDED_PART = 2 / 3, 2, 0.25
# Seconds of steps between two looks whether a round was closed, where ranks do not claim each batch.
_STRETCH_S = 2.0
# Seconds that each round costs, however long it is: a first batch is read while its rank waits.
_COSTS_OF_A_ROUND = ("merge_s", "control_s", "first_batch_s")


class CompletedRound(Protocol):
    """A round whose merge is over."""

    @property
    def train_s(self) -> float: ...  # noqa: D102

    @property
    def num_samples(self) -> int: ...  # noqa: D102

    @property
    def stats(self) -> Gathered: ...  # noqa: D102


def round_weights(config: Config, gathered: Gathered) -> Array:
    """Returns the weight of each rank's delta, shape (world_size,).

    Raises:
        RuntimeError: on every rank alike, if no rank is finite.
    """
    finite = gathered["finite"] > 0
    if finite.any() and not gathered["num_updates"][finite].any():
        # Nothing that can be merged has moved: the ranks' loops left out all batches, or only ranks that broke had any. These
        # go on from the global model as after any round, and ten such rounds in a row end the job.
        return finite / finite.sum()
    return merge_weights(
        config,
        num_updates=gathered["num_updates"],
        num_samples=gathered["num_samples"],
        batch_sizes=gathered["batch_size"],
        finite=finite,
        norm_per_parameter=gathered["norm_per_parameter"],
    )


class RoundControl:
    """The decisions between two rounds.

    Args:
        config: the rules.
        world_size: number of ranks.
        speaks: whether this rank is the one that logs.
        short_rounds: whether rounds are as short as ranks that differ let them be: `part_of_short_rounds`.
        merges_from: updates of the fastest rank from which on they have several merges, where that is known to help; None: they
            have them anyway.
        can_narrow: whether merges can have fewer bits.

    Attributes:
        ceilings: largest batch size of each rank that memory allows, as far as is known, samples, shape (world_size,);
            infinite where no batch has failed.
        merges: of the whole model in the next round, if that is as long as planned.
        is_narrow: merges have fewer bits from now on, as they take so long.
    """

    def __init__(
        self,
        config: Config,
        world_size: int,
        *,
        speaks: bool,
        short_rounds: bool = False,
        merges_from: float | None = None,
        can_narrow: bool = False,
    ) -> None:
        self._config = config
        self._short_rounds = short_rounds
        self._merges_from = merges_from
        self._can_narrow = can_narrow
        self.speaks = speaks
        self.ceilings = np.full(world_size, np.inf)
        self._speed_model = SpeedModel(world_size)
        self._damping = Damping(world_size)
        self._planned = planned_mega_batch(config, world_size)
        self._period = MergePeriod(config.merge_period or "fixed", start=self._planned, share=config.merge_share)
        self.merges = config.merges_per_round or 1
        if merges_from is not None and self.merges > 1:
            self.merges = 1
            self._period.mega_batch = STEPS_OF_SHORT_ROUNDS * world_size * config.batch_size
        self._num_updates = 0.0
        self._merges_take_long = self.is_narrow = False
        # Seconds of the last rounds' merges, where they had one.
        self._merge_s: deque[float] = deque(maxlen=3)
        self._most_made, self._made, self._num_crowded = config.merges_per_round or 1, 1, 0
        self._speed_shares = np.full(world_size, 1 / world_size)
        self._train_s = 0.0
        self._num_samples = 0
        self._complained = False

    @property
    def takes_whole_batches(self) -> bool:
        """Whether ranks claim whole batches only, where the length of a round is not set. Ranks that are alike end it together
        without smaller ones at its end. Each of these costs a step, which takes a GPU about as long as a whole one, and blurs
        BatchNorm's statistics."""
        config = self._config
        plain = config.dispatch == "dynamic" and config.size_rule == "fixed" and config.work == "samples"
        plain = plain and config.island is None and config.logical_ranks is None and not config.repeatable
        return plain and (self._short_rounds or config.mega_batch is None) and are_alike(self._speed_shares)

    @property
    def mega_batch(self) -> int:
        """Samples of the next round over all ranks."""
        return self._period.mega_batch

    def merges_of(self, num_samples: int, batch_sizes: Array) -> int:
        """Returns the merges of a round, which may be shorter than planned: between two of them each rank makes a step at least,
        and in short rounds three. Where nobody has set them, the link carries as many beside the steps.

        Args:
            num_samples: of the round over all ranks.
            batch_sizes: the ranks', samples, shape (world_size,).
        """
        least = (STEPS_BESIDE_MERGES if self._short_rounds else 1) * float(batch_sizes.sum())
        self._made = max(1, min(self.merges, round(num_samples / least), self._most_merges(num_samples)))
        return self._made

    def stretch_of(self, num_samples: int) -> int:
        """Returns how many steps ranks make without asking whether the round goes on: about two seconds of them.

        Args:
            num_samples: of a step over all ranks.
        """
        step_s = self._period.sample_s * num_samples
        # Before any is known, they ask at each step.
        return max(1, int(_STRETCH_S / step_s)) if step_s else 1

    def _most_merges(self, num_samples: int) -> int:
        """Returns how many merges the link carries beside the steps of a round of so many samples."""
        if self._merges_from is None or not self._merge_s:
            return self._most_made
        beside_s = _SUMS_PART * num_samples * self._period.sample_s
        return min(self._most_made, int(beside_s / max(1e-9, float(np.median(self._merge_s)))))

    def next_batch_sizes(self, sizes: Array, gathered: Gathered, *, warming_up: bool) -> Array:
        """Returns the batch sizes of the next round, shape (world_size,).

        Args:
            sizes: those of this round.
            gathered: the round's statistics.
            warming_up: sizes are the warm-up's, and stay but for memory.
        """
        self._learn_ceilings(gathered["ceiling"])
        config = self._config
        self._speed_model.observe(gathered["num_steps"], gathered["work"], gathered["busy_s"])
        low, high = config.batch_size_bounds
        if not gathered["num_samples"].any():
            return np.minimum(sizes, self.ceilings)
        if not warming_up and config.size_rule == "proportional":
            sizes = self._proportional(sizes, gathered, low=low, high=high)
        elif not warming_up:
            sizes = next_batch_sizes(
                config.size_rule,
                sizes,
                gathered["num_updates"],
                min_batch_size=low,
                max_batch_size=high,
                step=config.batch_size_step_samples,
            )
        return np.minimum(sizes, self.ceilings)

    def _proportional(self, sizes: Array, gathered: Gathered, *, low: float, high: float) -> Array:
        upper = np.minimum(high, self.ceilings)
        lower = np.minimum(low, upper)
        total = min(self._config.batch_size * len(sizes), upper.sum())
        work_per_sample = gathered["work"].sum() / gathered["num_samples"].sum()
        target = self._speed_model.equalize(
            total * work_per_sample, lower * work_per_sample, upper * work_per_sample
        )
        return self._damping.next(sizes, target / work_per_sample, lower=lower, upper=upper)

    def _learn_ceilings(self, reported: Array) -> None:
        ceilings = np.where(reported > 0, reported, np.inf)
        lowered = ceilings < self.ceilings
        self.ceilings = np.minimum(self.ceilings, ceilings)
        if lowered.any() and self.speaks:
            log.warning(
                "batches did not fit into memory and were computed again in smaller parts; from now on ranks %s take at most %s "
                "samples a batch. Set max_batch_size to %d to save the lost time.",
                np.flatnonzero(lowered).tolist(),
                ", ".join(f"{ceiling:.0f}" for ceiling in ceilings[lowered]),
                int(self.ceilings.min()),
            )

    def after_round(self, record: CompletedRound, dataset_size: int) -> None:
        """Sets the next mega-batch from a round whose merge is over."""
        config, part = self._config, 1.0
        num_updates, stats = record.stats["num_updates"], record.stats
        # Not by their updates: who is given equally many makes them, however long it takes. Those of one round vary.
        waits_s = np.maximum(0.0, stats["claim_s"] - stats["first_batch_s"])
        shares = speed_shares(num_updates, stats["busy_s"] + waits_s)
        self._speed_shares += (shares - self._speed_shares) / _REMEMBERED_ROUNDS
        if self._made > 1 and self._merges_from is not None:
            is_crowded = stats["merge_s"].min() > _CROWDED_PART * (record.train_s - self._train_s)
            self._num_crowded = self._num_crowded + 1 if is_crowded else 0
            if self._num_crowded == _CROWDED_ROUNDS:
                self._most_made, self._num_crowded = self._made // 2, 0
        if self._short_rounds:
            self._num_updates += float(num_updates.max())
            if self._merges_from is not None:
                may = self._num_updates >= self._merges_from and self.takes_whole_batches
                planned = max(self.mega_batch, self._planned)
                is_known = len(self._merge_s) >= _LEAST_MEASURED
                fits = is_known and self._most_merges(min(planned, max(1, dataset_size // LEAST_MERGES_AN_EPOCH))) > 1
                self.merges = (config.merges_per_round or 1) if self._merges_take_long and may and fits else 1
            part = part_of_short_rounds(num_updates, config, merges=self.merges)
        costs_s = np.sum([stats[name] for name in _COSTS_OF_A_ROUND], axis=0)
        self._period.observe(
            num_samples=record.num_samples - self._num_samples,
            round_s=record.train_s - self._train_s,
            # Within a round ranks wait for the sums of the slowest one, and longer rounds would not shorten that.
            communication_s=float(costs_s.min() if self._made > 1 else costs_s.max()),
            largest=dataset_size // LEAST_MERGES_AN_EPOCH,
            part=part,
        )
        if self._made == 1:
            # Rounds with several hide what merges take.
            self._merge_s.append(float(stats["merge_s"].max()))
            if self._can_narrow and not self.is_narrow and self._period.stretch > NARROW_LINK:
                self.is_narrow = True
                self._merge_s.clear()
        if self.merges == 1:
            self._merges_take_long = self.mega_batch > _LONG_ROUNDS * part * self._planned
        self._num_samples, self._train_s = record.num_samples, record.train_s
        taken = self._period.communication_share
        at_limit = self.mega_batch >= max(self._planned, dataset_size // LEAST_MERGES_AN_EPOCH)
        # One rank has no link, and no round is longer than an epoch.
        helps = len(self.ceilings) > 1 and self.mega_batch < dataset_size
        if config.merge_period == "auto" and at_limit and helps and taken > 2 * config.merge_share:
            if self.speaks and not self._complained:
                log.warning(
                    "merges, and waiting for the first batch of each round, take %.0f%% of the time, although a round has %d of "
                    "the %d samples of an epoch, the most that merge_period 'auto' chooses here. Set a larger mega_batch for "
                    "longer rounds; a faster link or a smaller model makes merges shorter.",
                    100 * taken, self.mega_batch, dataset_size,
                )  # fmt: skip
            self._complained = True

    def state_dict(self) -> dict[str, Any]:
        """Returns what :meth:`load_state_dict` takes; the same on every rank."""
        # Of rounds so far: before the first one there are none.
        speeds = {"speed_shares": self._speed_shares.copy()} if self._num_samples else {}
        return {
            **speeds,
            "ceilings": self.ceilings.copy(),
            "batch_size": self._config.batch_size,
            "speed_model": self._speed_model.state_dict(),
            "damping": self._damping.state_dict(),
            "period": self._period.state_dict(),
            "train_s": self._train_s,
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state. One of another number of ranks gives its merge period only: other ranks have other speeds
        and memories, and learn them again. Whether merges go beside steps is found out anew: the link may be another one."""
        self._period.load_state_dict(state["period"])
        self._train_s, self._num_samples = float(state["train_s"]), int(state["num_samples"])
        if len(state["ceilings"]) == len(self.ceilings):
            self.ceilings = np.array(state["ceilings"], dtype=np.float64)
            self._speed_model.load_state_dict(state["speed_model"])
            self._damping.load_state_dict(state["damping"])
            # Older states have none.
            self._speed_shares = np.array(state.get("speed_shares", self._speed_shares), dtype=np.float64)

    def resumed_batch_sizes(self, sizes: Array, state: dict[str, Any]) -> Array:
        """Returns the batch sizes that saved ones are here, where another ``reference_ranks`` may have changed all of them.

        Args:
            sizes: of as many ranks, when ``state`` was saved.
            state: which this control has loaded.
        """
        if state["batch_size"] == self._config.batch_size:
            return sizes.copy()
        scaled = sizes * self._config.batch_size / state["batch_size"]
        if (unit := self._config.micro_batch_size) is not None:
            scaled = np.array([multiple(size, unit) for size in scaled], dtype=np.float64)
        return np.minimum(np.clip(scaled, *self._config.batch_size_bounds), self.ceilings)
