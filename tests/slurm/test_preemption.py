"""Jobs that end before their run does, under a real Slurm: requeued, at the time limit, at a second signal, cancelled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import NUM_SAMPLES
from ledger import check_ledger
from slurm_site import SlurmJob, SlurmSite
from two_hosts import TwoHosts

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 12
SLOW = "0:10,10"  # a fast machine would end the training before it is told to

pytestmark = pytest.mark.root


def check_finished(job: SlurmJob) -> None:
    job.wait(lambda: job.state == "COMPLETED")
    summary = json.loads((job.run / "summary.json").read_text())
    assert summary["ranks_agreed"] is True and summary["samples"] == EPOCHS * NUM_SAMPLES, job.output
    check_ledger(job.run, dataset_size=NUM_SAMPLES, num_epochs=EPOCHS)


@pytest.fixture
def submit(
    run_in_slurm: Callable[..., Any], slurm: SlurmSite, hosts: TwoHosts, data: Path, tmp_path: Path
) -> Callable[..., SlurmJob]:
    """Submits a training over two nodes with one rank each, which goes on with the one in `tmp_path`."""

    def run(*sbatch: str, train: tuple[str, ...] = ()) -> SlurmJob:
        output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
        places = ["--data", str(data), "--cache-dir", str(hosts.local / "cache"), "--out", str(tmp_path / "run")]
        small = ["--no-calibration", "--hidden-size", "16", "--batch-size", "16", "--mega-batch", "400", "--eval-rounds", "0"]
        argv = [*places, *small, "--epochs", str(EPOCHS), "--record", "--checkpoint-interval", "2", *train]
        if sbatch:
            smaller = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--time=5", f"--output={output}"]
            job = run_in_slurm("sbatch", "--parsable", *smaller, *sbatch, *argv, leaves_job=True)
        else:
            smaller = ["--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1", "--time", "5", "--log", str(output)]
            command = [sys.executable, "-m", "hvd_adaptive", "submit", *smaller, "--venv", sys.prefix, "--requeue", "--yes"]
            job = run_in_slurm(*command, "--", "train", *argv, leaves_job=True)
        assert job.returncode == 0, job.describe()
        return SlurmJob(slurm, job.stdout.split()[-1], tmp_path / "run", output)

    return run


@pytest.mark.usefixtures("pmix")
@pytest.mark.parametrize("script", ["preemptible", "preemptible-mpirun"])
def test_a_signal_in_a_round_saves_and_requeues(submit: Callable[..., SlurmJob], script: str) -> None:
    job = submit(str(ROOT / "slurm" / f"{script}.sbatch"), train=("--slowdown", f"{SLOW};8:1,1"))
    job.wait(lambda: job.has_rounds(1))
    job.signal("USR1")
    job.wait(lambda: "Go on with --resume auto" in job.output)
    check_finished(job)
    assert job.output.count("resumed from") == 1 and "Restarts=1" in job.show(), job.output


@pytest.mark.usefixtures("pmix")
def test_requeued_from_outside_and_cancelled(submit: Callable[..., SlurmJob]) -> None:
    # From outside: Slurm ends the ranks and starts the job again.
    job = submit(train=("--slowdown", SLOW))
    job.wait(lambda: job.has_rounds(3) and job.has_checkpoint)
    job.ask("scontrol", "requeue", job.number)
    job.wait(lambda: "Restarts=1" in job.show() and "resumed from" in job.output)
    # What the requeue has left is the start of this.
    start = job.num_rounds
    job.wait(lambda: job.has_rounds(start + 1))
    job.ask("scancel", job.number)
    job.wait(lambda: job.state == "CANCELLED")

    check_finished(submit())


OWN_LOOP = """
import hvd_adaptive
hvd_adaptive.catch_signals()
import json, os, sys, time, torch
from hvd_adaptive.state.preemption import PREEMPTION
from torch.utils.data import TensorDataset

folder, *pauses_s = sys.argv[1], *map(float, sys.argv[2].split(","))
x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
model = torch.nn.Linear(6, 2)
config = hvd_adaptive.Config(batch_size=8, mega_batch=100)
session = hvd_adaptive.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
merge = session._strategy.flat_model.merge_

def has_checkpoint():
    return os.path.isdir(folder) and any(name.startswith("round-") for name in os.listdir(folder))

def slow_merge(*args, **options):
    before = PREEMPTION.signal_number
    print("rank", session.rank, "is merging", flush=True)
    pause_s = pauses_s.pop(0) if len(pauses_s) > 1 else pauses_s[0]
    end_s = time.monotonic() + abs(pause_s)
    while time.monotonic() < end_s and PREEMPTION.signal_number == before and not (pause_s < 0 and has_checkpoint()):
        time.sleep(0.02)
    if PREEMPTION.signal_number != before:
        print("rank", session.rank, "got the signal in a merge", flush=True)
        time.sleep(max(0.0, end_s - time.monotonic()))
    merge(*args, **options)
    if PREEMPTION.signal_number != before:
        print("rank", session.rank, "has merged after it", flush=True)

session._strategy.flat_model.merge_ = slow_merge
checkpoints = hvd_adaptive.Checkpointer(session, folder, interval=1)
checkpoints.resume()
rows = []
file = open(f"{folder}/rows-{os.environ['SLURM_JOB_ID']}-{session.rank}.jsonl", "w")

def commit(record):
    file.write(json.dumps([record.round, rows]) + chr(10))
    file.flush()
    rows.clear()

session.records.append(commit)
for batch in session.batches(TensorDataset(x, (x.sum(1) > 0).long()), num_epochs=20):
    with session.step(batch):
        session.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
    rows += batch.rows.tolist()
checkpoints.close()
session.close()
if session.preempted:
    sys.exit(hvd_adaptive.EXIT_PREEMPTED)
"""


@pytest.mark.usefixtures("pmix")
def test_signals_in_a_merge_of_a_loop_of_ones_own(run_in_slurm: Callable[..., Any], slurm: SlurmSite, tmp_path: Path) -> None:
    script = tmp_path / "own_loop.py"
    script.write_text(OWN_LOOP)

    def start(folder: Path, *sbatch: str, pauses_s: str) -> SlurmJob:
        """With so many seconds of each merge, the last ones of all others, too; negative ones end with a checkpoint."""
        output = tmp_path / f"output-{folder.name}-{pauses_s}"
        command = f"exec srun --mpi=pmix {sys.executable} {script} {folder} {pauses_s}"
        options = ("--parsable", "-N2", "-n2", f"--output={output}", f"--wrap={command}")
        job = run_in_slurm("sbatch", *options, *sbatch, leaves_job=True)
        assert job.returncode == 0, job.describe()
        return SlurmJob(slurm, job.stdout.strip(), tmp_path, output)

    def wait_for_end(job: SlurmJob) -> None:
        # No state: Slurm did not answer.
        job.wait(lambda: job.state not in ("", "PENDING", "CONFIGURING", "RUNNING", "COMPLETING"))

    def go_on_to_the_end(folder: Path) -> None:
        job = start(folder, "--time=5", pauses_s="0")
        wait_for_end(job)
        assert job.state == "COMPLETED", job.output
        check_rows(folder)

    # One signal, which Slurm itself sends to the ranks before the time limit, as much as 60 s early; seldom between two merges.
    # This job waits beside the others.
    at_limit = start(tmp_path / "limit", "--time=1", "--signal=USR1@10", pauses_s="2")

    # Two signals while the third merge cannot be over soon.
    folder = tmp_path / "checkpoints"
    job = start(folder, "--time=5", pauses_s="1,-60,50")
    job.wait(lambda: job.output.count("is merging") >= 6 and (folder / "round-00000002").exists())
    job.ask("scancel", "--signal=USR1", job.number)
    job.wait(lambda: job.output.count("got the signal in a merge") == 2)
    # Within two seconds it would be the first one again.
    time.sleep(3)
    job.ask("scancel", "--signal=TERM", job.number)
    wait_for_end(job)
    assert job.state == "FAILED" and "has merged after it" not in job.output, job.output
    assert "a second signal came while the ranks got ready to end after SIGUSR1; the job ends now" in job.output, job.output
    assert f"the newest checkpoint is {folder}/round-00000002" in job.output, job.output
    go_on_to_the_end(folder)

    wait_for_end(at_limit)
    assert at_limit.state == "FAILED" and "ExitCode=75:0" in at_limit.show(), at_limit.output
    go_on_to_the_end(tmp_path / "limit")


def check_rows(folder: Path) -> None:
    """Every sample counts 20 times; what a later job computed again takes the place of what was lost."""
    by_round: dict[int, dict[str, dict[str, list[int]]]] = {}
    for file in sorted(folder.glob("rows-*.jsonl"), key=lambda path: int(path.stem.split("-")[1])):
        for line in file.read_text().splitlines():
            number, rows = json.loads(line)
            _, of_job, rank = file.stem.split("-")
            by_round.setdefault(number, {}).setdefault(of_job, {})[rank] = rows
    last = [ranks[max(ranks, key=int)] for ranks in by_round.values()]
    rows = [row for ranks in last for rank in ranks.values() for row in rank]
    assert np.bincount(rows).tolist() == [20] * 400
