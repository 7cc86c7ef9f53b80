"""What a supervisor keeps going, a training or a script: how its ranks are started, and how far they are."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvd_adaptive.cluster.hosts import Hosts
from hvd_adaptive.cluster.job_memory import keep, move_to_disk
from hvd_adaptive.cluster.last_checkpoint import (
    COMMIT,
    OWNER,
    ROUND,
    describe_newest,
    newest_checkpoint,
    number_of,
)
from hvd_adaptive.exit_codes import EXIT_PREEMPTED

RECORDS = "restarts.jsonl"
_TAIL_BYTES = 1 << 20
_STAYS = "It stays in memory, and is lost when this machine restarts"
EVENT = "hvd-adaptive-event: "
"""Before what a script's ranks tell their supervisor, on standard error: the one way that leads from every host to it."""


@dataclass
class Launch:
    """One start of the job.

    Attributes:
        number: from 1.
        hosts: ranks by host.
        cause: why it was started.
        blamed: the hosts that ended the launch before.
        num_before: rounds or commits that were there before it.
        parts_s: seconds from the cause on, by name; what came before the launch first.
        started_s: when the launcher was started.
        has_begun: it has merged or stepped.
    """

    number: int
    hosts: Hosts
    cause: str
    blamed: list[str]
    num_before: int
    parts_s: dict[str, float]
    started_s: float = 0.0
    has_begun: bool = False


@dataclass(frozen=True)
class Beginning:
    """A launch that has merged or stepped for the first time.

    Attributes:
        record: what restarts.jsonl says of where it goes on.
        text: the same for people.
        parts_s: seconds that it took within the ranks, by name.
    """

    record: dict[str, Any]
    text: str
    parts_s: dict[str, float]


class Job(Protocol):
    """The differences between what is supervised."""

    records: Path | None
    """Where restarts are recorded, if anywhere."""
    stops_at: str
    """Where the ranks stop that are asked to."""
    no_progress: str
    """How a launch ends that counts against the job."""

    @property
    def stops_in_order(self) -> bool:
        """Whether the ranks stop by themselves after SIGUSR1, with all that they have done."""

    def num_done(self) -> int:
        """Rounds or commits that are there to go on from."""

    def arguments(self, number: int, *, local: bool) -> list[str]:
        """The ranks' command for a launch, whose ranks all are on this host or not."""

    def hear(self, line: str) -> bool:
        """Takes in a line of the ranks' standard error; returns whether it is not for people. From another thread."""

    def beginning(self, launch: Launch) -> Beginning | None:
        """How the launch goes on; None while it has neither merged nor stepped."""

    def has_got_on(self, launch: Launch, code: int, *, blamed: bool) -> bool:
        """Whether a launch that has ended with an exit code brought the job on, so that the next ones may fail again; ``blamed``:
        the fault was another's."""

    def was_stopped(self, code: int) -> bool:
        """Whether the ranks ended so because they were asked to."""

    def is_finished(self, code: int) -> bool:
        """Whether a launch that ended with this exit code has ended the job."""

    def saved(self) -> str:
        """What there is to go on from, in a part of a sentence."""

    def close(self, *, finished: bool) -> str:
        """Leaves what is to stay when the supervisor ends; returns what to say of it."""


class TrainJob:
    """``train``: everything is in its run directory.

    Args:
        argv: the ranks' command, without the options of elasticity, ``--out`` and ``--resume``.
        directory: the run's, on storage that all hosts share.
        resume: what the first launch resumes from, None for nothing.
        memory: the supervisor's folder in memory.
    """

    stops_at = "merge"
    no_progress = "ended before a new checkpoint"
    stops_in_order = True

    def __init__(self, argv: Sequence[str], directory: Path, resume: str | None, memory: Path) -> None:
        self._argv = list(argv)
        self._directory = directory
        self._resume = resume
        self._memory = memory
        self._checkpoints = (memory, directory / "checkpoints")
        self._first_round = 0
        self._has_begun = False
        self.records: Path | None = directory / RECORDS

    def num_done(self) -> int:
        last = self._last_rounds()[-1:]
        return int(last[0]["round"]) + 1 if last else 0

    def arguments(self, number: int, *, local: bool) -> list[str]:
        resume = self._resume if number == 1 or newest_checkpoint(*self._checkpoints) is None else "auto"
        argv = [*self._argv, "--out", str(self._directory), "--launch", str(number), "--memory-dir", str(self._memory)]
        # Where the first launch was lost before a checkpoint, the next one starts afresh in the same folder.
        return argv + (["--resume", resume or "auto"] if resume or number > 1 else [])

    def hear(self, line: str) -> bool:
        """See :class:`Job`: the run directory says it all."""
        return False

    def beginning(self, launch: Launch) -> Beginning | None:
        rounds = reversed(self._last_rounds())
        first = next((line for line in rounds if line.get("start", {}).get("launch") == launch.number), None)
        if first is None:
            return None
        self._first_round, self._has_begun = first["round"], True
        record = {"round": first["round"], "rounds_repeated": max(0, launch.num_before - first["round"])}
        return Beginning(record, f"at round {first['round'] + 1}", first["start"]["seconds"])

    def has_got_on(self, launch: Launch, code: int, *, blamed: bool) -> bool:
        # An error that comes back after each merge of the same round comes before the next new checkpoint.
        newest = newest_checkpoint(*self._checkpoints)
        return launch.has_begun and newest is not None and number_of(newest) > self._first_round

    def was_stopped(self, code: int) -> bool:
        return code == EXIT_PREEMPTED

    def is_finished(self, code: int) -> bool:
        # mpirun may say 0 of a job whose node was taken from it.
        return code == 0 and (self._directory / "summary.json").exists()

    def saved(self) -> str:
        return describe_newest(*self._checkpoints)

    def close(self, *, finished: bool) -> str:
        # Of a run that never began there is nothing to say; the folder may have another one's.
        if finished or not (self._has_begun or (self._resume and self.num_done())):
            return ""
        folder = self._directory / "checkpoints"
        # Ranks that end in order have saved, and those that are lost have not.
        if newest_checkpoint(self._memory) is not None and self._has_folder():
            try:
                move_to_disk(self._memory, folder, kind=ROUND)
            except OSError as error:
                kept = keep(self._memory, kind=ROUND)
                return (
                    f"the last checkpoint cannot be moved to {folder}: {error}. {_STAYS}. Make room, move {kept}/{ROUND}-* to "
                    f"{folder}, and go on with --resume auto; or go on elsewhere with --resume {kept} and another --out"
                )
        return describe_newest(folder)

    def _has_folder(self) -> bool:
        """Whether no ranks but this job's have taken the run directory since its own did."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            owner = json.loads((self._directory / OWNER).read_text())["job"]
            return str(owner).startswith(f"{job_name(self._memory)}/")
        # As where the disk was full.
        return True

    def _last_rounds(self) -> list[dict[str, Any]]:
        """The last rounds of the run directory; rounds of this launch are among them if there are any yet."""
        found = []
        with contextlib.suppress(OSError), (self._directory / "rounds.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            for line in file.read().split(b"\n"):
                # The first may be cut off, and the last not be written yet.
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found


def job_name(memory: Path) -> str:
    """Returns what a job is called in all its launches.

    Args:
        memory: its supervisor's folder in memory, which no other has.
    """
    return memory.name


class ScriptJob:
    """``run``: a script that starts from its beginning each time, or, with hvd.elastic, from its newest commit.

    Args:
        options: of ``run`` for the ranks, without those of elasticity.
        script: the script and its arguments.
        commit_dir: the folder for commits, on storage that all hosts share; None: memory, as long as all ranks are on this
            host, else a new one in the working directory.
        memory: the supervisor's folder in memory.
        other: says which other job has the folder for commits, if one has.
    """

    stops_at = "commit"
    no_progress = "ended without progress (a commit; without hvd.elastic a minute of optimizer steps that another's fault ended)"

    def __init__(
        self,
        options: Sequence[str],
        script: Sequence[str],
        commit_dir: Path | None,
        memory: Path,
        other: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._options = list(options)
        self._script = list(script)
        self._is_chosen = commit_dir is not None
        self._directory = commit_dir or Path.cwd() / f"hvd-adaptive-commits-{secrets.token_hex(4)}"
        self._memory = memory
        self._other = other
        # A folder of one's own is nobody else's.
        self._has_folder = not self._is_chosen
        self._commits = (memory, self._directory)
        self.records = self._directory / RECORDS if self._is_chosen else None
        self._events: dict[str, dict[str, Any]] = {}

    @property
    def stops_in_order(self) -> bool:
        return "commits" in self._events

    def num_done(self) -> int:
        newest = newest_checkpoint(*self._commits, kind=COMMIT)
        return number_of(newest) if newest else 0

    def arguments(self, number: int, *, local: bool) -> list[str]:
        """See :class:`Job`.

        Raises:
            RuntimeError: another job has taken the folder for commits over.
        """
        if lost := self._lost_to():
            raise RuntimeError(lost)
        # That the script commits holds for all launches, also before the ranks say so again.
        self._events = {name: event for name, event in self._events.items() if name == "commits"}
        in_memory = local and not self._is_chosen
        if not in_memory:
            # Hosts that do not share this one's memory shall find the newest commit.
            move_to_disk(self._memory, self._directory, kind=COMMIT)
        where = ["--launch", str(number), "--commit-dir", str(self._directory)]
        where += ["--memory-dir", str(self._memory)] if in_memory else []
        where += ["--job", job_name(self._memory)] if self._is_chosen else []
        return ["run", *where, *self._options, *self._script]

    def hear(self, line: str) -> bool:
        text = line.partition(EVENT)[2]
        if not text:
            # Open MPI's word for a rank that has ended and not left MPI, as by os._exit.
            if "exiting improperly" in line:
                self._events["left"] = {}
            return False
        # Ranks that are ended may be in the midst of one.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(text)
            self._events[event["event"]] = event
            self._has_folder |= event["event"] == "has folder"
        return True

    def beginning(self, launch: Launch) -> Beginning | None:
        step = self._events.get("step")
        if step is None:
            return None
        commit = step["commit"]
        if self.stops_in_order:
            text = f"from commit {commit}" if commit else "from the script's beginning, as nothing was committed"
        else:
            text = "as the script goes on from what it has saved itself (it uses no hvd.elastic)"
        return Beginning({"commit": commit}, text, step["seconds"])

    def has_got_on(self, launch: Launch, code: int, *, blamed: bool) -> bool:
        if self.stops_in_order:
            # An error that comes back at the same place comes before the next new commit.
            return self.num_done() > launch.num_before
        # A script that leaves by os._exit would be started again for ever.
        is_own = code == 0 or not self._events.keys().isdisjoint(("raised", "left"))
        return "steady" in self._events and (blamed or not is_own)

    def was_stopped(self, code: int) -> bool:
        return code == EXIT_PREEMPTED and "stopped" in self._events

    def is_finished(self, code: int) -> bool:
        return code == 0 and "finished" in self._events

    def saved(self) -> str:
        newest = newest_checkpoint(*self._commits, kind=COMMIT)
        if newest is None:
            return "nothing was committed through hvd.elastic, so the next start begins at the script's beginning"
        return f"the last commit is {newest}"

    def close(self, *, finished: bool) -> str:
        if self._lost_to():
            return ""
        if finished:
            # Where the script has not begun to commit, what is there may be another job's.
            for folder in self._commits if self._has_folder else ():
                for path in folder.glob("*commit-*"):
                    shutil.rmtree(path, ignore_errors=True)
            self._remove_folder()
            return ""
        newest = newest_checkpoint(*self._commits, kind=COMMIT)
        if newest is None:
            self._remove_folder()
            return ""
        if not self._has_folder:
            # It may have been refused because of this commit.
            return ""
        try:
            move_to_disk(self._memory, self._directory, kind=COMMIT)
        except OSError as error:
            return self._leave_in_memory(newest, error)
        return f"the same command with --commit-dir {self._directory} goes on from its commit {self.num_done()}"

    def _leave_in_memory(self, newest: Path, error: OSError) -> str:
        """Keeps the newest commit where it is, as it cannot be moved to the disk; returns how to go on from it."""
        if newest_checkpoint(self._directory, kind=COMMIT) is None:
            self._remove_folder()
        kept = keep(self._memory, kind=COMMIT)
        return (
            f"the last commit cannot be moved to {self._directory}: {error}. {_STAYS}: the same command with --commit-dir {kept} "
            f"goes on from its commit {number_of(newest)}"
        )

    def _lost_to(self) -> str | None:
        """Which other job has taken over the folder that was this one's."""
        return self._other() if self._has_folder else None

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            if self._has_folder:
                (self._directory / OWNER).unlink(missing_ok=True)
            # Not where there is something else in it, as restarts.jsonl in one that a person chose.
            self._directory.rmdir()
