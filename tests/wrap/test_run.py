"""The command and the drop-in over whole jobs: reports, measured speeds, and failures that end the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [sys.executable, "-m", "hvd_adaptive", "run"]


def test_measured_speeds_with_workers_that_unpickle_the_scripts_classes(run_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    job = run_job(
        [*RUN, "-np", "2", "--interval", "5", "--slowdown", "1,4", str(SCRIPTS / "mnist.py"), "--out", str(out),
         "--num-workers", "1", "--context", "forkserver", "--persistent", "--epochs", "4"],
        timeout=300,
    )  # fmt: skip
    assert job.returncode == 0 and out.exists(), job.describe()
    shares = re.search(r"shares: ([\d.]+), ([\d.]+) %", job.stderr)
    assert shares is not None and float(shares[1]) > 60, job.describe()
    assert "left alone: DataLoader 2" in job.stderr and "the ceiling" in job.stderr, job.describe()


def test_a_dry_run_reports_and_ends(run_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    job = run_job(
        [*RUN, "-np", "2", "--dry-run", str(SCRIPTS / "mnist.py"), "--epochs", "1000", "--out", str(out)], timeout=200
    )
    assert job.returncode == 0 and not job.timed_out and not out.exists(), job.describe()
    assert "intercepted: DistributedOptimizer (SGD, op=Average)" in job.stderr, job.describe()
    assert "would be adaptive: DataLoader 1 (Doubled, DistributedSampler, batch_size=16)" in job.stderr, job.describe()


def test_the_drop_in_is_one_changed_line(run_job: Any) -> None:
    job = run_job(
        [sys.executable, str(SCRIPTS / "drop_in.py")], np=2, env={"HVD_ADAPTIVE_SHARES": "1,3"}, timeout=200
    )
    assert job.returncode == 0, job.describe()
    assert "rank 0 batches [4, 8]" in job.stdout and "rank 1 batches [8, 12]" in job.stdout, job.describe()
    assert job.stderr.count("compatibility report") == 1, job.describe()


@pytest.mark.parametrize("launcher", [[], ["--gloo"]])
def test_horovods_own_launcher(launcher: list[str], run_job: Any) -> None:
    """Under Gloo, too: what ranks tell each other goes through Horovod."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["horovodrun", *launcher, "-np", "2", "hvd-adaptive", "run", "--shares", "1,3", str(SCRIPTS / "mnist.py")]
    # As in an activated environment.
    job = run_job(["env", f"PATH={path}", *command], timeout=300)
    assert job.returncode == 0, job.describe()
    assert "shares: 25.0, 75.0 %" in job.stdout + job.stderr, job.describe()


def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(run_job: Any) -> None:
    job = run_job([*RUN, "-np", "3", str(SCRIPTS / "failing.py"), "raise"], timeout=200)
    end = time.time()
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    lines = job.stderr.strip().splitlines()
    assert lines[0] == "rank 1 failed:" and "failing.py" in lines[2], job.describe()
    assert "KeyError: 'on purpose'" in job.stderr, job.describe()
    raised = re.search(r"raising at ([\d.]+)", job.stdout)
    assert raised is not None and end - float(raised[1]) < 10, job.describe()


def test_a_rank_that_leaves_early_ends_the_job(run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", str(SCRIPTS / "failing.py"), "exit"], timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()


def test_a_frozen_rank_is_named(run_job: Any, tmp_path: Path) -> None:
    ready = tmp_path / "pid"

    def freeze(child: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 150
        while not (ready.exists() and ready.read_text()) and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(int(ready.read_text()), signal.SIGSTOP)

    job = run_job(
        [*RUN, "-np", "2", "--stall-limit-s", "5", str(SCRIPTS / "failing.py"), "freeze", str(ready)],
        timeout=240,
        during=freeze,
    )
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 1" in job.stderr and "is frozen" in job.stderr, job.describe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "2", "no_such.py"], "'no_such.py' is not there"),
        (["--strategy", "local", "x.py"], "not there yet"),
        (["--compression", "maxmin:4", "x.py"], "not there yet"),
        (["--shares", "1,0", "x.py"], "one number > 0 a rank"),
        (["--slowdown", "0.5,1", "x.py"], ">= 1"),
    ],
)
def test_bad_options_are_refused_at_once(arguments: list[str], message: str, run_job: Any) -> None:
    job = run_job([*RUN, *arguments], timeout=60)
    assert job.returncode == 2 and message in job.stderr, job.describe()


def test_a_script_without_horovod_is_named(run_job: Any) -> None:
    job = run_job([*RUN, str(SCRIPTS / "failing.py"), "never"], timeout=100)
    assert job.returncode == 2 and "never called hvd.init()" in job.stderr, job.describe()
