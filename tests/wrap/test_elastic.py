"""run --elastic over real ranks: killed ranks and changing hosts, for scripts with commits and with checkpoints of their own."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_memory import abandoned

from hvd_adaptive.wrap.commits import contents, load

SCRIPTS = Path(__file__).parent / "scripts"
COMMAND = [sys.executable, "-m", "hvd_adaptive", "run", "--elastic"]
LIMIT_S = 240.0


@pytest.mark.parametrize("kind", ["SGD", "Adam", "SparseAdam", "Adafactor", "LBFGS"])
def test_an_optimizer_goes_on_from_a_commit_of_its_kind_only(kind: str) -> None:
    def state(name: str) -> Any:
        optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1)
        return types.SimpleNamespace(_saved_state={}, _handlers={"optimizer": None}, optimizer=optimizer)

    load(state(kind), contents(state(kind)))
    with pytest.raises(ValueError, match="its optimizer is of another kind than the script's: it has no "):
        load(state(kind), contents(state("Rprop")))


class Job:
    """A running job, whose ranks say in files where they are; its hosts are what a file says, and another one what was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "discover"
        self.script.write_text(f"#!/bin/sh\ntee -a {folder / 'told'} < {folder / 'hosts'}\n")
        self.script.chmod(0o755)
        self.child: subprocess.Popen[bytes] | None = None

    def hosts(self, slots: int) -> None:
        """Has the host offer so many slots from now on."""
        (self.folder / "part").write_text(f"localhost:{slots}\n")
        (self.folder / "part").rename(self.folder / "hosts")

    def wait_until_told(self, slots: int) -> None:
        """Waits until the supervisor has asked, heard this, and had a second or more to act before it asked again."""
        self.wait_for(lambda: (self.folder / "told").read_text().endswith(3 * f"localhost:{slots}\n"))

    def wait_for(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self.child is not None and self.child.poll() is None, "it has ended"
            assert time.monotonic() < end, f"not in {LIMIT_S} s"
            time.sleep(0.02)

    def rank(self, launch: int, rank: int) -> int:
        """Waits for a rank; returns its process id."""
        file = self.folder / f"launch-{launch}-rank-{rank}"
        self.wait_for(lambda: file.exists() and file.read_text())
        return int(file.read_text().split()[0])

    def wait_for_commits(self, launch: int, num: int) -> None:
        self.wait_for(lambda: len([line for line in self.commits() if line[0] == launch]) >= num)

    def commits(self) -> list[tuple[int, int]]:
        """The launch and number of each commit."""
        file = self.folder / "commits"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(launch), int(number)) for launch, number in map(str.split, lines)]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def run(run_job: Any, job: Job, *arguments: str | Path, during: Callable[[], None] = lambda: None) -> Any:
    def disturb(child: subprocess.Popen[bytes]) -> None:
        job.child = child
        during()

    where = ["--host-discovery-script", str(job.script)]
    return run_job([*COMMAND, *where, *map(str, arguments)], timeout=2 * LIMIT_S, during=disturb, cwd=job.folder)


def expected_model(num_epochs: int = 8, num_samples: int = 96, global_batch: int = 8) -> torch.nn.Linear:
    """What one process makes of the steps of scripts/elastic.py, without Horovod."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    x = torch.randn(num_samples, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # Horovod's broadcast_optimizer_state, at the first start: it fills an empty state by a step without gradients.
    optimizer.step()
    for epoch in range(num_epochs):
        order = list(range(num_samples))
        random.Random(3 + epoch).shuffle(order)
        for start in range(0, num_samples, global_batch):
            index = torch.tensor(order[start : start + global_batch])
            optimizer.zero_grad()
            (model(x[index]).squeeze(1) - index / num_samples).square().mean().backward()
            optimizer.step()
    return model


def test_commits_outlive_killed_ranks_and_jobs_and_take_in_hosts(run_job: Any, job: Job) -> None:
    """Every sample counts once an epoch and the result is an undisturbed run's, on one rank and two, killed and stopped."""
    before = abandoned()
    job.hosts(1)

    def during() -> None:
        pid = job.rank(1, 0)
        job.wait_for_commits(1, 3)
        os.kill(pid, signal.SIGKILL)
        job.wait_for_commits(2, 1)
        job.hosts(2)
        pid = job.rank(3, 1)
        job.wait_for_commits(3, 2)
        os.kill(pid, signal.SIGKILL)
        job.wait_for_commits(4, 1)
        assert job.child is not None
        job.child.send_signal(signal.SIGTERM)

    script = [SCRIPTS / "elastic.py", job.folder]
    first = run(run_job, job, "--max-np", "2", *script, during=during)
    assert first.returncode == 75 and not first.leftover, first.describe()
    went_on = [int(number) for number in re.findall(r"goes on from commit (\d+), [\d.]+ s after the fault", first.stderr)]
    numbers = job.commits()
    for launch, number in enumerate(went_on, 2):
        # A rank may be killed, or stopped, after the commit is written and before the test's file says so.
        last = max(number for other, number in numbers if other < launch)
        assert number - last in (0, 1), (went_on, numbers)
    moved = "localhost has room for 2 ranks now instead of 1: the job stops at the next commit"
    assert len(went_on) == 3 and moved in first.stderr, first.describe()
    parts = r"\(notice [\d.]+, teardown [\d.]+, wait [\d.]+, launch [\d.]+, imports [\d.]+, load [\d.]+, first step [\d.]+\)"
    assert len(re.findall(parts, first.stderr)) == 3 and "hvd-adaptive-event" not in first.stderr, first.describe()
    # What was in memory is in the working directory now.
    assert abandoned() <= before
    folder = next(job.folder.glob("hvd-adaptive-commits-*"))
    newest = numbers[-1][1] + 1
    assert [path.name for path in folder.iterdir()] == [f"commit-{newest:08d}"], first.describe()
    assert f"the same command with --commit-dir {folder} goes on from its commit {newest}" in first.stderr, first.describe()

    # One that is damaged is not taken.
    damaged = folder / f"commit-{newest + 1:08d}"
    shutil.copytree(folder / f"commit-{newest:08d}", damaged)
    content = (damaged / "global.safetensors").read_bytes()
    (damaged / "global.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (job.folder / "finish").touch()
    second = run(run_job, job, "--max-np", "1", "--commit-dir", folder, *script)
    assert second.returncode == 0 and f"{damaged / 'global.safetensors'} is damaged" in second.stderr, second.describe()
    assert f"goes on from commit {newest} in {folder}" in second.stderr and not folder.exists(), second.describe()
    result = torch.load(job.folder / "model.pt")
    assert torch.equal(result["model"]["uses"], torch.full((96,), -8.0, dtype=torch.float64)), second.describe()
    expected = expected_model()
    torch.testing.assert_close(result["model"]["weight"], expected.weight.data, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result["model"]["bias"], expected.bias.data, rtol=1e-9, atol=1e-12)
    assert result["step"] == 96 and result["resets"] == [2 * newest], second.describe()


def test_a_plain_script_goes_on_from_its_own_checkpoints(run_job: Any, job: Job) -> None:
    job.hosts(2)
    restarts = job.folder / "records" / "restarts.jsonl"

    def epochs() -> int:
        return len(list(job.folder.glob("checkpoint-*.pt")))

    def during() -> None:
        pid = job.rank(1, 1)
        job.wait_for(lambda: epochs() >= 2)
        os.kill(pid, signal.SIGKILL)
        job.rank(2, 1)
        job.wait_for(lambda: restarts.exists())
        job.hosts(1)
        job.rank(3, 0)
        job.wait_for(lambda: len(restarts.read_text().splitlines()) == 2)
        job.hosts(2)
        job.wait_until_told(2)
        (job.folder / "finish").touch()

    done = run(run_job, job, "--max-np", "2", "--commit-dir", "records", SCRIPTS / "own_checkpoint.py", job.folder, during=during)
    assert done.returncode == 0 and not done.leftover and epochs() == 120, done.describe()
    first = [int((job.folder / f"launch-{launch}-rank-0").read_text().split()[1]) for launch in (1, 2, 3)]
    assert first[0] == 0 < 2 <= first[1] <= first[2], done.describe()
    assert "localhost has room for 1 of its 2 ranks now: the script is ended" in done.stderr, done.describe()
    assert done.stderr.count("now instead of 1: taken in when the script is started again") == 1, done.describe()
    assert not (job.folder / "launch-4-rank-0").exists(), done.describe()
    entries = [json.loads(line) for line in restarts.read_text().splitlines()]
    assert [entry["ranks"] for entry in entries] == [2, 1] and [entry["commit"] for entry in entries] == [0, 0]
    assert [entry["cause"] for entry in entries] == ["job ended with exit code 137", "hosts changed"]
    parts = ["notice", "teardown", "wait", "launch", "imports", "first step"]
    for entry in entries:
        assert list(entry["seconds"]) == parts and entry["total_s"] == pytest.approx(sum(entry["seconds"].values()), abs=0.01)


def test_an_error_that_comes_back_ends_the_job(run_job: Any, job: Job) -> None:
    job.hosts(1)
    done = run(run_job, job, "--max-np", "1", SCRIPTS / "elastic.py", job.folder, "raise")
    assert done.returncode not in (0, 2) and done.stderr.count("KeyError: 'on purpose'") == 3, done.describe()
    assert "3 launches one after another ended without progress" in done.stderr, done.describe()
    assert not list(job.folder.glob("hvd-adaptive-commits-*"))


@pytest.mark.parametrize(
    ("num_ranks", "what", "message"),
    # At the start, and at a commit, where rank 0 is alone with it.
    [(1, "refused", "state names cannot be saved, got set"), (2, "unstorable", "state best cannot be saved, got set")],
)
def test_what_cannot_be_stored_is_named(run_job: Any, job: Job, num_ranks: int, what: str, message: str) -> None:
    job.hosts(num_ranks)
    done = run(run_job, job, "--max-np", "2", SCRIPTS / "elastic.py", job.folder, what)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and message in done.stderr, done.describe()


def test_a_commit_of_another_kind_of_optimizer_is_refused(run_job: Any, job: Job) -> None:
    job.hosts(1)

    def during() -> None:
        job.wait_for_commits(1, 1)
        assert job.child is not None
        job.child.send_signal(signal.SIGTERM)

    command = ["--max-np", "1", "--commit-dir", job.folder / "kept", SCRIPTS / "elastic.py", job.folder]
    first = run(run_job, job, *command, "SGD", during=during)
    assert first.returncode == 75 and "goes on from its commit" in first.stderr, first.describe()
    done = run(run_job, job, *command, "Adam")
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "launch 2" not in done.stderr, done.describe()
    assert "its optimizer is of another kind than the script's: it has no betas, eps" in done.stderr, done.describe()
    # Which would be refused again.
    assert "goes on from its commit" not in done.stderr, done.describe()


def test_of_two_jobs_with_one_folder_the_later_one_keeps_it(run_job: Any, job: Job) -> None:
    (job.folder / "later").mkdir()
    folder, later, ends = job.folder / "kept", Job(job.folder / "later"), []
    for each in (job, later):
        each.hosts(1)

    def until_the_other_ends() -> None:
        later.wait_for_commits(1, 1)
        # At its next commit.
        later.wait_for(lambda: job.child is not None and job.child.poll() is not None)
        (later.folder / "finish").touch()

    def begin_the_other() -> None:
        job.wait_for_commits(1, 2)
        ends.append(run(run_job, later, *options, later.folder, during=until_the_other_ends))

    options = ["--max-np", "1", "--commit-dir", folder, SCRIPTS / "elastic.py"]
    first = run(run_job, job, *options, job.folder, during=begin_the_other)
    assert first.returncode == 2 and first.stderr.count("error: ") == 1, first.describe()
    assert f"hvd-adaptive: error: another job writes in {folder} (process " in first.stderr, first.describe()
    assert "launch 2" not in first.stderr and not (job.folder / "launch-2-rank-0").exists(), first.describe()
    # It goes on from what was there, to its end, with every sample counted once an epoch.
    assert ends[0].returncode == 0 and "goes on from commit " in ends[0].stderr, ends[0].describe()
    uses = torch.load(later.folder / "model.pt")["model"]["uses"]
    assert torch.equal(uses, torch.full((96,), -8.0, dtype=torch.float64)) and not folder.exists(), ends[0].describe()
