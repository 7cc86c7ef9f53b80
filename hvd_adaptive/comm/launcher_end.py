"""Ends a launcher that cannot end by itself: mpirun waits for ever for its daemon on a host that it no longer reaches."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

GRACE_S = 10
# As the kernel shows them: mpirun and its relatives on the first host, their daemons on the others.
_NAMES = {"mpirun", "mpiexec", "orterun", "orterun_wrapper", "orted", "prterun", "prted", "mpiexec.hydra", "hydra_pmi_proxy"}
_SCRIPT = """
pid=$1 i=0
while [ $i -lt "$2" ]; do kill -0 "$pid" 2>/dev/null || exit 0; sleep 1; i=$((i + 1)); done
kill -KILL "$pid"
"""


class LauncherProcess(NamedTuple):
    """A launcher's process on this host."""

    pid: int
    name: str


def find_launcher_process(pid: int, proc: Path = Path("/proc")) -> LauncherProcess | None:
    """Returns the nearest ancestor that is an MPI launcher or its daemon, None if there is none.

    Slurm's daemon is none of them: Slurm looks after its steps itself.

    Args:
        pid: the process whose ancestors are looked at.
        proc: the mounted proc file system.
    """
    while pid > 1:
        try:
            # The name is in parentheses and may hold some itself; then come the state and the parent.
            head, _, tail = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")
        except OSError:
            return None
        name = head.partition("(")[2]
        if name in _NAMES:
            return LauncherProcess(pid, name)
        pid = int(tail.split()[1])
    return None


def end_command(launcher: LauncherProcess, grace_s: int = GRACE_S) -> list[str]:
    """Returns the command that kills the launcher if it still runs after a while.

    By SIGKILL: Open MPI 4.1's mpirun is in the midst of an abort and crashes at a SIGTERM: a stack trace would bury what the
    ranks have said.

    Run it in a session of its own and without the rank's output, as `end_later` does: the launcher would wait for whoever holds
    that open, and kill whoever is in its group.

    Args:
        launcher: whom to end.
        grace_s: seconds that it has to end by itself, >= 0.
    """
    return ["/bin/sh", "-c", _SCRIPT, "end-launcher", str(launcher.pid), str(grace_s)]


def end_later(launcher: LauncherProcess, grace_s: int = GRACE_S) -> None:
    """Ends the launcher if it still runs after a while, from a process that outlives this one.

    Args:
        launcher: as for `end_command`.
        grace_s: as for `end_command`.
    """
    subprocess.Popen(
        end_command(launcher, grace_s),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
