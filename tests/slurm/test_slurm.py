"""The command under a real Slurm: srun, sbatch, mpirun inside a job, and the wrong --mpi."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import NUM_SAMPLES
from two_hosts import NAMES, TwoHosts

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "hvd_adaptive"]
NUM_EPOCHS = 4
Options = Callable[..., list[str]]

pytestmark = pytest.mark.root
beside = pytest.mark.beside


def check_run(folder: Path, hosts: list[str]) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert sorted(summary["hosts"]) == hosts
    assert summary["ranks_agreed"] is True and summary["final"]["p1"] > 0.2
    assert summary["samples"] == NUM_EPOCHS * NUM_SAMPLES == sum(summary["ranks"]["num_samples"])


@beside
@pytest.mark.usefixtures("pmix")
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_srun(run_in_slurm: Callable[..., Any], train_options: Options, folder: Path, num_nodes: int) -> None:
    # A rank that fails before it has met the others ends the step: else they wait for it as long as a slow start may take.
    nodes = ["-walpha", "-N1"] if num_nodes == 1 else ["-N2"]
    srun = ["srun", "--kill-on-bad-exit=1", *nodes, "-n2", "--mpi=pmix"]
    job = run_in_slurm(*srun, *COMMAND, "train", *train_options(folder, NUM_EPOCHS))
    assert job.returncode == 0, job.describe()
    check_run(folder / "run", ["alpha", "alpha" if num_nodes == 1 else "beta"])


@beside
@pytest.mark.parametrize("mpi", [[], ["--mpi=pmi2"]], ids=["default", "pmi2"])
def test_srun_with_the_wrong_mpi(run_in_slurm: Callable[..., Any], train_options: Options, folder: Path, mpi: list[str]) -> None:
    job = run_in_slurm("srun", "-n2", *mpi, *COMMAND, "train", *train_options(folder, NUM_EPOCHS), alone=True)
    assert job.returncode != 0 and not job.timed_out, job.describe()
    assert job.stderr.count("hvd-adaptive: error:") == 1, job.describe()
    assert "srun started 2 ranks" in job.stderr and "start with `srun --mpi=pmix`" in job.stderr, job.describe()
    assert "MPI_Init" not in job.stderr, job.describe()


@beside
def test_one_task_of_srun_trains_by_itself(
    run_in_slurm: Callable[..., Any], train_options: Options, folder: Path
) -> None:
    # As from the shell of `srun --pty bash`.
    job = run_in_slurm("srun", "-walpha", "-n1", "--mpi=none", *COMMAND, "train", *train_options(folder, NUM_EPOCHS), alone=True)
    assert job.returncode == 0, job.describe()
    check_run(folder / "run", ["alpha"])


@beside
@pytest.mark.usefixtures("pmix")
def test_a_killed_task_ends_the_step(
    run_in_slurm: Callable[..., Any], hosts: TwoHosts, train_options: Options, folder: Path
) -> None:
    killed_s = float("nan")

    def kill(child: Any) -> None:
        nonlocal killed_s
        rounds = folder / "run" / "rounds.jsonl"
        while child.poll() is None and not (rounds.exists() and rounds.read_text()):
            time.sleep(0.1)
        hosts.signal_ranks("beta", signal.SIGKILL, argument=str(folder / "run"))
        killed_s = time.monotonic()

    options = [*train_options(folder, NUM_EPOCHS), "--epochs", "10000", "--mega-batch", "2000", "--stall-limit-s", "8"]
    job = run_in_slurm("srun", "-N2", "-n2", "--mpi=pmix", *COMMAND, "train", *options, during=kill)
    took_s = time.monotonic() - job.outlived_s - killed_s
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert took_s < 110 and "beta" in job.stderr, job.describe()


# `sbatch --wait` asks too seldom.
SUBMIT_AND_WAIT = """
job=$(sbatch --parsable "$@") || exit
while squeue --noheader --job="$job" | grep -q .; do sleep 0.3; done
! scontrol show job "$job" | grep -o "ExitCode=[0-9:]*" | grep -v "=0:0"
"""
BOTH = ["alpha", "alpha", "beta", "beta"]
SCRIPTS = [
    ("one-node", ["--nodelist=alpha"], ["alpha", "alpha"]),
    ("several-nodes", [], BOTH),
    ("several-nodes-mpirun", [], BOTH),
    ("mixed-gpus-constraint", ["--constraint=[gpus-of-alpha*1&gpus-of-beta*1]"], BOTH),
]


def submit_and_wait(
    run_in_slurm: Callable[..., Any], options: list[str], folder: Path, name: str, of_each: list[list[str]], expected: list[str]
) -> None:
    output = folder / "output"
    smaller = ["--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--time=5", f"--output={output}"]
    of_jobs = [[*smaller, *own] for own in of_each or [[]]]
    sbatch = [word for words in of_jobs for word in (":", *words)][1:]
    script = str(ROOT / "slurm" / f"{name}.sbatch")
    job = run_in_slurm("bash", "-c", SUBMIT_AND_WAIT, "submit", *sbatch, script, *options)
    assert job.returncode == 0, job.describe() + (output.read_text() if output.exists() else "")
    check_run(folder / "run", expected)


@beside
@pytest.mark.usefixtures("pmix")
@pytest.mark.parametrize(("name", "constraints", "expected"), SCRIPTS, ids=[script[0] for script in SCRIPTS])
def test_batch_scripts(
    run_in_slurm: Callable[..., Any], train_options: Options, folder: Path, name: str, constraints: list[str], expected: list[str]
) -> None:
    submit_and_wait(run_in_slurm, train_options(folder, NUM_EPOCHS), folder, name, [constraints], expected)


@pytest.mark.usefixtures("pmix")
def test_a_batch_script_of_two_jobs(run_in_slurm: Callable[..., Any], train_options: Options, folder: Path) -> None:
    # Not beside others: there srun has once waited for its two steps when both were over.
    of_each = [[f"--constraint=gpus-of-{name}", f"--cpus-per-task={1 + index}"] for index, name in enumerate(NAMES)]
    submit_and_wait(run_in_slurm, train_options(folder, NUM_EPOCHS), folder, "mixed-gpus-hetjob", of_each, BOTH)


def test_every_batch_script_is_tested() -> None:
    others = {"preemptible", "preemptible-mpirun", "mixed-gpus-hetjob"}  # two of them in test_preemption.py
    assert {path.stem for path in (ROOT / "slurm").glob("*.sbatch")} == {script[0] for script in SCRIPTS} | others
