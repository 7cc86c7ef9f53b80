"""Which job writes checkpoints in a folder: the last one that began to."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path

_NAME = ".owner"


class FolderOwner:
    """Takes a folder over, on one rank of a job. A job that is sent again thus goes before one that has not ended yet.

    Args:
        folder: of the checkpoints.
        host: this host's name, for the other job's message.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._path = folder / _NAME
        self._text = json.dumps(
            {"job": uuid.uuid4().hex, "host": host, "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        )
        self._has_taken = False
        self._take()

    def lost_to(self) -> str | None:
        """Returns which other job has taken the folder over since, in words; None: no one."""
        if not self._has_taken:
            # The disk was full.
            self._take()
            return None
        try:
            text = self._path.read_text()
            found = json.loads(text)
            return None if text == self._text else f"process {found['process']} on {found['host']}, since {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _take(self) -> None:
        part = self._path.with_name(f"{_NAME}.{os.getpid()}")
        # On a full disk checkpoints say so.
        with contextlib.suppress(OSError):
            part.write_text(self._text)
            part.replace(self._path)
            self._has_taken = True
