"""A launcher that cannot end is ended, the right process is taken for it, and one that ends itself is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hvd_adaptive.transport.launcher_end import LauncherProcess, end_later, find_launcher_process


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


def test_without_proc_nothing_is_found(tmp_path: Path) -> None:
    assert find_launcher_process(os.getpid(), tmp_path) is None


@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        ("trap '' TERM; while :; do sleep 0.1; done", -signal.SIGKILL),
        ("trap 'exit 3' TERM; while :; do sleep 0.1; done", 3),
        ("trap 'exit 4' TERM; sleep 1; exit 5", 5),
    ],
    ids=["stubborn", "obedient", "ends by itself"],
)
def test_a_launcher_is_ended_after_its_grace(launcher: str, code: int) -> None:
    script = launcher.replace("; ", "; echo ready; ", 1)
    with subprocess.Popen(["/bin/bash", "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        end_later(LauncherProcess(child.pid, "mpirun"), grace_s=0 if code != 5 else 3)
        assert child.wait(20) == code
