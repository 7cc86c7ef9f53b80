"""Ranks over torch.distributed as jobs of their own: without Horovod, under mpirun and torchrun, and with ranks that fail.

What both backends have in common is tested where the other one is, by the fixture ``backend``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import read_run
from zygote import stub_of

from hvd_adaptive.cluster.relaunch import torchrun
from hvd_adaptive.comm import connect

COMMAND = [sys.executable, "-m", "hvd_adaptive"]
TORCHRUN = torchrun(sys.executable, 2)
REPO = Path(__file__).parents[2]
# As where they are not installed.
BLOCK = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
blocked = ("horovod", "mpi4py")
PathFinder.find_spec = lambda name, *args: None if name.partition(".")[0] in blocked else find(name, *args)
"""
OPTIONS = ["--epochs", "1", "--batch-size", "16", "--mega-batch", "500", "--no-calibration"]


@pytest.fixture
def without_horovod(tmp_path: Path) -> dict[str, str]:
    """Variables by which no process finds Horovod and mpi4py."""
    folder = tmp_path / "blocking"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCK)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(REPO)])}


def train(data: Path, out: Path) -> list[str]:
    return ["train", "--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out), *OPTIONS]


@pytest.mark.parametrize("way", ["np", "torchrun"])
def test_trains_where_horovod_is_not_installed(
    run_job: Any, data: Path, tmp_path: Path, without_horovod: dict[str, str], way: str
) -> None:
    arguments = train(data, tmp_path / "run")
    command = [*COMMAND, *arguments, "-np", "2", "--backend", "torch"] if way == "np" else [*TORCHRUN, *COMMAND[1:], *arguments]
    job = run_job(command, env=without_horovod, forked=False, timeout=200)
    assert job.returncode == 0 and not job.leftover, job.describe()
    assert "2 ranks over torch.distributed (Gloo), strategy local" in job.stdout, job.describe()
    summary, _ = read_run(tmp_path / "run")
    assert summary["backend"] == "torch" and summary["world_size"] == 2
    assert summary["ranks_agreed"] is True and summary["samples"] == 2000


def test_doctor_passes_ranks_over_torch(run_job: Any, tmp_path: Path, without_horovod: dict[str, str]) -> None:
    options = ["--probe-seconds", "0.3", "--json", str(tmp_path / "found.json")]
    env = {**without_horovod, "HVD_ADAPTIVE_BACKEND": "torch"}
    job = run_job([*COMMAND, "doctor", "-np", "2", *options], env=env, forked=False, timeout=400)
    assert job.returncode == 0 and not job.leftover, job.describe()
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["ranks"]) == 2 and found["problems"] == 0, job.describe()
    texts = {one["subject"]: one["text"] for one in found["findings"]}
    assert texts["world"] == "2 ranks on 1 host; over torch.distributed (Gloo)" and "collectives" in texts


def test_what_is_missing_is_said_once(run_job: Any, data: Path, tmp_path: Path, without_horovod: dict[str, str]) -> None:
    job = run_job([*COMMAND, *train(data, tmp_path / "run"), "-np", "2"], env=without_horovod, forked=False, timeout=200)
    assert job.returncode == 2 and job.stderr.count("error:") == 1 and "Traceback" not in job.stderr, job.describe()
    assert "horovod and mpi4py are not installed" in job.stderr and "--backend torch" in job.stderr, job.describe()


def test_no_word_about_the_launcher_waits_for_torch(run_job: Any) -> None:
    job = run_job([sys.executable, "-c", "import sys, hvd_adaptive.comm; sys.exit('torch' in sys.modules)"])
    assert job.returncode == 0, job.describe()


def test_ranks_that_do_not_know_where_to_meet_say_what_to_do(run_job: Any, data: Path, tmp_path: Path) -> None:
    job = run_job([*COMMAND, *train(data, tmp_path / "run"), "--backend", "torch"], np=2, timeout=200)
    assert job.returncode == 2 and job.stderr.count("error:") == 1 and "Traceback" not in job.stderr, job.describe()
    assert "needs MASTER_ADDR and MASTER_PORT" in job.stderr, job.describe()


def test_horovod_under_torchrun_is_refused(run_job: Any, data: Path, tmp_path: Path) -> None:
    job = run_job([*TORCHRUN, *COMMAND[1:], *train(data, tmp_path / "run"), "--backend", "horovod"], timeout=200, alone=True)
    assert job.returncode != 0 and job.stderr.count("hvd-adaptive: error:") == 1, job.describe()
    assert "torchrun started the ranks, and Horovod needs them to be MPI's" in job.stderr, job.describe()


def test_calibrate_is_refused_at_once(run_job: Any, data: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, *COMMAND[1:], "calibrate", "--data", str(data), "--out", str(tmp_path / "found.toml")]
    job = run_job(command, timeout=200, alone=True)
    assert job.returncode != 0 and job.stderr.count("calibrate measures plain Horovod as well") == 1, job.describe()


def test_a_rank_that_is_killed_under_torchrun_ends_the_job(run_job: Any, data: Path, tmp_path: Path) -> None:
    def kill(child: Any) -> None:
        end_s = time.monotonic() + 120
        while not (tmp_path / "run" / "rounds.jsonl").exists() and time.monotonic() < end_s and child.poll() is None:
            time.sleep(0.1)
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words, variables = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            except OSError:
                continue
            if str(tmp_path / "run").encode() in words and b"RANK=1" in variables:
                pid = int(folder.name)
                killed.extend((pid, pid))
                with contextlib.suppress(ProcessLookupError):  # it is no fork
                    killed[1] = stub_of(pid)
                os.kill(pid, signal.SIGKILL)
                killed_s.append(time.monotonic())

    killed: list[int] = []
    killed_s: list[float] = []
    command = [*TORCHRUN, *COMMAND[1:], *train(data, tmp_path / "run"), "--epochs", "10000"]
    job = run_job(command, timeout=200, during=kill, alone=True)
    assert job.returncode != 0 and not job.timed_out and not job.leftover and len(killed) == 2, job.describe()
    # torchrun, which knows a fork by its stub, notices first; a rank that has lost the other one says who it is, too.
    named = rf"exitcode *: -9 \(pid: {killed[1]}\)|rank 1 on \S+ \(pid {killed[0]}\) is dead"
    assert re.search(named, job.stderr), job.describe()
    # torchrun itself leaves rank 0, which takes its SIGTERM for a wish to end in order, half a minute.
    assert time.monotonic() - killed_s[0] < 20


@pytest.mark.mpi(2)
def test_a_world_that_is_closed_leaves_no_threads(use_backend: Callable[[str], str]) -> None:
    """Each group of torch.distributed has its own. Those of the process's first one stay."""
    use_backend("torch")

    def meet() -> int:
        transport = connect(stall_limit_s=60, backend="torch", groups=True)
        inside = transport.split(transport.rank)
        assert inside.world_size == 1
        transport.close()
        del transport, inside
        gc.collect()
        return len(os.listdir("/proc/self/task"))

    meet()
    assert meet() >= meet()
