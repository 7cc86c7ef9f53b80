"""The command's standard streams: closed ones are opened, and an output that fails ends the command, or is said once."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import sys
from typing import Any

from hvd_adaptive.cluster.output import say
from hvd_adaptive.exit_codes import EXIT_NO_READER


class OutputError(OSError):
    """Standard output cannot be written."""


class _Output(io.FileIO):
    """Standard output that says by an error of its own that it cannot be written, once; what comes later is dropped."""

    def __init__(self) -> None:
        super().__init__(1, "w", closefd=False)
        self.goes_on = False
        self._is_lost = False

    def write(self, data: Any) -> int:
        if self._is_lost:
            return memoryview(data).nbytes
        try:
            while (count := super().write(data)) is None:
                # Another program has set the terminal or pipe not to block.
                select.select([], [self], [])
            return count
        except OSError as error:
            self._is_lost = True
            failure = OutputError(error.errno, f"standard output{_file()} cannot be written: {error.strerror}")
        if not self.goes_on:
            raise failure
        # Not to sys.stderr: a progress display may lead that to standard output.
        with contextlib.suppress(OSError):
            print(f"hvd-adaptive: {failure.strerror}. The run goes on without it.", file=sys.__stderr__, flush=True)
        return memoryview(data).nbytes


def set_up_streams() -> None:
    """Opens /dev/null in place of closed streams, and has standard output raise `OutputError`. For a process of its own."""
    # What is opened later would take their numbers, and what is started would have none.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    before: Any = sys.stdout
    before.flush()
    codecs.register_error("hvd_adaptive.show", _show)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output()), encoding=before.encoding, errors="hvd_adaptive.show",
        line_buffering=before.line_buffering or before.write_through,
    )  # fmt: skip


def flush_output() -> None:
    """Writes what is left, where standard output is ours; a script's may be closed or be anything."""
    if _own_output() is not None:
        sys.stdout.flush()


def go_on_without_output() -> None:
    """Has the command go on where its output cannot be written, for a run whose results are elsewhere."""
    if (output := _own_output()) is not None:
        output.goes_on = True


def leave_output_to_script() -> None:
    """Gives standard output back as Python made it."""
    if _own_output() is not None and sys.__stdout__ is not None:
        sys.stdout = sys.__stdout__


def _own_output() -> _Output | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Output) else None


def tell_of_output(error: OutputError) -> int:
    """Says that the output is cut off; returns the exit code. A reader that has enough, as `head`, is no error to speak of."""
    if error.errno == errno.EPIPE:
        return EXIT_NO_READER
    say(f"error: {error.strerror}: it is cut off; make room, or write elsewhere")
    return 1


def _show(error: UnicodeError) -> tuple[str | bytes, int]:
    """Has what the encoding lacks come out as the bytes that a file's name has, else as \\x...: no name is a reason to fail."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


def _file() -> str:
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/1")
        if path.startswith("/"):
            return f" ({path})"
    return ""
