"""Ends a launcher that cannot end by itself: mpirun waits for ever for its daemon on a host that it no longer reaches."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

GRACE_S = 10
# As the kernel shows them: mpirun and its relatives on the first host, their daemons on the others.
_NAMES = {"mpirun", "mpiexec", "orterun", "orterun_wrapper", "orted", "prterun", "prted", "mpiexec.hydra", "hydra_pmi_proxy"}
_SCRIPT = """
exit_if_gone_within() { i=0; while [ $i -lt $1 ]; do kill -0 "$pid" 2>/dev/null || exit 0; sleep 1; i=$((i + 1)); done; }
pid=$1
exit_if_gone_within "$2"
kill -TERM "$pid"
exit_if_gone_within 3
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


def end_later(launcher: LauncherProcess, grace_s: int = GRACE_S) -> None:
    """Ends the launcher if it still runs after a while, from a process that outlives this one.

    Args:
        launcher: whom to end: SIGTERM, and SIGKILL three seconds later.
        grace_s: seconds that it has to end by itself, >= 0.
    """
    subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "end-launcher", str(launcher.pid), str(grace_s)],
        # The launcher would wait for whoever holds a rank's output open, and kill whoever is in its group.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
