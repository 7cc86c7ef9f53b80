"""Ranks under a CPU quota sleep where MPI and Horovod wait: their process starts once more with ``patient_yield`` preloaded.

What waits there asks and yields in turns; Open MPI 4 has no setting that makes it sleep. Under a CPU quota that comes
out of the rank's own work. ``python -m hvd_adaptive.cluster.patience`` prints the library, for LD_PRELOAD with one's own script.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping

from hvd_adaptive.cluster.binding import YIELD_VARIABLES, LauncherInfo, read_launcher
from hvd_adaptive.cluster.host import is_rationed

BUSY_WAITING = "MPI and Horovod are busy while they wait, and the CPU quota counts that as if it were computing"
_NOT_BUILT = "install hvd-adaptive where there is a C compiler (scripts/setup.sh): its patient_yield was not built"


def patient_library() -> str | None:
    """Returns the library's file, None where this installation has none."""
    found = importlib.util.find_spec("hvd_adaptive.cluster.patient_yield")
    return None if found is None else found.origin


def is_busy_waiting(info: LauncherInfo, env: Mapping[str, str]) -> bool:
    """Whether this rank loses by threads that are busy waiting, and nothing has been done about it.

    Args:
        info: what its launcher said.
        env: its environment. Who has set a variable by which MPI yields, or not, has chosen, and it stays as it is.
    """
    return (
        sys.platform == "linux"
        and (info.world_size or 1) > 1
        and is_rationed(info.local_size or 1)
        and not any(env.get(name) for name in YIELD_VARIABLES.values())
        and "patient_yield" not in env.get("LD_PRELOAD", "")
    )


def busy_waiting_remedy() -> str:
    """Returns what to do where a rank is busy waiting."""
    if patient_library() is None:
        return _NOT_BUILT
    return "start it by `hvd-adaptive`, or set LD_PRELOAD=$(python -m hvd_adaptive.cluster.patience) in its environment"


def wait_patiently() -> None:
    """Replaces this process by the same command with the library preloaded, where it would be busy waiting.

    Call it before anything has happened: before MPI starts, files are opened and threads run.
    """
    try:
        info = read_launcher(os.environ)
    except (ValueError, RuntimeError):
        return  # the command itself says what is wrong
    if is_busy_waiting(info, os.environ) and (library := patient_library()):
        before = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = f"{library}:{before}" if before else library
        os.execv(sys.executable, sys.orig_argv)


if __name__ == "__main__":
    print(patient_library() or sys.exit(_NOT_BUILT))
