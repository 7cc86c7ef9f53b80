"""What a run adds up to: best and final scores, time to target, utilisation, where each rank's time went."""

from __future__ import annotations

import logging
import platform
import resource
from typing import Any

import numpy as np
import torch

from hvd_adaptive import __version__
from hvd_adaptive.config import Config, TrainConfig
from hvd_adaptive.train.calibration import Speeds
from hvd_adaptive.train.records import RoundRecord
from hvd_adaptive.train.session import Session
from hvd_adaptive.transport.base import Transport

log = logging.getLogger(__name__)

_SUMMED = ("busy_s", "wait_s", "claim_s", "merge_s", "control_s", "num_samples", "num_steps")


class Totals:
    """Adds up rounds; the same on every rank.

    Args:
        config: how ranks share and merge.
        train: what is trained.
        transport: the world.
        speeds: each rank's own speed, None where it was not measured.

    Attributes:
        best: scores of the evaluation on the way with the highest P@1; None before the first.
    """

    def __init__(
        self, config: Config, train: TrainConfig, transport: Transport, speeds: Speeds | None
    ) -> None:
        self._config = config
        self._train = train
        self._transport = transport
        self._speeds = speeds
        self._sums = {name: np.zeros(transport.world_size) for name in _SUMMED}
        self._payload_bytes = 0
        self._rounds = 0
        self._round_start_s = 0.0
        self._samples_before = 0
        self.best: dict[str, float] | None = None
        self._best_train_s: float | None = None
        self._target_train_s: float | None = None

    def improves(self, scores: dict[str, float]) -> bool:
        """Returns whether these scores beat the best P@1 so far."""
        return self.best is None or scores["p1"] > self.best["p1"]

    def add_round(
        self, record: RoundRecord, scores: dict[str, float] | None, session: Session
    ) -> dict[str, Any]:
        """Adds a round; returns its line for rounds.jsonl.

        Args:
            record: the round.
            scores: its evaluation, if there was one.
            session: knows what the ranks could have done in the time.
        """
        for name in _SUMMED:
            self._sums[name] += record.stats[name]
        self._payload_bytes += record.payload_bytes
        self._rounds += 1
        if scores and self.improves(scores):
            self.best, self._best_train_s = scores, record.train_s
        target = self._train.target_p1
        if target and scores and scores["p1"] >= target and self._target_train_s is None:
            self._target_train_s = record.train_s
        line = {**record.to_json(), "eval": scores, "utilisation": None}
        if self._speeds is not None:
            capacity = session.capacity_samples(self._speeds.compute, self._round_start_s, record.train_s)
            line["utilisation"] = round((record.num_samples - self._samples_before) / capacity, 4)
        self._round_start_s, self._samples_before = record.train_s, record.num_samples
        return line

    def summary(
        self, session: Session, *, final: dict[str, float], model_hash: str, ranks_agreed: bool, wall_s: float
    ) -> dict[str, Any]:
        """Returns what summary.json holds. COLLECTIVE.

        Args:
            session: the finished session.
            final: scores of the last model on the whole test split.
            model_hash: SHA-256 of this rank's last model.
            ranks_agreed: whether all ranks have that hash.
            wall_s: seconds of the whole run.
        """
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        places = self._transport.allgather_object((self._transport.host, peak_bytes))
        total_s = max(session.train_s, 1e-9)
        summary: dict[str, Any] = {
            "label": self._train.name or self._config.strategy,
            "strategy": self._config.strategy,
            "world_size": self._transport.world_size,
            "hosts": [host for host, _ in places],
            "slowdown": self._config.slowdown,
            "logical_ranks": self._config.logical_ranks,
            "best": self.best or final,
            "best_train_s": self._best_train_s,
            "final": final,
            "target_p1": self._train.target_p1,
            "target_train_s": self._target_train_s,
            "train_s": session.train_s,
            "wall_s": wall_s,
            "rounds": self._rounds,
            "epochs": session.ledger.epoch,
            "samples": session.num_samples,
            "samples_per_s": session.num_samples / total_s,
            "wait_share": float(self._sums["wait_s"].mean() / total_s),
            "merge_share": float(self._sums["merge_s"].mean() / total_s),
            "control_share": float(self._sums["control_s"].mean() / total_s),
            "claim_share": float(self._sums["claim_s"].mean() / total_s),
            **self._utilisation(session),
            "ranks": {name: values.round(6).tolist() for name, values in self._sums.items()},
            "peak_memory_bytes": [peak for _, peak in places],
            "payload_bytes": self._payload_bytes,
            "model_hash": model_hash,
            "ranks_agreed": ranks_agreed,
            "inexact": session.inexact,
            "seed": self._config.seed,
            "versions": {
                "hvd_adaptive": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        return summary

    def _utilisation(self, session: Session) -> dict[str, Any]:
        if self._speeds is None:
            return {"utilisation": None, "utilisation_wall": None, "own_speeds": None}
        values = {}
        for name, speeds in (("utilisation", self._speeds.compute), ("utilisation_wall", self._speeds.wall)):
            capacity = session.capacity_samples(speeds, 0.0, session.train_s)
            values[name] = session.num_samples / capacity if capacity else None
        used = values["utilisation"]
        error = None
        if used is not None and used > 1:
            error = (
                f"utilisation is {used:.3f} > 1, which cannot be: the ranks' own speeds were measured too low. "
                "Repeat on a quiet machine."
            )
            if self._transport.rank == 0:
                log.error(error)
        return {**values, "utilisation_error": error, "own_speeds": self._speeds.compute.tolist()}
