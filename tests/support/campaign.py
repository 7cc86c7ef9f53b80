"""Runs that are struck by faults and go on: each resumes where the one before was lost, all in one run directory.

A slow or cut link takes two hosts, and a full disk one that is soon full: `site` has both where it may.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jobs import OUTLIVE_S, job_mark, marked_processes
from needs import lacks
from small_disk import small_disk
from two_hosts import ENVIRONMENT, TwoHosts

from hvd_adaptive.xmc.data import cache
from hvd_adaptive.xmc.data.source import resolve

FAULTS = ("freeze", "full", "pause", "clock", "slow", "kill", "cut")
PHASES = ("start", "claim", "step", "statistics", "merge", "checkpoint", "evaluation", "end")
NUM_RANKS = 2
NUM_SAMPLES = 2000
MEGA_BATCH = 250
# The stall limit where only that shows the fault; and else, so that no rank of a busy machine is taken for a frozen one.
LIMIT_S, PATIENT_LIMIT_S = 10.0, 20.0
# From the fault to the end of the job: the start is watched for five limits, then comes the end of MPI.
DEAD_S = 95.0
# Of a whole run, however slow the machine.
END_S = 300.0
# A host that is cut off ends by its own clock, and no launcher waits for it: the ranks on it may have to wait for longer (by a
# rank's turn of 5 s, and by as much as they started later), and then their daemon has 10 s to end.
FAR_END_S = 60.0
OPTIONS = [
    "--no-calibration", "--batch-size", "16", "--mega-batch", str(MEGA_BATCH), "--hidden-size", "16",
    "--optimizer", "sgd", "--lr", "0.5",
    "--checkpoint-interval", "1", "--resume", "auto",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        fault: "kill"; "freeze" (for good); "pause" (frozen for less than the stall limit); "clock" (a wrong one); "full" (the
            run directory's disk, till the run ends); "cut" (the link between two hosts, for good) or "slow" (for a while).
        phase: where it strikes.
        rank: which rank; for a link, whose phase it is.
        after: at which occurrence of the phase.
    """

    fault: str
    phase: str
    rank: int
    after: int

    @property
    def ends_the_job(self) -> bool:
        """Whether the run cannot go on."""
        return self.fault in ("kill", "freeze", "cut")

    @property
    def limit_s(self) -> float:
        """The stall limit of the run."""
        return LIMIT_S if self.fault in ("freeze", "cut") else PATIENT_LIMIT_S

    @property
    def needs_hosts(self) -> bool:
        """Whether it strikes the link between two hosts."""
        return self.fault in ("cut", "slow")

    def __str__(self) -> str:
        return f"{self.fault} of rank {self.rank} in {self.phase} {self.after}"


def cases(seed: int, faults: Sequence[str] = FAULTS) -> Iterator[Case]:
    """Draws faults for ever: every phase is killed once, then all faults take turns, each of which goes through all phases in an
    order of its own again and again. A cut, which takes half a minute, has every third turn."""
    generator = random.Random(seed)

    def draw(fault: str, phase: str) -> Case:
        once = phase in ("start", "end") and fault != "clock"
        # The file, directory and manifest of a checkpoint are forced to the disk one after another. An epoch has eight rounds, of
        # which not all are merged as a whole.
        most = 1 if once else 3 if phase == "merge" else 8
        return Case(fault, phase, generator.randrange(NUM_RANKS), generator.randint(1, most))

    phases = list(PHASES)
    generator.shuffle(phases)
    yield from (draw("kill", phase) for phase in phases)
    left: dict[str, list[str]] = {fault: [] for fault in faults}
    for turn in itertools.count():
        for fault in faults if turn % 3 == 0 else [fault for fault in faults if fault != "cut"]:
            # A clock is wrong from the start.
            possible = PHASES[:1] if fault == "clock" else PHASES
            left[fault] = left[fault] or generator.sample(possible, len(possible))
            yield draw(fault, left[fault].pop())


@contextlib.contextmanager
def site(folder: Path) -> Iterator[tuple[TwoHosts | None, Sequence[str]]]:
    """Makes what faults need besides processes: two hosts, and a disk of 64 MiB for the run directory.

    Args:
        folder: of a campaign.

    Yields:
        The hosts, and the faults that are possible; without root those of processes alone, which is said.
    """
    if reason := lacks(ip="iproute2", tc="iproute2", unshare="util-linux", hostname="hostname", mount="mount"):
        faults = [fault for fault in FAULTS if fault not in ("cut", "slow", "full")]
        warnings.warn(f"no cut or slow links and no full disks: {reason}", stacklevel=2)
        yield None, faults
        return
    with small_disk(folder / "disk", 1 << 16), tempfile.TemporaryDirectory(prefix="hva-") as hosts_folder:
        hosts = TwoHosts(Path(hosts_folder))
        try:
            yield hosts, FAULTS
        finally:
            hosts.close()


class Campaign:
    """Runs cases one after another.

    Args:
        folder: of the run directory, which is on its `disk` where `site` has made one, and the markers.
        data: of the training data, 2,000 samples.
        run_job: as the fixture of that name.
        hosts: for faults of their link; None: there are none.
        done: runs that were made already.
        cache_folder: of the data's cache; None: in the folder.
    """

    def __init__(
        self,
        folder: Path,
        data: Path,
        run_job: Callable[..., Any],
        *,
        hosts: TwoHosts | None = None,
        done: int = 0,
        cache_folder: Path | None = None,
    ) -> None:
        self._disk = folder / "disk"
        self.run_directory = (self._disk if self._disk.is_mount() else folder) / "run"
        self._hosts = hosts
        self._folder = folder
        self._data = data
        self._run_job = run_job
        self._number = done
        # Not in a run: what it imports holds Python's lock for longer than the stall limit allows on a busy machine.
        self._cache = cache_folder or folder / "cache"
        cache.build(resolve(str(data), None), self._cache)

    def run(self, case: Case) -> dict[str, Any]:
        """Runs a case and checks all that can be checked of it; returns what became of it.

        Raises:
            AssertionError: naming the case.
        """
        self._number += 1
        before = self.rounds()
        marker = self._folder / f"struck-{self._number}"
        marker.unlink(missing_ok=True)
        spec: dict[str, Any] = {"rank": case.rank, "phase": case.phase, "after": case.after, "marker": str(marker)}
        filler, struck = self._disk / "filler", self._folder / "struck"
        if case.fault == "clock":
            spec = {"rank": case.rank, "clock_s": 86_400.0 * (1 if case.after % 2 else -1)}
        elif case.fault == "full":
            spec["fill"] = str(filler)
        elif case.needs_hosts:
            struck.unlink(missing_ok=True)
            spec["until"] = str(struck)
        else:
            spec["signal"] = "SIGKILL" if case.fault == "kill" else "SIGSTOP"
        epoch = before[-1]["samples"] // NUM_SAMPLES if before else 0
        epochs = epoch + 2 if case.phase == "end" or not case.ends_the_job else 100_000

        def during(child: subprocess.Popen[bytes]) -> None:
            if case.fault == "pause":
                wake(child, marker, case.limit_s / 4)
            elif case.needs_hosts:
                self._strike_link(case, child, marker, struck)

        try:
            hosts = self._hosts if case.needs_hosts else None
            job = self.train(spec, epochs=epochs, hosts=hosts, limit_s=case.limit_s, during=during)
            ended_s = time.time() - job.outlived_s
        finally:
            filler.unlink(missing_ok=True)
            if case.needs_hosts and self._hosts is not None:
                self._hosts.mend()
                self._hosts.slow()
        about = f"{self._number}: {case}\n{job.describe()}"
        assert not job.timed_out and not job.leftover, about
        after = self.rounds()
        check_ledger(after, about)
        assert marker.exists() or case.fault == "clock", f"never struck: {about}"
        if case.ends_the_job:
            assert job.returncode not in (0, 2), about
            assert ended_s - marker.stat().st_mtime < DEAD_S, about
            assert names_rank(job.stderr, None if case.fault == "cut" else case.rank), about
            # A bare mpirun names none, and ranks that have not met know of none.
            named = re.search(r"[Tt]he (last|newest) checkpoint is|there is no checkpoint in", job.stderr)
            assert named or (case.phase == "start" and case.needs_hosts), about
        elif case.fault == "full" and marker.exists() and job.returncode:
            # It went on while it could: what a run ends with must be written.
            assert "No space left on device" in job.stderr and "Traceback" not in job.stderr, about
        else:
            assert job.returncode == 0, about
            summary = json.loads((self.run_directory / "summary.json").read_text())
            assert summary["ranks_agreed"] is True and summary["samples"] == epochs * NUM_SAMPLES, about
        return {
            "case": str(case), "exit_code": job.returncode, "wall_s": round(job.wall_s, 1),
            "outlived_s": round(job.outlived_s, 1), "rounds": len(after), "rounds_before": len(before),
        }  # fmt: skip

    def finish(self) -> None:
        """Runs on to the end of an epoch without a fault.

        Raises:
            AssertionError: if that fails, or something was lost or counted twice.
        """
        rounds = self.rounds()
        epochs = rounds[-1]["samples"] // NUM_SAMPLES + 2
        job = self.train(None, epochs=epochs)
        assert job.returncode == 0 and not job.leftover, job.describe()
        check_ledger(self.rounds(), job.describe())
        assert self.rounds()[-1]["samples"] == epochs * NUM_SAMPLES, job.describe()

    def rounds(self) -> list[dict[str, Any]]:
        """The whole lines of rounds.jsonl."""
        path = self.run_directory / "rounds.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _strike_link(self, case: Case, child: subprocess.Popen[bytes], marker: Path, struck: Path) -> None:
        assert self._hosts is not None
        while not marker.exists() and child.poll() is None:
            time.sleep(0.02)
        if case.fault == "cut":
            self._hosts.cut()
        else:
            self._hosts.slow("300kbit", "4kb")
        struck.touch()
        if case.fault == "slow":
            time.sleep(case.limit_s / 4)
            self._hosts.slow()

    def train(
        self,
        spec: dict[str, Any] | None,
        *,
        epochs: int,
        hosts: TwoHosts | None = None,
        limit_s: float = PATIENT_LIMIT_S,
        **job: Any,
    ) -> Any:
        """Runs the command with two ranks, one on each of two hosts if there are some."""
        where = ["--data", str(self._data), "--cache-dir", str(self._cache), "--out", str(self.run_directory)]
        env = {} if spec is None else {"FAULT_SPEC": json.dumps(spec)}
        command = [sys.executable, "-m", "hvd_adaptive", "train"]
        arguments = [*where, *OPTIONS, "--epochs", str(epochs), "--stall-limit-s", str(limit_s)]
        if hosts is None:
            command += ["-np", str(NUM_RANKS), *arguments]
        else:
            env |= ENVIRONMENT
            command = hosts.mpirun(1, [*command, *arguments], forward=["FAULT_SPEC"])
        return self._run_job(command, env=env, timeout=END_S, grace_s=OUTLIVE_S if hosts is None else FAR_END_S, **job)


def write_data(folder: Path) -> None:
    """Writes a small learnable data set in the XMC format: a label's words are its own."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", NUM_SAMPLES), ("test", 700)):
        lines = [f"{count} 300 40"]
        for _ in range(count):
            labels = np.unique(generator.integers(0, 40, generator.integers(1, 4)))
            words = np.unique(np.concatenate([generator.integers(label * 7, label * 7 + 7, 3) for label in labels]))
            values = " ".join(f"{word}:{generator.random() + 0.5:.3f}" for word in words)
            lines.append(f"{','.join(map(str, labels))} {values}")
        with gzip.open(folder / f"toy_{split}.txt.gz", "wt") as file:
            file.write("\n".join(lines) + "\n")


def check_ledger(rounds: list[dict[str, Any]], about: str) -> None:
    """Every round is there once, follows from the one before it, and no sample of an epoch is left out or counted twice."""
    assert [line["round"] for line in rounds] == list(range(len(rounds))), about
    total = 0
    for line in rounds:
        size = sum(line["ranks"]["samples"])
        assert 0 < size <= min(2 * MEGA_BATCH, NUM_SAMPLES - total % NUM_SAMPLES), about
        total += size
        assert line["samples"] == total, about


def names_rank(text: str, rank: int | None) -> bool:
    """Whether an output says which rank is missing (None: any): the launcher's or heartbeats' words, or those of the start."""
    which = r"\d+" if rank is None else str(rank)
    # A rank that freezes within the first seconds may have sent no heartbeat yet, and where it is was not told.
    missing = rf"rank {which} (on \S+ \(pid \d+\)|\(no heartbeat of it has come\)) is"
    return bool(re.search(rf"process rank {which} with PID|{missing}|has waited .* for all ranks to meet", text))


def wake(child: subprocess.Popen[bytes], marker: Path, after_s: float) -> None:
    """Lets the ranks of a job go on that have stopped themselves."""
    stopped: list[int] = []
    # The marker comes before the signal.
    while child.poll() is None and not stopped:
        time.sleep(0.02)
        stopped = _stopped(job_mark(child.pid)) if marker.exists() else []
    time.sleep(after_s)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _stopped(mark: bytes) -> list[int]:
    found = []
    for pid in marked_processes(mark):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                found.append(pid)
    return found
