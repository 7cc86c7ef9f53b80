"""Trains the papers' model on a multi-label data set: a Session, evaluations between rounds, and a run directory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.config import Config, TrainConfig
from hvd_adaptive.core.metrics import inverse_propensity
from hvd_adaptive.data import SparseDataset
from hvd_adaptive.train.batches import Batch, BatchSource
from hvd_adaptive.train.calibration import Speeds, measure_speeds
from hvd_adaptive.train.checkpointer import Checkpointer, Counts
from hvd_adaptive.train.evaluation import Evaluator
from hvd_adaptive.train.flat_model import model_hash
from hvd_adaptive.train.model import SparseMLP, multilabel_softmax_loss
from hvd_adaptive.train.records import RoundRecord
from hvd_adaptive.train.replay import CLAIMS_FILE, RecordingFile
from hvd_adaptive.train.run_directory import BEST_MODEL, LAST_MODEL, RunDirectory
from hvd_adaptive.train.session import Session
from hvd_adaptive.train.summary import Totals
from hvd_adaptive.transport.base import Transport, agree

log = logging.getLogger(__name__)

# Fields of TrainConfig that may change at a resume. Where the data lie may: their fingerprint counts.
_MAY_CHANGE = frozenset({
    "data", "test_data", "cache_dir", "out", "name", "epochs", "time_limit", "target_p1", "device", "eval_rounds",
    "eval_samples", "resume", "checkpoint_interval", "keep_checkpoints",
})  # fmt: skip

ShowProgress = Callable[[RoundRecord, dict[str, float] | None, float | None], None]


def make_optimizer(train: TrainConfig, model: nn.Module) -> Optimizer:
    """Returns the local optimizer that the configuration names."""
    if train.optimizer == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=train.lr, weight_decay=train.weight_decay)
    return torch.optim.SGD(
        model.parameters(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
    )


class Trainer:
    """One run of ``hvd-adaptive train``. Construction and :meth:`run` are COLLECTIVE.

    Args:
        config: how ranks share and merge.
        train: what to train and for how long.
        splits: training and test data, the same on every rank.
        device: this rank's device.
        transport: the world.
        run_directory: on rank 0 the run's folder, on others None.
        show_progress: on rank 0 called after each round with the record, its evaluation and the seconds left, if known.

    Raises:
        AgreedError: on all ranks, if there is no checkpoint that ``train.resume`` can go on from, or none can be written.
    """

    def __init__(
        self,
        config: Config,
        train: TrainConfig,
        splits: tuple[SparseDataset, SparseDataset],
        *,
        device: torch.device,
        transport: Transport,
        run_directory: RunDirectory | None,
        show_progress: ShowProgress | None = None,
    ) -> None:
        self._train = train
        self._transport = transport
        self._data, test = splits
        self._directory = run_directory
        self._show_progress = show_progress
        self._sums_loss = config.loss_reduction == "sum"
        torch.manual_seed(config.seed)
        self._model = SparseMLP(
            self._data.num_features,
            self._data.num_labels,
            train.hidden_size,
            sparse_gradients=train.input_gradients == "sparse",
        ).to(device)
        optimizer = make_optimizer(train, self._model)
        speeds = self._calibrate(config, optimizer, device) if train.calibration else None
        self._session = Session(self._model, optimizer, config, transport=transport)
        self._session.records.append(self._after_round)
        if config.record and run_directory:
            self._session.records.append(
                RecordingFile(run_directory.path / CLAIMS_FILE, self._session.identity)
            )
        propensity = inverse_propensity(self._data.label_counts(), num_samples=len(self._data))
        self._evaluator = Evaluator(test, propensity, transport)
        self._totals = Totals(config, train, transport, speeds)
        self._last_scores: dict[str, float] | None = None
        self._session.register_state("totals", self._totals, shared=True)
        self._checkpoints = self._make_checkpointer()
        self._metadata = {
            "num_features": str(self._data.num_features),
            "num_labels": str(self._data.num_labels),
            "hidden_size": str(train.hidden_size),
        }

    def run(self) -> dict[str, Any]:
        """Trains until a limit is reached; returns what summary.json holds, the same on every rank.

        Raises:
            RuntimeError: if all ranks' parameters stop being finite, or the ranks' models differ.
        """
        train, session, optimizer = self._train, self._session, self._session.optimizer
        work = self._data.num_nonzeros() if session.config.work == "nonzeros" else None
        for batch in session.batches(self._data, num_epochs=train.max_epochs, work=work):
            with session.step(batch):
                batch.loss = self._step(optimizer, batch)
        # The last round's evaluation was of this model, and of the whole test split unless it was cut short.
        # An overlapped merge has moved the model since.
        same = train.eval_samples is None and not session.config.overlap_merge
        final = self._last_scores if same and self._last_scores else None
        final = final or self._evaluator.evaluate(self._model)
        if self._directory:
            self._directory.save_model(LAST_MODEL, self._model, self._metadata)
            if self._totals.best is None:
                self._directory.save_model(BEST_MODEL, self._model, self._metadata)
        counts = self._checkpoints.close() if self._checkpoints else Counts()
        self._transport.rendezvous("saved")
        digest = model_hash(self._model)
        agreed = len(set(self._transport.allgather_object(digest))) == 1
        summary = self._totals.summary(session, final=final, model_hash=digest, ranks_agreed=agreed)
        summary["checkpoints"] = dataclasses.asdict(counts)
        if self._directory:
            self._directory.write_summary(summary)
            self._directory.close()
        session.close()
        return summary

    def _make_checkpointer(self) -> Checkpointer | None:
        """Sets up the run's checkpoints and goes on from one, if that is asked for. COLLECTIVE."""
        train, directory = self._train, self._directory
        folder = self._transport.allgather_object(directory and directory.path.resolve() / "checkpoints")[0]
        if folder is None or (train.checkpoint_interval == 0 and train.resume is None):
            return None
        checkpoints = Checkpointer(
            self._session,
            folder,
            interval=train.checkpoint_interval,
            keep=train.keep_checkpoints,
            data={"training data": self._data.fingerprint},
            options=dataclasses.asdict(train),
            may_change=_MAY_CHANGE,
            files=lambda: [folder.parent / BEST_MODEL] if self._totals.best else [],
        )
        if train.resume is not None:
            path = checkpoints.resume(None if train.resume == "auto" else Path(train.resume).resolve())
            error = None
            if directory:
                try:
                    directory.go_on(self._session.round, path)
                except (OSError, ValueError) as failure:
                    error = f"resume: {failure}"
            agree(self._transport, error)
        return checkpoints

    def _step(self, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = multilabel_softmax_loss(self._model(batch.x), batch.y)
        # The mean over a batch times its samples is the sum; a batch without samples of its own then counts nothing.
        (loss * batch.num_samples if self._sums_loss else loss).backward()
        optimizer.step()
        return loss.detach()

    def _calibrate(self, config: Config, optimizer: Optimizer, device: torch.device) -> Speeds:
        moving = config.size_rule in ("paper", "heterogpu")
        size = config.batch_size_bounds[1] if moving else config.batch_size
        return measure_speeds(
            self._model,
            optimizer,
            lambda batch: self._step(optimizer, batch),
            BatchSource(self._data, device),
            batch_size=size,
            seed=config.seed,
            transport=self._transport,
        )

    def _after_round(self, record: RoundRecord) -> None:
        train, session = self._train, self._session
        scores = None
        if train.eval_rounds and (record.round + 1) % train.eval_rounds == 0:
            scores = self._evaluator.evaluate(self._model, train.eval_samples)
            if self._totals.improves(scores) and self._directory:
                self._directory.save_model(BEST_MODEL, self._model, self._metadata)
        self._last_scores = scores
        line = self._totals.add_round(record, scores, session)
        if self._directory:
            self._directory.add_round(line)
        reached = bool(train.target_p1 and scores and scores["p1"] >= train.target_p1)
        timed_out = train.time_limit is not None and record.train_s >= train.time_limit
        # A replay ends where its recording does.
        timed_out = timed_out and session.config.replay is None
        if reached or timed_out:
            session.stop(agreed=True)
        if self._show_progress:
            self._show_progress(record, scores, self._seconds_left(record))

    def _seconds_left(self, record: RoundRecord) -> float | None:
        left = []
        if self._train.max_epochs is not None:
            left.append(record.train_s * max(0.0, self._train.max_epochs / record.epoch - 1))
        if self._train.time_limit is not None:
            left.append(max(0.0, self._train.time_limit - record.train_s))
        return min(left) if left else None
