"""Runs a command in a terminal, and closes that as soon as a file is there: ``python terminal.py FILE COMMAND...``.

What the command writes there goes to standard error. The exit code is the command's, 128 + the number if a signal ended it.
"""

from __future__ import annotations

import os
import pty
import select
import sys
from pathlib import Path


def main() -> int:
    """Runs the command of this process's arguments."""
    file, command = Path(sys.argv[1]), sys.argv[2:]
    pid, terminal = pty.fork()
    if not pid:
        os.execvp(command[0], command)
    while not file.exists():
        # A command whose output nobody takes would wait.
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                os.write(2, os.read(terminal, 1 << 16))
            except OSError:
                break  # It has ended.
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
