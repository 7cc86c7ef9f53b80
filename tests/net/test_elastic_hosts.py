"""--elastic over two hosts, of a training and of a script: one is lost, and comes back."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import write_data
from two_hosts import ENVIRONMENT, NETWORK, TwoHosts

SCRIPTS = Path(__file__).parents[1] / "wrap" / "scripts"
LIMIT_S = 12
WAIT_S = 150.0
# The ranks on a host that is cut off end by their own clock, and their daemon 10 s later.
FAR_END_S = 60.0


def environment(folder: Path) -> dict[str, str]:
    return {
        **ENVIRONMENT,
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": str(folder / "hosts" / "agent"),
        "OMPI_MCA_oob_tcp_if_include": f"{NETWORK}.0/24",
        "OMPI_MCA_btl_tcp_if_include": f"{NETWORK}.0/24",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self",
    }


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Of a file whose last line may not be written yet."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.root
def test_a_host_that_is_lost_and_one_that_comes(run_job: Any, hosts: TwoHosts, tmp_path: Path) -> None:
    data, run, names, script = (tmp_path / name for name in ("data", "run", "names", "discover"))
    write_data(data)
    script.write_text(f"#!/bin/sh\ncat {names}\n")
    script.chmod(0o755)
    names.write_text("alpha:1\nbeta:1\n")
    command = [sys.executable, "-m", "hvd_adaptive", "train", "--elastic", "--min-np", "1", "--max-np", "2"]
    command += ["--host-discovery-script", str(script), "--data", str(data), "--cache-dir", str(tmp_path / "cache")]
    command += ["--out", str(run), "--batch-size", "16", "--mega-batch", "400", "--hidden-size", "16"]
    command += ["--optimizer", "sgd", "--lr", "0.5"]
    command += ["--epochs", "100000", "--eval-rounds", "0", "--stall-limit-s", str(LIMIT_S)]

    def during(child: subprocess.Popen[bytes]) -> None:
        def restarts() -> list[dict[str, Any]]:
            path = run / "restarts.jsonl"
            return whole_lines(path) if path.exists() else []

        def wait_for(condition: Callable[[], object]) -> None:
            end = time.monotonic() + WAIT_S
            while not condition():
                assert child.poll() is None and time.monotonic() < end
                time.sleep(0.1)

        rounds, checkpoints = run / "rounds.jsonl", run / "checkpoints"
        # Rounds go on while the first checkpoint is being written.
        wait_for(lambda: rounds.exists() and rounds.read_text().count("\n") >= 5 and any(checkpoints.glob("round-*")))
        hosts.cut()
        names.write_text("alpha:1\n")
        wait_for(lambda: len(restarts()) == 1)
        hosts.mend()
        names.write_text("alpha:1\nbeta:1\n")
        wait_for(lambda: len(restarts()) == 2)
        hosts.signal_ranks("alpha", signal.SIGUSR1, argument="--elastic")

    job = run_job(hosts.on("alpha", command), env=environment(tmp_path), timeout=4 * WAIT_S, during=during, grace_s=FAR_END_S)
    assert job.returncode == 75 and not job.leftover, job.describe()
    lost, back = (json.loads(line) for line in (run / "restarts.jsonl").read_text().splitlines())
    assert (lost["hosts"], back["hosts"]) == ({"alpha": 1}, {"alpha": 1, "beta": 1}), job.describe()
    # It went on from a checkpoint; how old that is depends on the disk, as rounds go on while one is being written.
    assert lost["round"] >= 1 and back["rounds_repeated"] == 0
    assert back["cause"] == "hosts changed" and lost["seconds"]["notice"] > 0
    assert "cannot be kept in memory: the ranks are on several hosts" in job.stderr
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(len(lines)))
    assert all(line["samples"] - before["samples"] == sum(line["ranks"]["samples"]) for before, line in pairwise(lines))


@pytest.mark.root
def test_a_scripts_commits_outlive_the_host_that_wrote_them(run_job: Any, hosts: TwoHosts, tmp_path: Path) -> None:
    """Rank 0 is on the host that is lost; what it committed is on the storage that both share."""
    names, script = tmp_path / "names", tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {names}\n")
    script.chmod(0o755)
    names.write_text("beta:1\nalpha:1\n")
    command = [sys.executable, "-m", "hvd_adaptive", "run", "--elastic", "--max-np", "2", "--stall-limit-s", str(LIMIT_S)]
    command += ["--host-discovery-script", str(script), str(SCRIPTS / "elastic.py"), str(tmp_path)]

    def during(child: subprocess.Popen[bytes]) -> None:
        def wait_for_commits(launch: int, num: int) -> None:
            end, file = time.monotonic() + WAIT_S, tmp_path / "commits"
            while not (file.exists() and file.read_text().count(f"{launch} ") >= num):
                assert child.poll() is None and time.monotonic() < end
                time.sleep(0.05)

        wait_for_commits(1, 2)
        names.write_text("alpha:1\n")
        hosts.kill_all("beta")
        wait_for_commits(2, 1)
        (tmp_path / "finish").touch()

    job = run_job(hosts.on("alpha", command), env=environment(tmp_path), timeout=4 * WAIT_S, during=during, cwd=tmp_path)
    assert job.returncode == 0 and not job.leftover, job.describe()
    assert torch.equal(torch.load(tmp_path / "model.pt")["model"]["uses"], torch.full((96,), -8.0, dtype=torch.float64))
    launches = re.findall(r"launch \d .*: ranks (\{.*\})", job.stderr)
    assert launches == ["{'beta': 1, 'alpha': 1}", "{'alpha': 1}"], job.describe()
    assert len(re.findall(r"goes on from commit \d+, ", job.stderr)) == 1, job.describe()
    assert f"commits go to {tmp_path}/hvd-adaptive-commits-" in job.stderr, job.describe()
    assert not list(tmp_path.glob("hvd-adaptive-commits-*"))
