"""A file of lines, one a round, that outlives a full disk and the removal of its folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hvd_adaptive.validation import parse_json

log = logging.getLogger(__name__)


class LineFile:
    """Appends lines to a file. What does not fit on the disk is kept, and written before the next line. A file that somebody
    moves or removes is made anew, and the log says so.

    Args:
        path: the file.
        mode: ``ab`` to go on with one that is there, ``xb`` for a new one.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path, mode: str = "ab") -> None:
        # The script may change its working directory.
        self._path = path.absolute()
        # Without a buffer of its own, which after an error would still hold the lines that are kept here.
        self._file = path.open(mode, buffering=0)
        self._unwritten = b""

    def add(self, line: str) -> None:
        """Appends a line, now or later. The first line that does not fit is told of in the log."""
        is_late = bool(self._unwritten)
        self._unwritten += f"{line}\n".encode()
        try:
            self.flush()
        except OSError as error:
            if not is_late:
                log.error(
                    "%s cannot be written: %s. The run goes on; its rounds are written when they can be.", self._path, error
                )

    def flush(self) -> None:
        """Writes what was kept.

        Raises:
            OSError: if that still cannot be done.
        """
        if self._unwritten:
            self._follow_path()
        while self._unwritten:
            # A part may be written and the next refused: it goes on from there.
            self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]

    def _follow_path(self) -> None:
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                return
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = file
        log.error("%s was moved or removed during the run: its further lines go to a new file there.", self._path)

    def close(self) -> None:
        """Closes the file; what was kept until now is lost."""
        self._file.close()


def first_rounds(path: Path, num_rounds: int) -> list[str]:
    """Returns the lines of a rounds.jsonl of the rounds before ``num_rounds``, as far as they are whole."""
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        try:
            number = parse_json(line)["round"]
        except (ValueError, KeyError, TypeError):
            break
        if number < num_rounds and line.endswith("\n"):
            kept.append(line)
    return kept
