"""Where ranks have few cores, threads of MPI and Horovod that wait can sleep: ``patient_yield`` has their libraries do so.

What waits there asks and yields in turns; Open MPI 4 has no setting that makes it sleep. That takes cores, or a CPU quota, from
the ranks' own work. ``python -m hvd_adaptive.cluster.patience`` prints the library, for LD_PRELOAD with plain Horovod.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys

from hvd_adaptive.cluster.binding import LauncherInfo
from hvd_adaptive.cluster.host import cores_of_ranks, is_rationed, must_yield

log = logging.getLogger(__name__)

BUSY_WAITING = "MPI and Horovod are busy while they wait, which takes cores from the ranks' own work"
NOT_BUILT = "install hvd-adaptive where there is a C compiler (scripts/setup.sh): its patient_yield was not built"


def patient_library() -> str | None:
    """Returns the library's file, None where this installation has none."""
    found = importlib.util.find_spec("hvd_adaptive.cluster.patient_yield")
    return None if found is None else found.origin


def is_busy_waiting(info: LauncherInfo) -> bool:
    """Whether threads that wait will take cores from this host's ranks, as there is no library for it.

    Args:
        info: what the launcher said.
    """
    return _loses(info, seldom=True) and patient_library() is None


def wait_patiently(info: LauncherInfo, *, seldom: bool) -> None:
    """Has MPI and Horovod, which are loaded, sleep where they wait, if this host's ranks gain by it.

    Args:
        info: what the launcher said.
        seldom: ranks exchange something only after several steps, so that it may take a little longer.
    """
    library = patient_library()
    if not _loses(info, seldom=seldom) or (library is not None and ctypes.CDLL(library).make_patient()):
        return
    if info.rank == 0:
        log.warning("%s: %s", BUSY_WAITING, NOT_BUILT if library is None else "no call of sched_yield was found in them")


def _loses(info: LauncherInfo, *, seldom: bool) -> bool:
    """Whether ranks lose more by waits that are busy than by exchanges that begin some 50 us later."""
    num_ranks = info.local_size or 1
    if sys.platform != "linux" or (info.world_size or 1) == 1:
        return False
    return is_rationed(num_ranks) or (seldom and must_yield(num_ranks, cores_of_ranks(num_ranks)))


if __name__ == "__main__":
    print(patient_library() or sys.exit(NOT_BUILT))
