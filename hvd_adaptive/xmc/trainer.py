"""Trains the papers' model on a multi-label data set: a Session, evaluations between rounds, and a run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.comm.protocols import AgreedError, Transport, agree, attempt, long_task
from hvd_adaptive.config import Config
from hvd_adaptive.engine import optimizers
from hvd_adaptive.engine.batches import Batch, BatchSource
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.engine.replay import CLAIMS_FILE, RecordingFile
from hvd_adaptive.engine.start_speeds import Speeds, measure_speeds
from hvd_adaptive.session.checkpointer import Checkpointer, Counts
from hvd_adaptive.session.session import Session
from hvd_adaptive.session.supervised import MemoryCheckpointer, Supervised
from hvd_adaptive.state.folder_owner import FolderLostError
from hvd_adaptive.xmc.data import SparseDataset
from hvd_adaptive.xmc.defaults import fill_in, resume_options
from hvd_adaptive.xmc.evaluation import Evaluator
from hvd_adaptive.xmc.metrics import inverse_propensity
from hvd_adaptive.xmc.run_directory import BEST_MODEL, LAST_MODEL, RunDirectory
from hvd_adaptive.xmc.sparse_mlp import SparseMLP, multilabel_softmax_loss
from hvd_adaptive.xmc.summary import Totals
from hvd_adaptive.xmc.train_config import TrainConfig

log = logging.getLogger(__name__)

# Fields of TrainConfig that may change at a resume. Where the data lie may: their fingerprint counts.
_MAY_CHANGE = frozenset({
    "data", "test_data", "cache_dir", "out", "name", "epochs", "time_limit", "target_p1", "device", "eval_rounds",
    "eval_samples", "patience", "resume", "checkpoint_interval", "keep_checkpoints", "tensorboard", "calibration",
})  # fmt: skip

_EVALUATIONS_AN_EPOCH = 4

ShowProgress = Callable[[RoundRecord, dict[str, float] | None, float | None], None]


def make_optimizer(train: TrainConfig, model: nn.Module) -> Optimizer:
    """Returns the local optimizer that the configuration names."""
    return optimizers.make_optimizer(
        train.optimizer,
        model.parameters(),
        lr=train.learning_rate,
        momentum=0.9 if train.momentum is None else train.momentum,
        weight_decay=train.decay,
        sparse=train.input_gradients == "sparse",
    )


def make_model(train: TrainConfig, data: SparseDataset, *, seed: int, device: torch.device) -> SparseMLP:
    """Returns the model that the configuration names, for the data's features and labels."""
    torch.manual_seed(seed)
    return SparseMLP(
        data.num_features,
        data.num_labels,
        train.hidden_size,
        sparse_gradients=train.input_gradients == "sparse",
        unit_rows=train.row_norm == "l2",
    ).to(device)


def local_step(model: nn.Module, optimizer: Optimizer, batch: Batch, *, sums_loss: bool = False) -> torch.Tensor:
    """Makes a local step on a batch; returns its mean loss, detached.

    Args:
        model: changed in place.
        optimizer: over its parameters.
        batch: of sparse inputs and labels.
        sums_loss: the gradients are those of the sum over the samples.
    """
    optimizer.zero_grad()
    losses = []
    for micro in batch.micro_batches():
        loss = multilabel_softmax_loss(model(micro.x), micro.y)
        # The mean over a batch times its samples is the sum; a batch without samples of its own then counts nothing.
        (loss * micro.num_samples if sums_loss else loss).backward()
        losses.append(micro.weight * loss.detach() if batch.num_micro_batches > 1 else loss.detach())
    optimizer.step()
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


class Trainer:
    """One run of ``hvd-adaptive train``. Construction and :meth:`run` are COLLECTIVE.

    Args:
        config: how ranks share and merge.
        train: what to train and for how long.
        splits: training and test data, the same on every rank.
        device: this rank's device.
        transport: the world.
        make_directory: on rank 0 makes the run's folder, on others None; called when the options have been checked.
        supervised: what the supervisor of ``--elastic`` asks for, None where there is none.
        predicted_samples_per_s: what ``calibrate`` predicted for these options and ranks, for the summary.
        show_progress: on rank 0 called after each round with the record, its evaluation and the seconds left, if known.

    Raises:
        AgreedError: on all ranks, if options do not go with each other or with the data, the folder cannot be made, there is no
            checkpoint that ``train.resume`` can go on from, or none can be written.
    """

    def __init__(
        self,
        config: Config,
        train: TrainConfig,
        splits: tuple[SparseDataset, SparseDataset],
        *,
        device: torch.device,
        transport: Transport,
        make_directory: Callable[[], RunDirectory] | None,
        supervised: Supervised | None = None,
        predicted_samples_per_s: float | None = None,
        show_progress: ShowProgress | None = None,
    ) -> None:
        self._train = train
        self._transport = transport
        self._data, test = splits
        self._supervised = supervised
        self._predicted_samples_per_s = predicted_samples_per_s
        self._show_progress = show_progress
        self._sums_loss = config.loss_reduction == "sum"
        self._model = make_model(train, self._data, seed=config.seed, device=device)
        optimizer = make_optimizer(train, self._model)
        self._resume_options = resume_options(config, train)
        if config.strategy == "local" and config.logical_ranks is None:
            config = fill_in(config, train, self._data, model=self._model, optimizer=optimizer, transport=transport)
        # Ranks that come and go were never all measured.
        speeds = self._calibrate(config, optimizer, device) if train.calibration and supervised is None else None
        self._session = Session(self._model, optimizer, config, transport=transport)
        self._session.records.append(self._after_round)
        directory = self.directory = attempt(transport, lambda: make_directory() if make_directory else None)
        propensity = inverse_propensity(self._data.label_counts(), num_samples=len(self._data))
        self._evaluator = Evaluator(test, propensity, transport)
        self._scores_all = train.eval_samples is None or train.eval_samples >= len(test)
        test_set = f"samples of test set {test.fingerprint[:12]}"
        self._scored = {True: f"{len(test)} {test_set}", False: f"{train.eval_samples} {test_set}"}
        self._totals = Totals(config, train, transport, speeds, scored=self._scored[self._scores_all])
        self._last_scores: dict[str, float] | None = None
        self._session.register_state("totals", self._totals, shared=True)
        self._in_memory: MemoryCheckpointer | None = None
        try:
            self._checkpoints = self._make_checkpointer()
            claims = directory.path / CLAIMS_FILE if directory and config.record else None
            self._recording = attempt(transport, lambda: RecordingFile(claims, self._session.identity) if claims else None)
        except AgreedError:
            if directory:
                directory.abandon()
            raise
        self._metadata = {
            "num_features": str(self._data.num_features),
            "num_labels": str(self._data.num_labels),
            "hidden_size": str(train.hidden_size),
            "row_norm": train.row_norm,
        }

    def run(self) -> dict[str, Any] | None:
        """Trains until a limit is reached; returns what summary.json holds, the same on every rank.

        A run that was preempted (:func:`hvd_adaptive.catch_signals`) saves a checkpoint instead and returns None.

        Raises:
            RuntimeError: if all ranks' parameters stop being finite, or the ranks' models differ.
        """
        try:
            return self._run()
        except AgreedError:
            # All ranks are here: what they write will be whole.
            if self._checkpoints:
                self._checkpoints.wait()
            if self.directory and not self._session.round:
                self.directory.abandon()
            raise

    def _run(self) -> dict[str, Any] | None:
        train, session, optimizer = self._train, self._session, self._session.optimizer
        work = self._data.num_nonzeros() if session.config.work == "nonzeros" else None
        if self._supervised is not None:
            self._supervised.mark("load")
        if session.round and self._totals.is_over(self._totals.best, session.train_s):
            # As where a batch system starts a finished job again.
            if self.directory:
                log.warning("the run reached its --time-limit, --patience or --target-p1 before the resume: it trains no further")
            session.stop(agreed=True)
        for batch in session.batches(self._data, num_epochs=train.max_epochs, work=work):
            with session.step(batch):
                batch.loss = self._step(optimizer, batch)
        if session.preempted:
            self._leave_early()
            return None
        # The last round's evaluation was of this model, and of the whole test split unless it was cut short.
        # A merge beside steps has moved the model since.
        same = self._scores_all and session.config.merge_fragments == 1
        final = self._last_scores if same and self._last_scores else None
        final = final or self._evaluator.evaluate(self._model)
        # Scores of a part of the test split are not comparable with these.
        comparable = self._scores_all or self._totals.best is None
        is_best = comparable and self._totals.takes(final, session.train_s)
        for name in [*([BEST_MODEL] if is_best else []), LAST_MODEL]:
            self._write(functools.partial(RunDirectory.save_model, name=name, model=self._model, metadata=self._metadata))
        self._write(RunDirectory.write_best)
        counts = self._checkpoints.close() if self._checkpoints else Counts()
        self._transport.rendezvous("saved")
        digest = model_hash(self._model)
        agreed = len(set(self._transport.allgather_object(digest))) == 1
        summary = self._totals.summary(session, final=final, model_hash=digest, ranks_agreed=agreed)
        summary["predicted_samples_per_s"] = self._predicted_samples_per_s
        summary |= {"scored": self._scored[comparable], "eval_samples": None if comparable else self._train.eval_samples}
        summary["checkpoints"] = dataclasses.asdict(counts)
        self._write(self._close)
        self._write(lambda directory: directory.write_summary(summary))
        if self.directory and self._in_memory:
            shutil.rmtree(self._in_memory.folder, ignore_errors=True)
        session.close()
        return summary

    @property
    def preempted(self) -> int:
        """The signal for which the run ended early, the same on every rank; 0: none."""
        return self._session.preempted

    def _write(self, action: Callable[[RunDirectory], Any]) -> None:
        """Writes in the run directory on rank 0; all ranks raise if that fails. COLLECTIVE."""
        error = None
        if self.directory:
            try:
                # A slow disk is no stuck rank.
                with long_task(self._transport, "writing the run directory"):
                    action(self.directory)
            except FolderLostError as failure:
                error = str(failure)
            except OSError as failure:
                remedy = "go on with --resume auto" if self._train.checkpoint_interval != 0 else "start again"
                error = (
                    f"run directory {self.directory.path} cannot be written: {failure}; mend that, or make room, and {remedy}; "
                    f"{self._session.preemption.saved()}"
                )
        agree(self._transport, error)

    def _close(self, directory: RunDirectory) -> None:
        directory.close()
        if self._recording:
            self._recording.close()

    def _leave_early(self) -> None:
        """Saves what there is and leaves the world. COLLECTIVE."""
        session = self._session
        counts = Counts()
        try:
            if self._checkpoints:
                counts = self._checkpoints.close()
            # Without checkpoints nothing else has written one that found no room.
            self._write(RunDirectory.write_best)
        except AgreedError as error:
            # Whoever sends the job again goes on from an older checkpoint.
            if self.directory:
                log.error("%s", error)
        if self.directory:
            log.warning(
                "%s: the run ends after %d rounds, at %d samples of epoch %d; %s. %s",
                signal.Signals(session.preempted).name, session.round, session.ledger.cursor, session.ledger.epoch,
                session.preemption.saved(),
                "Go on with --resume auto." if counts.written or self._train.checkpoint_interval != 0
                else "checkpoint_interval is 0: what was computed is lost.",
            )  # fmt: skip
        try:
            self._write(self._close)
        except AgreedError as error:
            if self.directory:
                log.error("%s", error)
        session.close()

    def _make_checkpointer(self) -> Checkpointer | None:
        """Sets up the run's checkpoints and goes on from one, if that is asked for. COLLECTIVE."""
        train, directory = self._train, self.directory
        folder = self._transport.allgather_object(directory and directory.path.resolve() / "checkpoints")[0]
        if folder is None or (train.checkpoint_interval == 0 and train.resume is None and not self._supervised):
            return None
        options: dict[str, Any] = {
            "data": {"training data": self._data.fingerprint},
            "options": self._resume_options,
            "may_change": _MAY_CHANGE,
            "files": self._best_files,
            "owner": directory and directory.owner,
        }
        interval, memory = train.checkpoint_interval, self._supervised.memory if self._supervised else None
        if memory is not None:
            self._in_memory = MemoryCheckpointer(self._session, memory, **options)
            interval = 1 if self._in_memory.refusal else interval
        checkpoints = Checkpointer(self._session, folder, interval=interval, keep=train.keep_checkpoints, **options)
        if self._in_memory is not None:
            self._in_memory.beside = checkpoints
        if train.resume is not None:
            source = None if train.resume == "auto" else Path(train.resume).resolve()
            also = [self._in_memory.folder] if self._in_memory and self._in_memory.readable else []
            path = checkpoints.resume(source, also=also)
            error = None
            if directory:
                try:
                    directory.go_on(self._session.round, path, own=path is not None and path.parent in also)
                except (OSError, ValueError, FolderLostError) as failure:
                    error = f"resume: {failure}"
            agree(self._transport, error)
        return checkpoints

    def _step(self, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
        return local_step(self._model, optimizer, batch, sums_loss=self._sums_loss)

    def _calibrate(self, config: Config, optimizer: Optimizer, device: torch.device) -> Speeds:
        moving = config.size_rule in ("paper", "heterogpu")
        size = config.batch_size_bounds[1] if moving else config.batch_size
        source = BatchSource(self._data, device, micro_batch_size=config.micro_batch_size)
        return measure_speeds(
            self._model, optimizer, lambda batch: self._step(optimizer, batch), source,
            batch_size=size, seed=config.seed, transport=self._transport,
        )  # fmt: skip

    def _after_round(self, record: RoundRecord) -> None:
        train, session = self._train, self._session
        scores = None
        if self._is_evaluated(record) and not session.preempted:
            scores = self._evaluator.evaluate(self._model, train.eval_samples)
        self._last_scores = scores
        is_best = scores is not None and self._totals.improves(scores)
        line = self._totals.add_round(record, scores, session)
        if self._supervised is not None and "first merge" not in self._supervised.parts_s:
            self._supervised.mark("first merge")
            line["start"] = self._supervised.to_json()
        if self.directory:
            self._save_round(self.directory, record, line, is_best=is_best)
        if self._totals.is_over(scores, record.train_s):
            session.stop(agreed=True)
        if self._show_progress:
            self._show_progress(record, scores, self._seconds_left(record))

    def _is_evaluated(self, record: RoundRecord) -> bool:
        """Whether the model is scored after this round."""
        if self._train.eval_rounds is not None:
            return self._train.eval_rounds > 0 and (record.round + 1) % self._train.eval_rounds == 0
        # Where a round comes to a quarter of an epoch; some rounds are longer than that.
        before, after = (
            num_samples * _EVALUATIONS_AN_EPOCH // len(self._data)
            for num_samples in (self._totals.num_samples, record.num_samples)
        )
        return after > before

    def _save_round(self, directory: RunDirectory, record: RoundRecord, line: dict[str, Any], *, is_best: bool) -> None:
        try:
            if line["eval"]:
                with long_task(self._transport, "writing the best model"), contextlib.suppress(OSError):
                    if is_best:
                        directory.save_best(self._model, self._metadata, record.round)
                    else:
                        directory.write_best()
            directory.add_round(line)
            if self._recording is not None:
                # Before checkpoints, which are of rounds that were recorded.
                self._recording(record)
        except FolderLostError:
            # All ranks end after the next merge, with this error.
            self._session.stop()

    def _best_files(self) -> list[Path]:
        """The best model's file, for a checkpoint: its totals say which model that is. On rank 0."""
        assert self.directory is not None
        memory = self._in_memory
        with long_task(self._transport, "writing the best model"):
            files = self.directory.best_files(memory.folder if memory is not None and not memory.refusal else None)
        return files if self._totals.best else []

    def _seconds_left(self, record: RoundRecord) -> float | None:
        left = []
        if self._train.max_epochs is not None:
            left.append(record.train_s * max(0.0, self._train.max_epochs / record.epoch - 1))
        if self._train.time_limit is not None:
            left.append(max(0.0, self._train.time_limit - record.train_s))
        return min(left) if left else None
