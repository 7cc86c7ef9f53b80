"""A launcher that cannot end is ended, the right process is taken for it, and one that ends itself is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.comm.launcher_end import LauncherProcess, end_later, find_launcher_process


def make_proc(folder: Path, *names: str) -> int:
    """A proc file system of processes, each the child of the one before; returns the last one's id."""
    for pid, name in enumerate(names, start=1):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "stat").write_text(f"{pid} ({name}) S {pid - 1} {pid} 1 0 -1 4194304 931\n")
    return len(names)


@pytest.mark.parametrize(
    ("ancestors", "pid"),
    [
        (["systemd", "bash", "mpirun"], 3),
        (["systemd", "orted", "a (strange) name", "env"], 2),
        (["systemd", "mpirun", "mpirun", "hydra_pmi_proxy"], 4),
        (["systemd", "slurmd", "slurmstepd"], None),
        (["systemd", "bash"], None),
    ],
)
def test_the_nearest_launcher_is_found(tmp_path: Path, ancestors: list[str], pid: int | None) -> None:
    own = make_proc(tmp_path, *ancestors, "python")
    found = find_launcher_process(own, tmp_path)
    assert found == (None if pid is None else LauncherProcess(pid, ancestors[pid - 1]))


def end_of(child: subprocess.Popen[Any]) -> int:
    """Its exit code, once it has ended; or fails, and ends it."""
    try:
        return child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        raise


def test_without_proc_nothing_is_found(tmp_path: Path) -> None:
    assert find_launcher_process(os.getpid(), tmp_path) is None


@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        ("trap '' TERM; while :; do sleep 0.1; done", -signal.SIGKILL),
        ("trap 'exit 4' TERM; sleep 1; exit 5", 5),
    ],
    ids=["stubborn", "ends by itself"],
)
def test_a_launcher_is_ended_after_its_grace(launcher: str, code: int) -> None:
    script = launcher.replace("; ", "; echo ready; ", 1)
    with subprocess.Popen(["/bin/bash", "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        end_later(LauncherProcess(child.pid, "mpirun"), grace_s=0 if code != 5 else 60)
        assert end_of(child) == code


SILENT = """
import functools, os, types
from hvd_adaptive.comm import heartbeat
from hvd_adaptive.comm.failures import Beat, Fault
heartbeat.end_later = functools.partial(heartbeat.end_later, grace_s=0)
beat = heartbeat.Heartbeat(
    types.SimpleNamespace(world_size=2), rank=1, host="b", pid=os.getpid(), limit_s=1, abort=lambda: None
)
heard = Beat(count=1, phase="working", phase_s=0.0, what="", host="a", pid=1) if HEARD else None
beat._report(Fault(kind="silent", rank=0, for_s=1.0, beat=heard))
"""


@pytest.mark.slow
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "never heard"])
def test_a_silent_rank_0_elsewhere_ends_a_launcher_that_waits_for_ever(tmp_path: Path, heard: bool) -> None:
    """As mpirun's daemon does on a host that was cut off before rank 0's first heartbeat came, too."""
    with subprocess.Popen([stubborn_launcher(tmp_path), SILENT.replace("HEARD", str(heard))], stderr=subprocess.PIPE) as child:
        assert end_of(child) == -signal.SIGKILL
        assert child.stderr is not None and b"still runs 10 s later, it is ended, too" in child.stderr.read()


def stubborn_launcher(tmp_path: Path) -> Path:
    """An mpirun that runs a Python program, its argument, and then never ends."""
    launcher = tmp_path / "mpirun"
    launcher.write_text('#!/bin/bash\n"$0" -c "$1"\nwhile :; do sleep 0.1; done\n'.replace("$0", sys.executable))
    launcher.chmod(0o755)
    return launcher


RANK = """
import functools, sys, time
import hvd_adaptive.comm
module = sys.modules["hvd_adaptive.comm.start_watch"]
module.end_command = functools.partial(module.end_command, grace_s=0)
with module.start_watch(0, stall_limit_s=0.1) as met:
    HOSTS and met(HOSTS)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ([], "Some rank has not started"),
        (["a", "a", "b", "b"], "no longer answers: rank 1 on a; rank 2, 3 on b."),
        ([f"n{i}" for i in range(12)], "; rank 8 on n8; 3 more hosts."),
    ],
    ids=["before MPI has connected them", "after it", "many hosts"],
)
def test_ranks_that_do_not_meet_end_a_launcher_that_waits_for_ever(tmp_path: Path, hosts: list[str], names: str) -> None:
    """As mpirun does for the daemon of a host that it no longer reaches."""
    command = [stubborn_launcher(tmp_path), RANK.replace("HOSTS", str(hosts))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert end_of(child) == -signal.SIGKILL
        assert child.stderr is not None
        said = child.stderr.read()
        assert "rank 0 on " in said and "has waited 0.5 s for all ranks to meet" in said and names in said
