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

from hvd_adaptive.cluster.batch_script import BatchScript, render

ROOT = Path(__file__).resolve().parents[2]
NUM_EPOCHS = 5
SLOW = "0:40,40"  # a fast machine would end the training before it is told to

pytestmark = [pytest.mark.root, pytest.mark.beside]


def check_finished(job: SlurmJob) -> None:
    job.wait(lambda: job.state == "COMPLETED")
    summary = json.loads((job.run / "summary.json").read_text())
    assert summary["ranks_agreed"] is True and summary["samples"] == NUM_EPOCHS * NUM_SAMPLES, job.output
    check_ledger(job.run, dataset_size=NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.usefixtures("pmix")
@pytest.mark.parametrize("script", ["preemptible", "preemptible-mpirun"])
def test_a_signal_in_a_round_saves_and_requeues(submit: Callable[..., SlurmJob], folder: Path, script: str) -> None:
    job = submit(folder, str(ROOT / "slurm" / f"{script}.sbatch"), train=("--slowdown", f"{SLOW};3:1,1"), num_epochs=NUM_EPOCHS)
    job.wait(lambda: job.has_rounds(1))
    job.signal("USR1")
    job.wait(lambda: "Go on with --resume auto" in job.output)
    check_finished(job)
    assert job.output.count("resumed from") == 1 and "Restarts=1" in job.show(), job.output


@pytest.mark.usefixtures("pmix")
def test_requeued_from_outside_and_cancelled(submit: Callable[..., SlurmJob], folder: Path) -> None:
    # From outside: Slurm ends the ranks and starts the job again.
    job = submit(folder, train=("--slowdown", SLOW), num_epochs=NUM_EPOCHS)
    job.wait(lambda: job.has_rounds(3) and job.has_checkpoint)
    job.ask("scontrol", "requeue", job.number)
    job.wait(lambda: "Restarts=1" in job.show() and "resumed from" in job.output)
    # What the requeue has left is the start of this.
    start = job.num_rounds
    job.wait(lambda: job.has_rounds(start + 1))
    job.ask("scancel", job.number)
    job.wait(lambda: job.state == "CANCELLED")

    check_finished(submit(folder, num_epochs=NUM_EPOCHS))


RANK = """#!/bin/bash
echo "$FROM_SITE $OMP_NUM_THREADS $SLURM_JOB_ID $SLURM_RESTART_COUNT" >> "$0-$SLURM_ARRAY_TASK_ID"
[ "$SLURM_RESTART_COUNT" = 1 ] || exit 75
"""


@pytest.mark.usefixtures("pmix")
def test_jobs_of_an_array_are_queued_again_each_and_ranks_have_what_the_script_sets_up(
    run_in_slurm: Callable[..., Any], slurm: SlurmSite, folder: Path
) -> None:
    """With a rank of its own, where the site has sbatch pass nothing on."""
    (folder / "bin").mkdir()
    (folder / "bin" / "activate").write_text(f"PATH={folder}/bin:$PATH\nexport FROM_SITE=module\n")
    rank = folder / "bin" / "hvd-adaptive"
    rank.write_text(RANK)
    rank.chmod(0o755)
    text = render(BatchScript(requeue=True, venv=str(folder), time="5"))
    (folder / "script").write_text(text)
    one = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={folder}/output-%a"]
    sbatch = ["sbatch", "--parsable", "--array=1-2", "--export=NONE", *one, str(folder / "script")]
    submitted = run_in_slurm(*sbatch, leaves_job=True)
    assert submitted.returncode == 0, submitted.describe()
    for task in (1, 2):
        job = SlurmJob(slurm, f"{submitted.stdout.strip()}_{task}", folder, folder / f"output-{task}")
        job.wait(lambda job=job: job.state == "COMPLETED")  # type: ignore[misc]
        starts = [line.split(" ") for line in (folder / "bin" / f"hvd-adaptive-{task}").read_text().splitlines()]
        (number, _), (again, _) = (start[2:] for start in starts)
        assert number == again and [start[:2] for start in starts] == [["module", "1"]] * 2, starts


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


class OwnLoop:
    """Jobs that go on with each other in `folder`."""

    def __init__(self, run_in_slurm: Callable[..., Any], slurm: SlurmSite, folder: Path) -> None:
        self._run_in_slurm, self._slurm, self._folder = run_in_slurm, slurm, folder
        self.checkpoints = folder / "checkpoints"
        self._script = folder / "own_loop.py"
        self._script.write_text(OWN_LOOP)

    def start(self, *sbatch: str, pauses_s: str) -> SlurmJob:
        """With so many seconds of each merge, the last ones of all others, too; negative ones end with a checkpoint."""
        output = self._folder / f"output-{pauses_s}"
        command = f"exec srun --mpi=pmix {sys.executable} {self._script} {self.checkpoints} {pauses_s}"
        options = ("--parsable", "-N2", "-n2", f"--output={output}", f"--wrap={command}")
        job = self._run_in_slurm("sbatch", *options, *sbatch, leaves_job=True)
        assert job.returncode == 0, job.describe()
        return SlurmJob(self._slurm, job.stdout.strip(), self._folder, output)

    def go_on_to_the_end(self) -> None:
        job = self.start("--time=5", pauses_s="0")
        job.wait(lambda: job.has_ended)
        assert job.state == "COMPLETED", job.output
        check_rows(self.checkpoints)


@pytest.mark.usefixtures("pmix")
def test_slurms_signal_in_a_merge_of_a_loop_of_ones_own(
    run_in_slurm: Callable[..., Any], slurm: SlurmSite, folder: Path
) -> None:
    """One, which Slurm sends to the ranks before the time limit, as much as 60 s early; seldom between two merges."""
    loop = OwnLoop(run_in_slurm, slurm, folder)
    job = loop.start("--time=1", "--signal=USR1@10", pauses_s="2")
    job.wait(lambda: job.has_ended)
    assert job.state == "FAILED" and "ExitCode=75:0" in job.show(), job.output
    loop.go_on_to_the_end()


@pytest.mark.usefixtures("pmix")
def test_two_signals_in_a_merge_of_a_loop_of_ones_own(
    run_in_slurm: Callable[..., Any], slurm: SlurmSite, folder: Path
) -> None:
    """Two signals while the third merge cannot be over soon."""
    loop = OwnLoop(run_in_slurm, slurm, folder)
    job = loop.start("--time=5", pauses_s="1,-60,50")
    job.wait(lambda: job.output.count("is merging") >= 6 and (loop.checkpoints / "round-00000002").exists())
    job.ask("scancel", "--signal=USR1", job.number)
    job.wait(lambda: job.output.count("got the signal in a merge") == 2)
    # Within two seconds it would be the first one again.
    time.sleep(3)
    job.ask("scancel", "--signal=TERM", job.number)
    job.wait(lambda: job.has_ended)
    assert job.state == "FAILED" and "has merged after it" not in job.output, job.output
    assert "a second signal came while the ranks got ready to end after SIGUSR1; the job ends now" in job.output, job.output
    assert f"the last checkpoint is {loop.checkpoints}/round-00000002" in job.output, job.output
    loop.go_on_to_the_end()


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
