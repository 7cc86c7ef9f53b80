"""Ends the job from any thread, whatever the main thread does; and a rank that has ended well, quickly."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

_PATIENCE_S = 5


def end_job(text: str, abort: Callable[[], object], *, code: int = 13) -> None:
    """Writes why and ends the job. Does not return.

    Args:
        text: for standard error.
        abort: ends the whole job, as MPI_Abort does. If it has not ended this process after 5 s, the process ends itself.
        code: with this exit code.
    """
    # Two ways to end in time: MPI_Abort may hang, and may hold Python's lock while it does.
    threading.Timer(_PATIENCE_S, os._exit, (code,)).start()
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(_PATIENCE_S + 2, exit=True, file=nowhere)
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
        abort()
        time.sleep(2 * _PATIENCE_S)


def leave_process(code: int) -> NoReturn:
    """Ends this process as its interpreter would, but for taking every module apart, which takes a second or more of the
    processor where PyTorch is loaded: the next launch waits for that. COLLECTIVE in that MPI is finalized.

    What others have registered with atexit is called. Objects that are still there are not deleted: close files before.

    Args:
        code: the exit code.
    """
    from mpi4py import MPI

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if not MPI.Is_finalized():
        MPI.Finalize()
    os._exit(code)
