"""Becomes another program that ends with the process that started it: ``python tether.py PARENT_PID PROGRAM ARGUMENTS``.

What has to be done between fork and exec is done here, in a process of one thread: Popen's ``preexec_fn`` may deadlock where the
parent has several. Needs nothing but Python's own library, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Asks for SIGTERM at the parent's end, unblocks all signals, and becomes the program; returns an exit code if it cannot."""
    parent, program = int(arguments[0]), arguments[1:]
    # Kept across exec. Where the parent has ended before, nobody would send it.
    # A Python that was built without ctypes does without.
    with contextlib.suppress(ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    # Python's handler would say KeyboardInterrupt in place of ending.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"{program[0]} cannot be started: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
