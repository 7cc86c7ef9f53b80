"""--elastic over real ranks: killed ranks, hosts that leave and come, and what cannot go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import terminal
from shared_memory import abandoned

COMMAND = [sys.executable, "-m", "hvd_adaptive", "train", "--elastic"]
QUICK = ["--batch-size", "16", "--mega-batch", "400", "--optimizer", "sgd", "--lr", "0.5", "--eval-rounds", "100"]
LIMIT_S = 120.0


class Job:
    """What a test sees of a running elastic job, from outside."""

    def __init__(self, child: subprocess.Popen[bytes], run: Path) -> None:
        self.child = child
        self.run = run

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The last one may not be written yet.
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self.child.poll() is None, f"it ended with {self.child.returncode}"
            assert time.monotonic() < end, f"not in {LIMIT_S} s"
            time.sleep(0.05)

    def wait_for_rounds(self, launch: int, more: int = 3) -> None:
        """Waits until the launch has made some merges."""

        def enough() -> bool:
            rounds = self.lines("rounds.jsonl")
            starts = [i for i, line in enumerate(rounds) if line.get("start", {}).get("launch") == launch]
            return bool(starts) and len(rounds) - starts[0] >= more

        self.wait_for(enough)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
                name = (folder / "comm").read_text()
            except OSError:
                continue
            number = next((int(v[21:]) for v in environment if v.startswith(b"OMPI_COMM_WORLD_RANK=")), None)
            if number is not None and str(self.run).encode() in command and name.startswith("python"):
                found[number] = int(folder.name)
        return [found[rank] for rank in sorted(found)]


def check_ledger(rounds: list[dict[str, Any]], num_samples: int, mega_batch: int) -> None:
    """Every round is there once, follows from the one before it, and consumed what it should of the epoch.

    Where the ranks were asked to stop a round is shorter, and what is left of the epoch is dealt to rounds of other sizes.
    """
    assert [line["round"] for line in rounds] == list(range(len(rounds)))
    total = 0
    for line in rounds:
        size = sum(line["ranks"]["samples"])
        left = num_samples - total % num_samples
        assert 0 < size <= min(2 * mega_batch, left), line
        total += size
        assert line["samples"] == total, line
        assert line["epoch"] == pytest.approx(total / num_samples, abs=1e-6)


@pytest.fixture
def elastic(run_job: Any, data: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(*options: str, during: Callable[[Job], None], **job: Any) -> Any:
        out = tmp_path / "run"
        where = ["--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out)]
        return run_job(
            [*COMMAND, *where, *QUICK, *options],
            timeout=6 * LIMIT_S,
            during=lambda child: during(Job(child, out)),
            **job,
        )

    return run


def test_killed_ranks_and_changing_hosts(elastic: Any, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    hosts.write_text("localhost:2\n")
    before = abandoned()

    def during(job: Job) -> None:
        job.wait_for_rounds(1)
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.wait_for_rounds(2)
        assert len(job.ranks()) == 2
        hosts.write_text("localhost:1\n")
        job.wait_for_rounds(3)
        assert len(job.ranks()) == 1
        hosts.write_text("localhost:4\n")
        job.wait_for_rounds(4)
        assert len(job.ranks()) == 2
        job.wait_for(lambda: len(job.lines("restarts.jsonl")) == 3)
        job.child.send_signal(signal.SIGUSR1)

    options = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script), "--epochs", "100000"]
    job = elastic(*options, during=during)
    assert job.returncode == 75 and not job.leftover, job.describe()
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    check_ledger(rounds, 2000, 400)
    restarts = [json.loads(line) for line in (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()]
    assert [entry["ranks"] for entry in restarts] == [2, 1, 2]
    assert [entry["cause"] for entry in restarts] == ["job ended with exit code 137", "hosts changed", "hosts changed"]
    for entry in restarts:
        # Nothing that was committed is computed again. A rank that is killed after the merge's line is written, but before the
        # checkpoint in memory is complete, costs that round: it was still the current one.
        assert entry["rounds_repeated"] <= (entry["cause"] != "hosts changed"), entry
        parts = ["notice", "teardown", "wait", "launch", "imports", "load", "first merge"]
        assert list(entry["seconds"]) == parts and all(seconds >= 0 for seconds in entry["seconds"].values())
        assert entry["total_s"] == pytest.approx(sum(entry["seconds"].values()), abs=0.01)
        assert "s after the fault (notice" in job.stderr
    # The total batch stays: one rank takes both ranks' samples a step.
    sizes = [line["ranks"]["batch_size"] for line in rounds]
    assert [list(group) for group in sorted({tuple(size) for size in sizes})] == [[16.0, 16.0], [32.0]]
    newest = max((tmp_path / "run" / "checkpoints").glob("round-*")).name
    assert newest == f"round-{len(rounds):08d}"
    assert abandoned() <= before


def test_a_closed_terminal_ends_the_job_in_order(run_job: Any, data: Path, tmp_path: Path) -> None:
    out, closing = tmp_path / "run", tmp_path / "closing"
    where = ["--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out)]

    def close(child: subprocess.Popen[bytes]) -> None:
        Job(child, out).wait_for_rounds(1)
        closing.touch()

    command = [*COMMAND, *where, *QUICK, "--max-np", "2", "--epochs", "100000"]
    before = abandoned()
    job = run_job([sys.executable, terminal.__file__, str(closing), *command], during=close, timeout=2 * LIMIT_S)
    assert job.returncode == 75 and not job.leftover, job.describe()
    rounds = (out / "rounds.jsonl").read_text().splitlines()
    assert max((out / "checkpoints").glob("round-*")).name == f"round-{len(rounds):08d}"
    assert abandoned() <= before


@pytest.mark.parametrize("ranks", [[], ["-np", "2"], ["--elastic", "--max-np", "2"]], ids=["alone", "np", "elastic"])
def test_ctrl_c_saves_and_ends(run_job: Any, data: Path, tmp_path: Path, ranks: list[str]) -> None:
    out = tmp_path / "run"
    where = ["--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out)]

    def interrupt(child: subprocess.Popen[bytes]) -> None:
        job = Job(child, out)
        job.wait_for(lambda: len(job.lines("rounds.jsonl")) >= 3)
        child.send_signal(signal.SIGINT)

    command = [sys.executable, "-m", "hvd_adaptive", "train", *ranks, *where, *QUICK, "--epochs", "100000"]
    job = run_job(command, during=interrupt, timeout=2 * LIMIT_S)
    assert job.returncode == 130 and not job.leftover, job.describe()
    assert "Go on with --resume auto." in job.stderr and "Traceback" not in job.stderr, job.describe()
    assert ("exit code 130 after Ctrl-C (which their launcher" in job.stderr) == ("-np" in ranks), job.describe()
    rounds = (out / "rounds.jsonl").read_text().splitlines()
    assert max((out / "checkpoints").glob("round-*")).name == f"round-{len(rounds):08d}"


def test_ranks_end_with_a_supervisor_that_is_killed(elastic: Any) -> None:
    def kill(job: Job) -> None:
        job.wait_for_rounds(1)
        job.child.kill()

    job = elastic("--max-np", "2", "--epochs", "100000", during=kill)
    assert job.returncode == -signal.SIGKILL and not job.leftover, job.describe()


def test_a_job_that_is_queued_again_goes_on_from_its_own_checkpoints(run_job: Any, data: Path, tmp_path: Path) -> None:
    """It began from another run's, which its command line still says."""
    first, second = tmp_path / "first", tmp_path / "second"

    def train(out: Path, epochs: int, *options: str, **env: str) -> Any:
        where = ["--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out), "--epochs", str(epochs)]
        command = [sys.executable, "-m", "hvd_adaptive", "train", *where, *QUICK, *options]
        job = run_job(command, env=env, timeout=2 * LIMIT_S)
        assert job.returncode == 0, job.describe()
        return job

    train(first, 1)
    train(second, 2, "--resume", str(first))
    again = train(second, 3, "--resume", str(first), SLURM_RESTART_COUNT="1")
    assert f"resumed from {second}/checkpoints/round-00000010" in again.stderr, again.describe()
    # Where it was lost before it had one, it begins as it did.
    shutil.rmtree(second / "checkpoints")
    again = train(second, 2, "--resume", str(first), "--elastic", "--max-np", "1", SLURM_RESTART_COUNT="1")
    assert f"resumed from {first}/checkpoints/round-00000005" in again.stderr, again.describe()
    rounds = [json.loads(line) for line in (second / "rounds.jsonl").read_text().splitlines()]
    check_ledger(rounds, 2000, 400)
    assert len(rounds) == 10
