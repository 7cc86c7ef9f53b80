"""One rank's statistics of a round, and the record of a round over all ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.engine.claims import Claim
from hvd_adaptive.engine.merge import MergeStats

# Statistics that are of no use in a file.
_NOT_RECORDED = (
    "loss_sum", "loss_samples", "train_s", "stop", "checkpoint_busy", "preempted", "state_checksum", "state_due", "base",
    "base_lr",
)  # fmt: skip


@dataclass(slots=True)
class RoundStats(MergeStats):
    """What one rank did in a round, beside the fields of :class:`MergeStats`, which merges need.

    Attributes:
        handed_samples: samples of the batches that the rank's loop was given, whether it computed them or left them out; not of
            those that were taken back because they did not fit into memory.
        num_steps: local steps, whatever their size.
        work: work computed, in the unit of the cursor.
        busy_s: seconds in steps.
        claim_s: seconds waiting for a claim and its batch.
        first_batch_s: those of them before the round's first batch, which only workers read ahead; of ``local``.
        wait_s: seconds waiting for other ranks.
        merge_s: seconds of the merge, waiting excluded, and averages of Adam's moments that have a limit of their own.
        average_s: seconds of these averages.
        control_s: seconds of statistics, weights and rebalancing.
        lr: learning rate of the last step.
        base_lr: the one that the optimizer has between rounds; 0 where that is a tensor.
        loss_sum: sum of the batches' mean losses times their samples, or times their targets where these were counted.
        loss_samples: samples, or targets, behind ``loss_sum``.
        train_s: seconds of training so far.
        stop: 1 if the rank wants its loop to end.
        skipped_steps: steps left out because the ranks' reduced gradients held NaN or Inf.
        ceiling: largest batch size, samples, after a batch that did not fit into memory; 0: none failed.
        merge_rows: rows of sparse parameters that the merge exchanged; 0 where none are told apart.
        checkpoint_s: seconds that training stood still for a checkpoint before the round; part of ``train_s``.
        checkpoint_write_s: seconds of writing a checkpoint beside the training, where a write ended in the round.
        checkpoint_busy: 1 while the rank's last checkpoint is being written.
        preempted: the signal that has announced the job's end to the rank; 0: none.
        payload_bytes: bytes that the rank put into the round's exchanges of models, gradients and buffers: dense values once,
            whatever the algorithm makes of them on the wire; rows of sparse ones with their indices; encoded ones as encoded.
        equal_share_s: seconds of its own that a step with an equal share of the global batch would take the rank, by what
            strategy ``sync`` has learnt of its steps; 0: not known.
    """

    handed_samples: float = 0.0
    num_steps: float = 0.0
    work: float = 0.0
    busy_s: float = 0.0
    claim_s: float = 0.0
    first_batch_s: float = 0.0
    wait_s: float = 0.0
    merge_s: float = 0.0
    average_s: float = 0.0
    control_s: float = 0.0
    lr: float = 0.0
    base_lr: float = 0.0
    loss_sum: float = 0.0
    loss_samples: float = 0.0
    train_s: float = 0.0
    stop: float = 0.0
    skipped_steps: float = 0.0
    ceiling: float = 0.0
    merge_rows: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_write_s: float = 0.0
    checkpoint_busy: float = 0.0
    preempted: float = 0.0
    payload_bytes: float = 0.0
    equal_share_s: float = 0.0

    def add_step(self, num_samples: int, work: int, loss: float | None, loss_weight: float | None = None) -> None:
        """Counts a step.

        Args:
            num_samples: samples of its batch.
            work: their work.
            loss: the batch's mean loss, where it was reported.
            loss_weight: what it is a mean over; None: the samples.
        """
        self.num_samples += num_samples
        self.num_steps += 1
        self.work += work
        if loss is not None:
            weight = num_samples if loss_weight is None else loss_weight
            self.loss_sum += loss * weight
            self.loss_samples += weight


@dataclass(frozen=True, slots=True)
class RoundClaims:
    """One round as it was.

    Attributes:
        round: its number.
        data: what the rows are of, as text.
        num_samples: samples of the round, over all ranks.
        num_planned: those that it would have had if it had not been closed early.
        claims: what each rank took, in its order.
        batch_size: of each rank.
        lr: learning rate of each rank's last step.
        weight: merge weight of each rank.
        model_hash: SHA-256 of the merged model, where it was taken.
    """

    round: int
    data: str
    num_samples: int
    num_planned: int
    claims: list[list[Claim]]
    batch_size: list[float]
    lr: list[float]
    weight: list[float]
    model_hash: str | None

    @property
    def end(self) -> int | None:
        """The work before which all was taken, where the round was closed early; else None."""
        if self.num_samples == self.num_planned:
            return None
        return max(claim[1] for claims in self.claims for claim in claims)


@dataclass(slots=True)
class RoundRecord:
    """One completed round, the same on every rank.

    Attributes:
        round: number of the round, from 0.
        epoch: epochs consumed after the round, fractional.
        train_s: seconds of training after the round: evaluation and other pauses excluded.
        num_samples: samples consumed by the run after the round.
        loss: mean loss over the round's samples, or its targets where these were counted; None where it was not reported.
        weight: merge weight of each rank, shape (world_size,).
        payload_bytes: bytes that a rank put into exchanges in the round, the mean over ranks.
        stats: the ranks' statistics: the fields of :class:`RoundStats` by name, shape (world_size,).
        model_hash: SHA-256 of the merged model in rounds where the ranks compared it, else None.
        stragglers: the ranks that are slower than ``Config.straggler_limit``: which, where, against what, their seconds.
        claims: the round for a recording, where the run is recorded or replayed.
    """

    round: int
    epoch: float
    train_s: float
    num_samples: int
    loss: float | None
    weight: Array
    payload_bytes: int
    stats: Gathered
    model_hash: str | None = None
    claims: RoundClaims | None = None
    stragglers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, stats: Gathered, **others: Any) -> RoundRecord:
        """Returns a record whose loss, seconds and bytes are those of the statistics; ``others`` are its other attributes."""
        loss_samples = stats["loss_samples"].sum()
        return cls(
            train_s=float(stats["train_s"].max()),
            loss=float(stats["loss_sum"].sum() / loss_samples) if loss_samples else None,
            # One rank sends nothing.
            payload_bytes=round(float(stats["payload_bytes"].mean())) if len(stats["payload_bytes"]) > 1 else 0,
            stats=stats,
            **others,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the record for rounds.jsonl: plain numbers, and one list over ranks a statistic."""
        ranks: dict[str, Any] = {
            {"num_samples": "samples"}.get(name, name): _numbers(values)
            for name, values in self.stats.items()
            if name not in _NOT_RECORDED
        }
        ranks["weight"] = self.weight.tolist()
        return {
            "round": self.round,
            "epoch": round(self.epoch, 6),
            "train_s": round(self.train_s, 6),
            "samples": self.num_samples,
            "loss": self.loss,
            "weight_sum": float(self.weight.sum()),
            "payload_bytes": self.payload_bytes,
            "model_hash": self.model_hash,
            "preempted": bool(self.stats["preempted"].any()),
            "stragglers": self.stragglers,
            "ranks": ranks,
        }


def _numbers(values: Array) -> list[float]:
    """Returns rounded numbers for JSON; whole ones as such, as thousands of those take a third of the time to write."""
    rounded = values.round(6)
    whole = bool(np.isfinite(rounded).all()) and bool((np.rint(rounded) == rounded).all()) and float(abs(rounded).max()) < 2**53
    return rounded.astype(np.int64).tolist() if whole else rounded.tolist()
