"""What a run adds up to: best and final scores, time to target, utilisation, where each rank's time went."""

from __future__ import annotations

import logging
import platform
import resource
import time
from typing import Any

import numpy as np
import torch

from hvd_adaptive import __version__
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.engine.start_speeds import Speeds
from hvd_adaptive.session.session import Session
from hvd_adaptive.state.nested import check_like
from hvd_adaptive.xmc.train_config import TrainConfig

log = logging.getLogger(__name__)

_SUMMED = ("busy_s", "wait_s", "claim_s", "merge_s", "control_s", "num_samples", "num_steps")


class Totals:
    """Adds up rounds; the same on every rank.

    Args:
        config: how ranks share and merge.
        train: what is trained.
        transport: the world.
        speeds: each rank's own speed, None where it was not measured.
        scored: what evaluations on the way score, in words; scores of anything else are not compared with theirs.

    Attributes:
        best: scores of the evaluation on the way with the highest P@1; None before the first.
        num_without_better: evaluations since then.
        num_samples: samples consumed by the run after its last round.
    """

    def __init__(
        self, config: Config, train: TrainConfig, transport: Transport, speeds: Speeds | None, *, scored: str
    ) -> None:
        self._config = config
        self._train = train
        self._transport = transport
        self._speeds = speeds
        self._scored = scored
        self._sums = {name: np.zeros(transport.world_size) for name in _SUMMED}
        # Means over ranks of the sums before the number of ranks changed.
        self._earlier = dict.fromkeys(_SUMMED, 0.0)
        self._capacity = {"compute": 0.0, "wall": 0.0}
        # Of the rounds that the capacity is of: where ranks come and go, speeds are not known.
        self._measured_samples = 0
        self._start = time.perf_counter()
        self._earlier_wall_s = 0.0
        self._payload_bytes = 0
        self._rounds = 0
        self._round_start_s = 0.0
        self.num_samples = 0
        self.best: dict[str, float] | None = None
        self._best_train_s: float | None = None
        self._best_epoch: float | None = None
        self._epoch = 0.0
        self.num_without_better = 0
        self._target_train_s: float | None = None
        self._like = self.state_dict()

    def improves(self, scores: dict[str, float]) -> bool:
        """Returns whether these scores beat the best P@1 so far."""
        return self.best is None or scores["p1"] > self.best["p1"]

    def is_over(self, scores: dict[str, float] | None, train_s: float) -> bool:
        """Whether a limit other than the epochs is reached, with these scores after so many seconds; rank 0 logs which one."""
        train, why = self._train, ""
        patience = train.evaluations_to_wait
        if train.target_p1 and scores and scores["p1"] >= train.target_p1:
            why = f"P@1 has reached {train.target_p1:g}"
        elif self._config.replay is not None:
            # A replay ends where its recording does.
            return False
        elif train.time_limit is not None and train_s >= train.time_limit:
            why = f"the time limit of {train.time_limit:g} s is over"
        elif patience is not None and self.num_without_better >= patience:
            why = f"no better P@1 in {patience} evaluations (--patience)"
        if why and self._transport.rank == 0:
            log.info("the run ends: %s", why)
        return bool(why)

    def takes(self, scores: dict[str, float], train_s: float) -> bool:
        """Takes the model of the last round for the best where its scores are; returns whether.

        Args:
            scores: of the same samples as those before.
            train_s: seconds of training until then.
        """
        target = self._train.target_p1
        if target and scores["p1"] >= target and self._target_train_s is None:
            self._target_train_s = train_s
        if not self.improves(scores):
            return False
        self.best, self._best_train_s, self._best_epoch = scores, train_s, self._epoch
        return True

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
        self._sums["merge_s"] += record.stats["average_s"]
        self._payload_bytes += record.payload_bytes
        self._rounds += 1
        self._epoch = record.epoch
        if scores:
            self.num_without_better = 0 if self.takes(scores, record.train_s) else self.num_without_better + 1
        line = {**record.to_json(), "eval": scores, "utilisation": None}
        if self._speeds is not None:
            span = (self._round_start_s, record.train_s)
            seconds = session.slowdown.capacity_s(*span)
            capacity = float(self._speeds.compute @ seconds)
            self._capacity["compute"] += capacity
            self._capacity["wall"] += float(self._speeds.wall @ seconds)
            num_samples = record.num_samples - self.num_samples
            self._measured_samples += num_samples
            line["utilisation"] = round(num_samples / capacity, 4)
        self._round_start_s, self.num_samples = record.train_s, record.num_samples
        return line

    def state_dict(self) -> dict[str, Any]:
        """Returns what the summary of a resumed run needs of the part before."""
        return {
            "sums": self._sums,
            "earlier": self._earlier,
            "capacity": self._capacity,
            "measured_samples": self._measured_samples,
            "payload_bytes": self._payload_bytes,
            "rounds": self._rounds,
            "round_start_s": self._round_start_s,
            "samples_before": self.num_samples,
            "scored": self._scored,
            "best": self.best,
            "best_train_s": self._best_train_s,
            "epoch": self._epoch,
            "best_epoch": self._best_epoch,
            "num_without_better": self.num_without_better,
            "target_p1": self._train.target_p1 or 0.0,
            "target_train_s": self._target_train_s,
            "wall_s": self._wall_s(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from the totals of any number of ranks; with another number, sums by rank begin anew.

        Where evaluations scored something else, so does the best model.

        Raises:
            ValueError: if it is none of :meth:`state_dict`'s.
        """
        if isinstance(state, dict):
            # What older checkpoints do not have.
            new = {"scored": self._scored, "measured_samples": state.get("samples_before"), "target_p1": self._like["target_p1"]}
            state = {**new, **state}
        check_like(state, self._like, "totals")
        self._earlier = dict(state["earlier"])
        sums = {name: np.array(values) for name, values in state["sums"].items()}
        if len(sums["busy_s"]) == self._transport.world_size:
            self._sums = sums
        else:
            self._earlier = {name: self._earlier[name] + float(sums[name].mean()) for name in _SUMMED}
            self._sums = {name: np.zeros(self._transport.world_size) for name in _SUMMED}
        self._capacity = dict(state["capacity"])
        self._measured_samples = state["measured_samples"] if self._capacity["compute"] else 0
        self._payload_bytes, self._rounds = state["payload_bytes"], state["rounds"]
        self._round_start_s, self.num_samples = state["round_start_s"], state["samples_before"]
        self.best, self._best_train_s = state["best"], state["best_train_s"]
        self._best_epoch, self.num_without_better = state["best_epoch"], state["num_without_better"]
        self._epoch = state["epoch"]
        self._target_train_s = state["target_train_s"]
        target = self._train.target_p1
        if state["target_p1"] != (target or 0.0):
            # By the time of the best evaluation at the latest; the others are not kept.
            reached = target and self.best and self.best["p1"] >= target
            self._target_train_s = self._best_train_s if reached else None
        if state["scored"] != self._scored:
            self.best = self._best_train_s = self._best_epoch = self._target_train_s = None
            self.num_without_better = 0
            if self._transport.rank == 0:
                log.warning(
                    "evaluations were of %s and are of %s: the search for the best model begins anew, and so does patience",
                    state["scored"], self._scored,
                )  # fmt: skip
        self._earlier_wall_s, self._start = state["wall_s"], time.perf_counter()

    def _wall_s(self) -> float:
        return self._earlier_wall_s + time.perf_counter() - self._start

    def _share(self, name: str, total_s: float) -> float:
        return (self._earlier[name] + float(self._sums[name].mean())) / total_s

    def summary(
        self, session: Session, *, final: dict[str, float], model_hash: str, ranks_agreed: bool
    ) -> dict[str, Any]:
        """Returns what summary.json holds. COLLECTIVE.

        Args:
            session: the finished session.
            final: scores of the last model on the whole test split.
            model_hash: SHA-256 of this rank's last model.
            ranks_agreed: whether all ranks have that hash.
        """
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        places = self._transport.allgather_object((self._transport.host, peak_bytes))
        total_s = max(session.train_s, 1e-9)
        summary: dict[str, Any] = {
            "label": self._train.name or self._config.strategy,
            "strategy": self._config.strategy,
            "merge_weights": self._config.weight_rule,
            "backend": self._transport.backend,
            "world_size": self._transport.world_size,
            "hosts": [host for host, _ in places],
            "slowdown": self._config.slowdown,
            "logical_ranks": self._config.logical_ranks,
            "best": self.best or final,
            "best_train_s": self._best_train_s,
            "best_epoch": self._best_epoch,
            "scored": self._scored,
            "final": final,
            "target_p1": self._train.target_p1,
            "target_train_s": self._target_train_s,
            "train_s": session.train_s,
            "wall_s": self._wall_s(),
            "rounds": self._rounds,
            "epochs": self._epoch,
            "samples": session.num_samples,
            "samples_per_s": session.num_samples / total_s,
            "wait_share": self._share("wait_s", total_s),
            "merge_share": self._share("merge_s", total_s),
            "control_share": self._share("control_s", total_s),
            "claim_share": self._share("claim_s", total_s),
            **self._utilisation(),
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

    def _utilisation(self) -> dict[str, Any]:
        if self._speeds is None:
            return {"utilisation": None, "utilisation_wall": None, "own_speeds": None}
        values = {}
        for name, clock in (("utilisation", "compute"), ("utilisation_wall", "wall")):
            capacity = self._capacity[clock]
            values[name] = self._measured_samples / capacity if capacity else None
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
