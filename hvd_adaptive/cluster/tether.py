"""Becomes another program that ends with the process that started it: ``python tether.py PROGRAM ARGUMENTS``.

Standard input is a pipe whose other end the starting process keeps open. A child of the program waits for the end of that pipe,
and sends the program one SIGTERM. The kernel's own signal for this (PR_SET_PDEATHSIG) comes once for each thread of a parent
that is killed, and mpirun may hang for ever when a second SIGTERM meets it while it ends.

What has to be done between fork and exec is done here, in a process of one thread: Popen's ``preexec_fn`` may deadlock where the
parent has several. Needs nothing but Python's own library, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(program: list[str]) -> int:
    """Starts the child that waits, unblocks all signals, and becomes the program; returns an exit code if it cannot."""
    own = os.getpid()
    if os.fork() == 0:
        _wait(own)
        return 0
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Python's handler would say KeyboardInterrupt in place of ending.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"{program[0]} cannot be started: {error}", file=sys.stderr)
        return 127


def _wait(program: int) -> None:
    """Waits for the end of standard input, then ends the program. Is itself ended with the program."""
    # Signals that a whole process group gets are the program's to obey.
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    # Whoever reads the program's output shall see its end.
    os.closerange(1, 3)
    # A Python that was built without ctypes does without: then this process ends with the one that holds the pipe.
    with contextlib.suppress(ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == program:
        os.read(0, 1)
    if os.getppid() == program:
        os.kill(program, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
