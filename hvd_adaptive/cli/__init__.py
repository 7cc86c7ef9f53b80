"""The command ``hvd-adaptive``: arguments and assembly only."""

import sys
from collections.abc import Sequence

from hvd_adaptive.cli.streams import set_up_streams
from hvd_adaptive.exit_codes import EXIT_INTERRUPTED

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command of this process; returns its exit code, or, as a rank that MPI was started on, ends the process with it.

    Args:
        argv: its arguments; None: the process's.
    """
    if argv is None:
        set_up_streams()
    try:
        from hvd_adaptive.cli.main import main as run_command
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    arguments = sys.argv[1:] if argv is None else argv
    code = run_command(arguments)
    # What a script of others has left for the interpreter's end is to happen.
    if "mpi4py.MPI" in sys.modules and arguments[:1] != ["run"]:
        from hvd_adaptive.comm.job_end import leave_process

        leave_process(code)
    return code
