"""Writes a session's checkpoints beside the training, keeps the newest, and resumes from them.

At a merge each rank copies what is to be saved; that is all that training waits for. A thread then writes: each rank its
own file, rank 0 also what all ranks hold alike. When every rank has reported through the side channel that its file is on
the disk, rank 0's thread writes the manifest and gives the directory its name. No rank waits for another's disk.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hvd_adaptive.cluster.last_checkpoint import describe_newest, directory_name, number_of
from hvd_adaptive.comm.protocols import AgreedError, agree, from_rank_0, long_task
from hvd_adaptive.engine.records import RoundRecord, RoundStats
from hvd_adaptive.session import resume
from hvd_adaptive.session.sameness import warn_of_unequal
from hvd_adaptive.session.session import Session
from hvd_adaptive.state import checkpoint
from hvd_adaptive.state.checkpoint import Written
from hvd_adaptive.state.disk import sync_directory
from hvd_adaptive.state.folder_owner import FolderLostError, FolderOwner
from hvd_adaptive.state.nested import flatten_state
from hvd_adaptive.state.shared_folder import check_shared_folder
from hvd_adaptive.validation import check_count

log = logging.getLogger(__name__)

# With no interval given: at most this share of the training time goes into copying and writing, and no two checkpoints
# are closer than that, which is what an interruption can cost.
MAX_SHARE = 0.05
MIN_SECONDS = 30.0
_POLL_S = 0.02


@dataclass(slots=True)
class Counts:
    """What became of a run's checkpoints since it was started or resumed.

    Attributes:
        written: complete ones.
        failed: attempts that ended in an error.
        skipped: times that one was due while the last was still being written.
    """

    written: int = 0
    failed: int = 0
    skipped: int = 0


class Checkpointer:
    """Saves a session after a round, every so many rounds, in the background. Construction is COLLECTIVE.

    Make it after all callables of ``session.records`` that change what is to be saved.

    Args:
        session: what to save.
        folder: folder of the checkpoints, on storage that all hosts share.
        interval: rounds between checkpoints; 0: none; None: as often as copying and writing stay under 5% of the training
            time, at least 30 s of training apart.
        keep: number of the newest checkpoints to keep, >= 1.
        data: fingerprints of the training data by name; a checkpoint with others is refused.
        options: further options by name, as JSON has them. Like those of ``Config``, they must be the same at a resume.
        may_change: the options of which that is not true, besides ``hash_interval``, ``stall_limit_s`` and ``slowdown``.
        files: gives files to add, on rank 0; they may be replaced but never changed in place. If it raises OSError, that
            is why the checkpoint is not written.
        background: write beside the next round; else it begins when the checkpoint is complete, so that a lost rank costs no
            more than the round in which it is lost.
        owner: on rank 0 this job's claim on a larger folder that this one belongs to; None: on this one.

    Attributes:
        folder: folder of the checkpoints.
        counts: what became of the checkpoints; complete on rank 0.

    Raises:
        TypeError, ValueError: for an interval or a number that is not whole, or out of range.
        RuntimeError: if the session is closed.
        AgreedError: on all ranks, if one cannot write in the folder, or does not see rank 0's files there. Later, before the
            first batch, if the folder holds another run's checkpoints of later rounds, and ``resume`` was not called.
    """

    def __init__(
        self,
        session: Session,
        folder: str | Path,
        *,
        interval: int | None = None,
        keep: int = 3,
        data: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        may_change: frozenset[str] = frozenset(),
        files: Callable[[], list[Path]] = list,
        background: bool = True,
        owner: FolderOwner | None = None,
    ) -> None:
        session._handed_out.check_not_closed()
        check_count("interval", 0 if interval is None else interval, least=0, unit="rounds")
        check_count("keep", keep, least=1, unit="checkpoint")
        self.counts = Counts()
        self._session = session
        self.folder = Path(folder)
        # In the store. Ranks may reach one folder by several names, of any bytes.
        self._name = session.transport.allgather_object(secrets.token_hex(8))[0]
        self._interval, self._keep = interval, keep
        self._identity = resume.Identity.of(session, data=data or {}, options=options or {})
        self._may_change, self._files, self._background = may_change, files, background
        self._thread: threading.Thread | None = None
        # Tensors of the last checkpoint by file and name, or of none yet, to be overwritten by the next.
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._reserving: threading.Thread | None = None
        self._attempt, self._due_from, self._failure, self._unequal = 0, (0, 0.0), "", set[str]()
        self._written: list[Path] = []
        self._owner = owner or FolderOwner(self.folder, session.transport.host)
        self._copy_s = self._write_s = self._last_copy_s = self._last_write_s = 0.0
        if interval != 0:
            remedy = "run directory on storage that all hosts share, or switch checkpoints off with an interval of 0"
            check_shared_folder(self.folder, session.transport, remedy)
            session.preemption.saved = self._describe_newest
            session._state.before_loop.append(self._check_folder)
            session.records.append(self._after_round)
            session.before_gather.append(self._report)

    def resume(self, source: str | Path | None = None, *, also: Sequence[Path] = ()) -> Path | None:
        """Goes on from the newest valid checkpoint. COLLECTIVE. Before the first batch.

        One that is damaged, cut short, foreign or of a newer format is refused with its reason, and the next older one is
        tried. Checkpoints in this folder that are newer than the one taken are renamed.

        Args:
            source: a checkpoint, a folder of them or a run directory; None: this folder.
            also: further folders of the same run's checkpoints, whose newest may be newer; each as rank 0 sees it.

        Returns:
            The checkpoint; None if this folder holds none at all and no source was named.

        Raises:
            AgreedError: on all ranks, if there are checkpoints and none is valid, the source holds none, or an option that
                may not change is not what it was.
        """
        session = self._session
        candidates = resume.find_candidates(Path(source) if source is not None else self.folder, session.transport, also)
        if not candidates:
            if source is not None:
                raise AgreedError(f"resume: there is no checkpoint in {source}")
            if session.rank == 0:
                log.warning("no checkpoint in %s: starting fresh", self.folder)
            return None
        path, manifest = resume.load_newest_valid(candidates, session, self._identity, self._may_change)
        error = None
        if session.rank == 0:
            log.info(
                "resumed from %s: %d rounds, epoch %d and %d samples, %s ranks then and %d now",
                path, session.round, session.ledger.epoch, session.ledger.cursor, manifest["world_size"], session.world_size,
            )  # fmt: skip
            try:
                if self._interval != 0:
                    self._owner.take()
            except OSError as failure:
                error = f"{self.folder} cannot be taken over: {failure}"
        agree(session.transport, error)
        self._written = resume.go_back(self.folder, session)
        self._due_from = (session.round, session.train_s)
        return path

    def save(self) -> bool:
        """Writes a checkpoint now and waits for it. COLLECTIVE. Between two rounds: outside ``session.batches``, or from a
        callable in ``session.records``.

        Returns:
            Whether it was written; the same on every rank.
        """
        self.wait()
        before = self.counts.written
        self._start()
        self.wait()
        return from_rank_0(self._session.transport, lambda: self.counts.written > before)

    def close(self) -> Counts:
        """Saves the last round unless it is saved, and waits for it. COLLECTIVE. Before ``session.close``.

        Returns:
            What became of the checkpoints; the same on every rank.

        Raises:
            AgreedError: on all ranks, if the last round could not be saved.
        """
        self.wait()
        if self._session.round < self._due_from[0]:
            self._check_folder()
        # That nobody has removed; on rank 0.
        newest = next((number_of(path) for path in reversed(self._written) if path.exists()), 0)
        gather = self._session.gather
        if self._interval != 0 and gather(newest)[0] < self._session.round and not self.save():
            why, newest_now = gather((self._failure, self._describe_newest()))[0]
            raise AgreedError(f"the last round, {self._session.round}, is not saved: {why}. Mend that and resume; {newest_now}")
        counts: Counts = gather(self.counts)[0]
        return counts

    def _check_folder(self) -> None:
        """Sees to it that nothing counts as newer than the session, which the loop may have put back. COLLECTIVE."""
        if self._session.round < self._due_from[0]:
            self.wait()
            self._written = resume.go_back(self.folder, self._session)
        elif not self._attempt:
            resume.refuse_newer(self.folder, self._session)

    def _has_room(self, state: dict[str, Any]) -> bool:
        """Whether there is room for a checkpoint of this state; the same on every rank. COLLECTIVE."""
        return True

    def _describe_newest(self) -> str:
        # One rank is enough to look: a disk that hangs must not keep the others from ending the job.
        rank = self._session.rank
        return f"checkpoints, if there are any, are in {self.folder}" if rank else describe_newest(self.folder)

    def _report(self, stats: RoundStats) -> None:
        if not self._attempt and self._session.rank == 0:
            # Before anybody writes one, but not sooner: a job that is refused leaves the folder as it was.
            checkpoint.remove_parts(self.folder)
        # A run may have two of these: one on the disk and one in memory.
        stats.checkpoint_s += self._copy_s
        # Training stood still for it, though between two rounds.
        stats.train_s += self._copy_s
        self._copy_s = 0.0
        if self._thread is not None and self._thread.is_alive():
            stats.checkpoint_busy = 1.0
        else:
            stats.checkpoint_write_s += self._write_s
            self._write_s = 0.0

    def _after_round(self, record: RoundRecord) -> None:
        # All ranks decide from the gathered record, and so decide the same.
        self._last_copy_s = float(record.stats["checkpoint_s"].max()) or self._last_copy_s
        self._last_write_s = float(record.stats["checkpoint_write_s"].max()) or self._last_write_s
        if self._session.round < self._due_from[0]:
            self._check_folder()
            self._due_from = (self._session.round, record.train_s)
        since_round, since_s = self._due_from
        if self._interval is not None:
            due = self._session.round - since_round >= self._interval
        else:
            pause_s = max(MIN_SECONDS, (self._last_copy_s + self._last_write_s) / MAX_SHARE)
            due = record.train_s - since_s >= pause_s
        if due and self._background and record.stats["checkpoint_busy"].any():
            self.counts.skipped += 1
            log.debug("round %d: the last checkpoint is still being written", self._session.round)
        elif due:
            self._start()
            if not self._background:
                start = time.perf_counter()
                self.wait()
                self._copy_s += time.perf_counter() - start
        elif self._background and not self._copies and self._session.config.merge_fragments == 1:
            # What is on the way would be waited for.
            self._reserve()

    def _reserve(self) -> None:
        """Finds the memory for the first checkpoint beside the training: the system takes longer for that than for the copy.

        Not before a round is over, as optimizers make their state in the first step.
        """
        state = self._session.state_dict()
        self._copies = {name: flatten_state(state[key], copy=False)[1] for key, name in self._names().items()}
        tensors = [tensor for part in self._copies.values() for tensor in part.values()]
        # Pages become memory when they are written to.
        self._reserving = threading.Thread(
            target=lambda: [tensor.zero_() for tensor in tensors], name="hvd_adaptive-reserve", daemon=True
        )
        self._reserving.start()

    def _names(self) -> dict[str, str]:
        """Files that this rank writes, by their key in the session's state."""
        shared = {} if self._session.rank else {"shared": checkpoint.GLOBAL_FILE}
        return {"own": checkpoint.rank_file(self._session.rank), **shared}

    def _start(self) -> None:
        """Copies the state and starts to write it. On every rank after the same round."""
        self.wait()
        self._check_folder()
        session = self._session
        start = time.perf_counter()
        self._attempt += 1
        self._due_from = (session.round, session.train_s)
        state = session.state_dict()
        warn_of_unequal(state["shared"]["registered"], session.transport, self._unequal)
        if not self._has_room(state):
            self._failure = "there is no room for it"
            return
        if self._reserving is not None:
            self._reserving.join()
        parts = []
        for key, name in self._names().items():
            skeleton, self._copies[name] = flatten_state(state[key], self._copies.get(name))
            parts.append((name, skeleton, self._copies[name]))
        part = checkpoint.part_of(self.folder / directory_name(session.round), self._attempt)
        added, error = [], None
        try:
            part.mkdir(parents=True, exist_ok=True)  # Somebody may have removed the folder.
            if session.rank == 0:
                self._owner.take()
                for file in self._files():
                    checkpoint.add_file(part, file)
                    added.append(part / file.name)
        except (OSError, FolderLostError) as failure:
            error = str(failure)
        content = {
            "round": session.round, "epoch": session.ledger.epoch, "cursor": session.ledger.cursor,
            "samples": session.num_samples, "train_s": session.train_s, "world_size": session.world_size,
            **asdict(self._identity),
        }  # fmt: skip
        written = (part, self._attempt, parts, added, error, content)
        self._thread = threading.Thread(target=self._write, args=written, name="hvd_adaptive-checkpoint", daemon=True)
        self._thread.start()
        self._copy_s += time.perf_counter() - start

    def wait(self) -> None:
        """Waits until this rank has written what it is writing; on rank 0 until all have, none of which may have left before."""
        if self._thread is not None:
            with long_task(self._session.transport, "writing a checkpoint"):
                self._thread.join()
            self._thread = None

    def _write(
        self, part: Path, attempt: int, parts: list[tuple[str, Any, dict[str, Tensor]]],
        added: list[Path], error: str | None, content: dict[str, Any],
    ) -> None:  # fmt: skip
        start = time.perf_counter()
        files: dict[str, Written] = {}
        try:
            if error is None:
                for name, skeleton, tensors in parts:
                    files[name] = checkpoint.write_state(part / name, skeleton, tensors)
                for path in added:
                    files[path.name] = checkpoint.measure_file(path, sync=True)
                sync_directory(part)
        except Exception as failure:
            # Whatever it is: rank 0 waits for the report.
            error = str(failure) or repr(failure)
        self._write_s += time.perf_counter() - start
        try:
            self._finish(part, attempt, files, error, content)
        except Exception as failure:
            # The other ranks are gone, which the heartbeats or the main thread report; or whatever else it is.
            self.counts.failed += 1
            self._failure = str(failure) or repr(failure)
            log.error("checkpoint of round %d was not completed: %s", content["round"], self._failure)

    def _finish(self, part: Path, attempt: int, files: dict[str, Written], error: str | None, content: dict[str, Any]) -> None:
        """Reports this rank's files; on rank 0 waits for all reports and completes the checkpoint."""
        transport, key = self._session.transport, f"checkpoint.{self._name}.{attempt}"
        report = json.dumps({"files": {name: asdict(item) for name, item in files.items()}, "error": error})
        transport.compare_set(f"{key}.{transport.rank}", "", report)
        reported = transport.add(key, 1)
        if transport.rank:
            return
        while reported < transport.world_size:
            time.sleep(_POLL_S)
            reported = transport.add(key, 0)
        ranks = range(transport.world_size)
        reports = [json.loads(transport.compare_set(f"{key}.{rank}", "", "-")) for rank in ranks]
        for name in (key, *(f"{key}.{rank}" for rank in ranks)):
            transport.forget(name)
        start = time.perf_counter()
        errors = [f"rank {rank}: {item['error']}" for rank, item in enumerate(reports) if item["error"]]
        round_number = content["round"]
        if other := self._owner.lost_to():
            errors.append(other)
        path = self.folder / directory_name(round_number)
        if not errors:
            everyone = {name: Written(**item) for r in reports for name, item in r["files"].items()}
            try:
                checkpoint.commit(part, path, everyone, content)
            except OSError as failure:
                errors.append(f"rank 0: {failure}")
        if errors:
            self.counts.failed += 1
            self._failure = "; ".join(errors)
            checkpoint.remove(part)
            log.error(
                "checkpoint of round %d was not written: %s. The run goes on; %s.",
                round_number, self._failure, describe_newest(self.folder),
            )  # fmt: skip
        else:
            self.counts.written += 1
            self._written = [*self._written[-self._keep :], path]
            try:
                checkpoint.prune(self.folder, self._keep)
            except OSError as failure:
                log.warning("an old checkpoint cannot be removed: %s", failure)
        self._write_s += time.perf_counter() - start
