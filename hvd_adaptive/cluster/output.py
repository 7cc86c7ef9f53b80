"""What this package tells people; and what a job's ranks write: shown at once, and read line by line."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator

from hvd_adaptive.exit_codes import EXIT_BAD_INPUT

_OTHERS_LATER_S = 5.0


def say(text: object) -> None:
    """Tells people something, in a line on standard error that says whose word it is."""
    # In one piece: other ranks write there as well.
    sys.stderr.write(f"hvd-adaptive: {text}\n")
    sys.stderr.flush()


class Spokesman(logging.Handler):
    """Says whose word a warning of this package is, in a program that has set up no logging: Python's own handler for those gives
    the text alone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Says a record."""
        if logging.getLogger().handlers or logging.getLogger("hvd_adaptive").handlers != [self]:
            return
        try:
            say(f"{record.levelname.lower()}: {self.format(record)}")
        except Exception:
            # As logging does: a terminal that is gone ends no training.
            self.handleError(record)


def refuse(reason: object, *, speaks: bool) -> int:
    """Says on one rank why the job cannot go on; on the others waits until that one has spoken.

    A launcher ends the job when the first rank exits.

    Args:
        reason: for standard error.
        speaks: whether this is the rank that speaks for all.

    Returns:
        The exit code.
    """
    if speaks:
        say(f"error: {reason}")
    else:
        time.sleep(_OTHERS_LATER_S)
    return EXIT_BAD_INPUT


class Lines:
    """Cuts a stream into lines, and passes on all of it but for the lines that its listener keeps.

    A progress bar comes in pieces without an end of line, and shall be seen while it grows.

    Args:
        keep: told each line, without its end; returns whether what follows the mark in it is kept.
        mark: what begins the part of a line that may be kept; what stands before it in the line was another rank's.
    """

    def __init__(self, keep: Callable[[str], bool], mark: str) -> None:
        self._keep = keep
        self._mark = mark.encode()
        self._line = b""
        self._num_shown = 0

    def feed(self, chunk: bytes) -> bytes:
        """Takes what came; returns what to show now."""
        return b"".join(self._show(chunk))

    def end(self) -> bytes:
        """Returns what is left to show when the stream has ended."""
        return b"".join(self._finish(b"")) if self._line else b""

    def _show(self, chunk: bytes) -> Iterator[bytes]:
        *ended, tail = chunk.split(b"\n")
        for part in ended:
            self._line += part
            yield from self._finish(b"\n")
        self._line += tail
        # What may be the mark's beginning waits for the rest.
        at = self._line.find(self._mark)
        if at < 0:
            size = len(self._line)
            at = next((i for i in range(max(0, size - len(self._mark)), size) if self._mark.startswith(self._line[i:])), size)
        yield self._line[self._num_shown : at]
        self._num_shown = max(self._num_shown, at)

    def _finish(self, end: bytes) -> Iterator[bytes]:
        line, start = self._line, self._num_shown
        self._line, self._num_shown = b"", 0
        is_kept = self._keep(line.decode(errors="replace"))
        yield line[start : max(start, line.find(self._mark))] if is_kept else line[start:] + end
