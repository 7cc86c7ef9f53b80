"""--elastic in an allocation: nodes are lost and come back by an expansion of the job, and every epoch is whole."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import MEGA_BATCH, NUM_SAMPLES, check_ledger
from slurm_site import SlurmJob, SlurmSite
from two_hosts import TwoHosts

pytestmark = pytest.mark.root

ELASTIC_SCRIPT = Path(__file__).parents[1] / "wrap" / "scripts" / "elastic.py"

# Exit code 75 is a stop that was asked for. How many epochs it then goes on to, the test says while nothing runs.
SCRIPT = """#!/bin/bash
until {command} --epochs "$(cat {epochs})"; do
    [ $? = 75 ] || exit 1
    rm {epochs}
    until [ -e {epochs} ]; do sleep 0.1; done
done
"""


@pytest.fixture(autouse=True)
def restored(slurm: SlurmSite) -> Iterator[None]:
    """Brings back nodes that the test has lost."""
    yield
    slurm.restore()


def test_a_node_is_lost_and_comes_back(
    run_in_slurm: Callable[..., Any], slurm: SlurmSite, hosts: TwoHosts, data: Path, tmp_path: Path
) -> None:
    run, script, epochs, output = (tmp_path / name for name in ("run", "script", "epochs", "output"))
    epochs.write_text("100000")
    command = [sys.executable, "-m", "hvd_adaptive", "train", "--elastic", "--min-np", "1", "--max-np", "2"]
    command += ["--data", str(data), "--cache-dir", str(tmp_path / "cache"), "--out", str(run), "--resume", "auto"]
    command += ["--batch-size", "16", "--mega-batch", str(MEGA_BATCH), "--hidden-size", "16", "--eval-rounds", "0"]
    command += ["--optimizer", "sgd", "--lr", "0.5"]
    script.write_text(SCRIPT.format(command=" ".join(command), epochs=epochs))

    options = ["--no-kill", "--nodes=2", "--ntasks-per-node=1", "--time=10", f"--output={output}"]
    submitted = run_in_slurm("sbatch", "--parsable", *options, str(script), leaves_job=True)
    assert submitted.returncode == 0, submitted.describe()
    job = SlurmJob(slurm, submitted.stdout.strip(), run, output)

    def restarts() -> list[dict[str, Any]]:
        path = run / "restarts.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The last one may not be written yet.
        return [json.loads(line) for line in lines if line.endswith("\n")]

    job.wait(lambda: job.has_rounds(3) and job.has_checkpoint)
    slurm.lose("beta")
    job.wait(lambda: len(restarts()) == 1)
    # The node is up again, and not the job's: that takes an expansion, by a job whose node it takes over.
    slurm.bring_back("beta")
    granted = run_in_slurm("salloc", "--no-shell", "-w", "beta", "-n1", f"--dependency=expand:{job.number}", leaves_job=True)
    assert granted.returncode == 0, granted.describe()
    allocation = re.search(r"Granted job allocation (\d+)", granted.stderr)
    assert allocation is not None, granted.describe()
    job.ask("scontrol", "update", f"jobid={allocation[1]}", "NumNodes=0")
    job.wait(lambda: len(restarts()) == 2)
    hosts.signal_ranks("alpha", signal.SIGUSR1, argument="--elastic")
    job.wait(lambda: not epochs.exists())
    # Whole at once, as the script waits for it.
    ahead = tmp_path / "ahead"
    ahead.write_text(str((job.num_rounds + 20) * MEGA_BATCH // NUM_SAMPLES + 1))
    ahead.rename(epochs)
    job.wait(lambda: job.state == "COMPLETED")

    lost, back = restarts()
    assert (lost["hosts"], back["hosts"]) == ({"alpha": 1}, {"alpha": 1, "beta": 1}), job.output
    # It went on from a checkpoint; how old that is depends on the disk, as rounds go on while one is being written.
    assert lost["round"] >= 1, job.output
    assert (back["cause"], back["rounds_repeated"]) == ("hosts changed", 0), job.output
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    check_ledger(rounds, job.output)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ranks_agreed"] is True, job.output
    assert summary["samples"] == rounds[-1]["samples"] == int(epochs.read_text()) * NUM_SAMPLES, job.output


def test_a_script_goes_on_from_its_commits_without_a_node(
    run_in_slurm: Callable[..., Any], slurm: SlurmSite, hosts: TwoHosts, tmp_path: Path
) -> None:
    script, output, commits = (tmp_path / name for name in ("script", "output", "commits"))
    command = [sys.executable, "-m", "hvd_adaptive", "run", "--elastic", "--max-np", "2", str(ELASTIC_SCRIPT), str(tmp_path)]
    script.write_text(f"#!/bin/bash\ncd {tmp_path}\n{' '.join(command)}\n")
    options = ["--no-kill", "--nodes=2", "--ntasks-per-node=1", "--time=10", f"--output={output}"]
    submitted = run_in_slurm("sbatch", "--parsable", *options, str(script), leaves_job=True)
    assert submitted.returncode == 0, submitted.describe()
    job = SlurmJob(slurm, submitted.stdout.strip(), tmp_path, output)

    def launches() -> list[str]:
        return [line.split()[0] for line in commits.read_text().splitlines()] if commits.exists() else []

    job.wait(lambda: len(launches()) >= 2)
    slurm.lose("beta")
    job.wait(lambda: len(set(launches())) == 2)
    (tmp_path / "finish").touch()
    job.wait(lambda: job.state == "COMPLETED")
    assert "goes on from commit" in output.read_text(), output.read_text()
    assert torch.equal(torch.load(tmp_path / "model.pt")["model"]["uses"], torch.full((96,), -8.0, dtype=torch.float64))
    # On storage that the nodes share, not in one's memory, and removed with the job's success.
    assert "commits go to" in output.read_text() and not list(tmp_path.glob("hvd-adaptive-commits-*"))
