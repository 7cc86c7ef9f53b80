"""A run's folder: config.json, rounds.jsonl, summary.json and the models, written by rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from hvd_adaptive import __version__
from hvd_adaptive.config import Config
from hvd_adaptive.engine.line_file import LineFile, first_rounds
from hvd_adaptive.state.disk import share
from hvd_adaptive.state.folder_owner import FolderOwner
from hvd_adaptive.state.tensor_file import open_tensors
from hvd_adaptive.xmc.train_config import TrainConfig

log = logging.getLogger(__name__)

BEST_MODEL = "model.safetensors"
LAST_MODEL = "model-last.safetensors"


class RoundSink(Protocol):
    """What wants every round's line beside rounds.jsonl."""

    def add_round(self, record: dict[str, Any]) -> None:
        """Takes a round's line."""

    def close(self) -> None:
        """Takes no more lines."""


class RunDirectory:
    """Writes a run's files; made on rank 0 only.

    The folder becomes this job's with the first of them. Whatever writes one raises FolderLostError once the folder is another's.

    Args:
        path: the folder; made if it is not there.
        resume: it may hold a run, which goes on; call :meth:`go_on` before the first round.
        sinks: get every round's line too. One that raises OSError gets no more.
        job: as for FolderOwner.

    Attributes:
        path: the folder.
        owner: this job's claim on it.

    Raises:
        ValueError: if the folder cannot be written, or holds a run already.
    """

    def __init__(self, path: Path, *, resume: bool = False, sinks: Sequence[RoundSink] = (), job: str | None = None) -> None:
        self.path = path
        self.owner = FolderOwner(path, socket.gethostname(), job=job)
        self._sinks = sinks
        self._unwritten_best: tuple[dict[str, Tensor], dict[str, str]] | None = None
        # The file of the best model, which stays readable when somebody moves or removes it.
        self._best: IO[bytes] | None = None
        # It in memory, while it finds no room here.
        self._spare: Path | None = None
        self._config: dict[str, Any] | None = None
        try:
            # What a run that never begins is to remove.
            self._made = _missing(*(path / name for name in ("rounds.jsonl", "config.json", ".owner")), path, *path.parents)
            path.mkdir(parents=True, exist_ok=True)
            if path / "rounds.jsonl" not in self._made and not resume:
                raise ValueError(
                    f"run directory {path} holds a run already: go on with it with --resume auto, name another with --out, or "
                    "remove it"
                )
            self._rounds = LineFile(path / "rounds.jsonl", "ab" if resume else "xb")
        except OSError as error:
            raise ValueError(
                f"run directory {path} cannot be written: {error}; name another with --out"
            ) from None

    def abandon(self) -> None:
        """Removes what this has made, for a run that ends before its first merge; what was there stays."""
        self._rounds.close()
        self._hold_best(None)
        if self.owner.lost_to():
            return
        with contextlib.suppress(OSError):
            # Made by the check that ranks see one folder.
            (self.path / "checkpoints").rmdir()
        for made in self._made:
            # What has been put into a folder meanwhile stays.
            with contextlib.suppress(OSError):
                made.rmdir() if made.is_dir() else made.unlink()

    def go_on(self, num_rounds: int, checkpoint: Path | None, *, own: bool = False) -> None:
        """Makes the folder what it was after this many rounds; later ones were lost and will be run again.

        Args:
            num_rounds: rounds to keep in rounds.jsonl.
            checkpoint: where the run goes on from, None for nowhere. It holds the best model of then; where it is another
                run's, that run's rounds are taken over.
            own: it is this run's, wherever it lies.

        Raises:
            OSError: if it cannot be written.
            ValueError: if it holds a finished run and there is no checkpoint to go on from.
        """
        if checkpoint is None and (self.path / "summary.json").exists():
            raise ValueError(
                f"run directory {self.path} holds a finished run without checkpoints: name another with --out, or remove it"
            )
        self._rounds.close()
        source = self.path / "rounds.jsonl"
        if checkpoint is not None and not own and checkpoint.parent.parent != self.path.resolve():
            source = checkpoint.parent.parent / "rounds.jsonl"
        kept = first_rounds(source, num_rounds)
        if len(kept) < num_rounds:
            log.warning("%s holds %d of the %d rounds before the resume", source, len(kept), num_rounds)
        self._write("rounds.jsonl", "".join(kept))
        self._rounds = LineFile(self.path / "rounds.jsonl")
        (self.path / "summary.json").unlink(missing_ok=True)
        if checkpoint is not None and (checkpoint / BEST_MODEL).exists():
            self._hold_best(checkpoint / BEST_MODEL)
            self._copy_best(self.path / BEST_MODEL)
            self._hold_best(self.path / BEST_MODEL)

    def write_config(self, config: Config, train: TrainConfig) -> None:
        """Writes config.json, which ``--config`` reads."""
        values = {**dataclasses.asdict(train), **dataclasses.asdict(config), "resume": None}
        self._config = {name: value for name, value in values.items() if value is not None}
        self._write_json("config.json", self._config)

    def add_round(self, record: dict[str, Any]) -> None:
        """Appends one round to rounds.jsonl, and hands it to the sinks. What does not fit on the disk is kept for later."""
        self.owner.hold()
        self._rounds.add(json.dumps(record))
        if self._config is not None and not (self.path / "config.json").exists():
            # Somebody has moved or removed the folder. What cannot be written now is tried again with the next line.
            with contextlib.suppress(OSError):
                self._write_json("config.json", self._config)
        self._call_sinks(lambda sink: sink.add_round(record))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json."""
        self._write_json("summary.json", summary)

    def save_model(self, name: str, model: nn.Module, metadata: dict[str, str]) -> None:
        """Writes the model's state as a safetensors file, whole or not at all.

        Args:
            name: file name in the folder.
            model: a model without tied parameters.
            metadata: what a reader needs to build the model.

        Raises:
            OSError: naming the file, if it cannot be written; the one that was there stays.
        """
        self._save_tensors(name, _tensors_of(model), metadata)

    def save_best(self, model: nn.Module, metadata: dict[str, str], round_number: int) -> None:
        """Writes the best model so far. One that finds no room is kept in memory for :meth:`write_best`."""
        try:
            self.save_model(BEST_MODEL, model, metadata)
        except OSError as error:
            self._forget_spare()
            self._unwritten_best = ({key: value.clone() for key, value in _tensors_of(model).items()}, metadata)
            log.error(
                "the best model so far, of round %d, is in memory only: %s. The run goes on; it is written when it can be.",
                round_number, error,
            )  # fmt: skip

    def write_best(self) -> None:
        """Writes the best model, if :meth:`save_best` could not, or if somebody has moved or removed it.

        Raises:
            OSError: if that cannot be done.
        """
        path = self.path / BEST_MODEL
        if self._unwritten_best is not None:
            self._save_tensors(BEST_MODEL, *self._unwritten_best)
        elif self._best is not None and not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self.owner.hold()
            log.warning("%s is gone: writing it again", path)
            self._copy_best(path)

    def best_files(self, spare: Path | None) -> list[Path]:
        """Returns the file of the best model, if there is one, for a checkpoint.

        Args:
            spare: a folder for it as long as this one has no room; None: there is none.

        Raises:
            OSError: if it cannot be written.
        """
        try:
            self.write_best()
        except OSError:
            if spare is None:
                raise
            if self._spare is None or not self._spare.exists():
                if self._unwritten_best is not None:
                    self._save_tensors(BEST_MODEL, *self._unwritten_best, folder=spare)
                else:
                    self._copy_best(spare / BEST_MODEL)
                self._spare = spare / BEST_MODEL
            return [self._spare]
        self._forget_spare()
        path = self.path / BEST_MODEL
        return [path] if path.exists() else []

    def _copy_best(self, path: Path) -> None:
        assert self._best is not None
        part = path.with_name(f"{path.name}.part")
        try:
            self._best.seek(0)
            with part.open("wb") as copy:
                shutil.copyfileobj(self._best, copy)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def _hold_best(self, path: Path | None) -> None:
        """Keeps the best model's file open, so that it can be read when somebody has removed it."""
        before, self._best = self._best, None if path is None else path.open("rb")
        if before is not None:
            before.close()

    def _forget_spare(self) -> None:
        if self._spare is not None:
            self._spare.unlink(missing_ok=True)
            self._spare = None

    def close(self) -> None:
        """Closes rounds.jsonl and the sinks.

        Raises:
            OSError: if rounds are left that cannot be written.
        """
        self.owner.hold()
        self._rounds.flush()
        self._rounds.close()
        self._hold_best(None)
        self._call_sinks(lambda sink: sink.close())

    def _call_sinks(self, call: Callable[[RoundSink], None]) -> None:
        kept = []
        for sink in self._sinks:
            try:
                call(sink)
                kept.append(sink)
            except OSError as error:
                # A writer of TensorBoard's does not recover: its thread has ended.
                log.error("%s cannot write, and gets no more rounds: %s. rounds.jsonl has all.", type(sink).__name__, error)
        self._sinks = kept

    def _save_tensors(
        self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str], *, folder: Path | None = None
    ) -> None:
        self.owner.hold()
        target = (folder or self.path) / name
        # safetensors writes to another name first. A process that is killed leaves that file, and the next one removes it.
        part = target.with_name(f".part-{name}")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            save_file(tensors, part / name, metadata={"hvd_adaptive": __version__, **metadata})
            # safetensors makes it private.
            share(part / name)
            os.replace(part / name, target)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{target} cannot be written: {error}") from None
        finally:
            # Half a model would take the room of others.
            shutil.rmtree(part, ignore_errors=True)
        if name == BEST_MODEL and folder is None:
            self._unwritten_best = None
            self._hold_best(target)

    def _write_json(self, name: str, value: Any) -> None:
        self._write(name, json.dumps(value, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        self.owner.hold()
        temporary = self.path / (name + ".part")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.path / name)
        except OSError as error:
            # Neither open nor write of a full disk names the file.
            raise OSError(error.errno, error.strerror or str(error), str(self.path / name)) from None


def _missing(*paths: Path) -> list[Path]:
    return [path for path in paths if not path.exists()]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}


def load_model(path: Path) -> tuple[dict[str, Tensor], dict[str, str], Path]:
    """Reads a saved model.

    Args:
        path: a run directory or a checkpoint (its best model), or a model file of one.

    Returns:
        Its state, its metadata and its run directory.

    Raises:
        ValueError: if there is no such model, or the file is none of this program's.
    """
    file = path / BEST_MODEL if path.is_dir() else path
    try:
        # safetensors says of a file that may not be read that it is not there.
        with open(file, "rb"):
            pass
        with open_tensors(file) as opened:
            metadata = dict(opened.metadata() or {})
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        # torch adds a stack of C++ to what it says.
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model {file} cannot be read: {reason}; name a run directory or its {BEST_MODEL}"
        ) from None
    if "hvd_adaptive" not in metadata or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ValueError(
            f"model {file} was not saved by hvd-adaptive: name a run directory or its {BEST_MODEL}"
        )
    folder = file.absolute().parent
    is_checkpoint = folder.parent.name == "checkpoints" and not (folder / "config.json").exists()
    return tensors, metadata, folder.parents[1] if is_checkpoint else file.parent
