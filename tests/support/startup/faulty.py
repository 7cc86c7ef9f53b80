"""With this folder on PYTHONPATH a rank does something to itself in a chosen phase, once.

FAULT_SPEC is JSON: ``rank``, ``phase``, ``after`` (which occurrence of it), ``marker`` (a file that is made then, so that it
happens once), and ``signal`` (a real one, which the process sends to itself: only where it strikes is chosen here), ``fill`` (a
file, which takes what is left of its disk) or ``until`` (a file for which it waits: somebody else strikes); or ``rank`` and
``clock_s`` (by how much its clock is wrong).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def strike_before(owner: Any, name: str, strike: Callable[[], None], unless: str = "") -> None:
    """Makes every call of a function strike first, but those with a certain ``name``."""
    function = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if not unless or unless not in (*args, *kwargs.values()):
            strike()
        return function(*args, **kwargs)

    setattr(owner, name, struck)


def fill(path: str) -> None:
    """Writes a file until its disk is full."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def arm(spec: dict[str, Any]) -> None:
    """Prepares this rank for its fault."""
    from hvd_adaptive.comm import horovod_mpi, watched_world
    from hvd_adaptive.state import checkpoint
    from hvd_adaptive.xmc import trainer
    from hvd_adaptive.xmc.evaluation import Evaluator

    left = spec["after"]
    transport = horovod_mpi.HorovodMpiTransport

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == 0 and not os.path.exists(spec["marker"]):
            os.close(os.open(spec["marker"], os.O_CREAT | os.O_EXCL))
            if "signal" in spec:
                os.kill(os.getpid(), signal.Signals[spec["signal"]])
            elif "fill" in spec:
                fill(spec["fill"])
            else:
                while not os.path.exists(spec["until"]):
                    time.sleep(0.005)

    owner, name, unless = {
        "start": (watched_world, "SideChannel", ""),
        "claim": (transport, "add", ""),
        "step": (trainer.Trainer, "_step", ""),
        "statistics": (transport, "allgather_stats", ""),
        "merge": (transport, "allreduce_sum_", "evaluate"),
        # In the midst of a checkpoint: after a file, before its manifest, before its name.
        "checkpoint": (checkpoint.os, "fsync", ""),
        "evaluation": (Evaluator, "evaluate", ""),
        "end": (trainer, "model_hash", ""),
    }[spec["phase"]]
    strike_before(owner, name, strike, unless)


def main() -> None:
    """Arms the rank that the specification names."""
    spec = json.loads(os.environ["FAULT_SPEC"])
    if os.environ.get("OMPI_COMM_WORLD_RANK") != str(spec["rank"]) or "-c" in sys.orig_argv:
        return
    if "clock_s" in spec:
        if os.geteuid() == 0 and shutil.which("unshare") and "FAULT_CLOCK" not in os.environ:
            # A time namespace of its own: its monotonic clock is another host's, say. (That of the wall has none.)
            os.environ["FAULT_CLOCK"] = "1"
            offset = str(int(abs(spec["clock_s"])))
            os.execvp("unshare", ["unshare", "-T", "--monotonic", offset, "--boottime", offset, *sys.orig_argv])
        wall = time.time
        time.time = lambda: wall() + spec["clock_s"]
    else:
        arm(spec)

