"""Ends the job from any thread, whatever the main thread does, or for an exception; and a rank that has ended well, quickly."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from hvd_adaptive.comm.protocols import AgreedError

_PATIENCE_S = 5
_HEAD_START_S = 1.0
_WORKER_END_S = 0.5
# Set where this rank waits for rank 0 to say an error for all: that rank 0 then ends is no fault to be told.
said_by_rank_0 = threading.Event()
_FINALIZE_S = 120.0


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
    If MPI does not end, as has been seen under srun, the process does so after two minutes, with exit code 1: nobody watches the
    ranks any more.

    Args:
        code: the exit code.
    """
    from mpi4py import MPI

    # It needs no lock of Python's, which MPI holds meanwhile; so it can say no more than where.
    faulthandler.dump_traceback_later(_FINALIZE_S, exit=True)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if not MPI.Is_finalized():
        MPI.Finalize()
    os._exit(code)


def _dead_worker(error: BaseException) -> str:
    """Says that a worker of a DataLoader was killed, where the error may only be what came of it: a connection to nowhere."""
    if not isinstance(error, (OSError, EOFError)):
        return ""
    # The connection ends before the process does.
    deadline = time.monotonic() + _WORKER_END_S
    try:
        # Children that ended well are waited for on the way, which is nobody's loss: this process ends as well.
        while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is None or child.si_code == os.CLD_EXITED:
            if child is None:
                if time.monotonic() > deadline:
                    return ""
                time.sleep(0.01)
    except ChildProcessError:
        return ""
    return f"A worker (pid {child.si_pid}) was killed by signal: {signal.strsignal(child.si_status)}\n"


def end_on_exceptions(rank: int, abort: Callable[[], object]) -> None:
    """From now on an uncaught exception on this rank prints its traceback and ends the job.

    Args:
        rank: this rank.
        abort: ends the whole job, as MPI_Abort does.
    """
    stderr = sys.stderr

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # PyTorch's handler would raise the death of a worker out of here, and nothing would be said.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if isinstance(error, AgreedError) and rank:
            # Rank 0 says it for all, and ends the job.
            said_by_rank_0.set()
            try:
                time.sleep(_PATIENCE_S)
            except BaseException:
                said_by_rank_0.clear()
                raise
            # Nobody watches the end of this rank any more.
            threading.Timer(2 * _PATIENCE_S, os._exit, (1,)).start()
        text = "".join(traceback.format_exception(kind, error, trace)) + _dead_worker(error)
        sys.stdout.flush()
        # torch.distributed calls this with a buffer as sys.stderr, and would write it when this returns, which it does not.
        for stream in (sys.stderr, stderr, sys.__stderr__):
            if stream is not None and not isinstance(stream, io.StringIO):
                with contextlib.suppress(OSError, ValueError):
                    stream.write(f"rank {rank} failed:\n{text}")
                    stream.flush()
                    break
        # The launcher's notice of the abort comes another way, and shall not overtake the reason.
        time.sleep(_HEAD_START_S)
        abort()

    sys.excepthook = hook
