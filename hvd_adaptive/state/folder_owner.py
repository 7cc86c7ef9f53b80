"""Which job writes in a folder: the last one that began to."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path

from hvd_adaptive.cluster.last_checkpoint import OWNER


class FolderLostError(RuntimeError):
    """Another job writes in this job's folder now; says which."""


class FolderOwner:
    """A job's claim on a folder, on one of its ranks. A job that is sent again thus goes before one that has not ended yet.

    Args:
        folder: of a run, or of checkpoints; nothing is written there before :meth:`take`.
        host: this host's name, for the other job's message.
        job: the same for all launches of a job, which then are no others to each other; None: this process is the job.
    """

    def __init__(self, folder: Path, host: str, *, job: str | None = None) -> None:
        self._path = folder / OWNER
        self._job = job or uuid.uuid4().hex
        self._text = json.dumps(
            {"job": self._job, "host": host, "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        )
        self._has_taken = False

    def take(self) -> bool:
        """Takes the folder over, at the first call; where the disk was full, at the first that finds room; again, where somebody
        has removed it.

        Returns:
            Whether that is done.
        """
        if self._has_taken and self._path.exists():
            return True
        part = self._path.with_name(f"{OWNER}.{os.getpid()}")
        # On a full disk whatever else is written says so.
        with contextlib.suppress(OSError):
            try:
                part.write_text(self._text)
                part.replace(self._path)
                self._has_taken = True
            finally:
                part.unlink(missing_ok=True)
        return self._has_taken

    def lost_to(self) -> str | None:
        """Returns which other job has taken the folder over since, as a sentence; None: no one."""
        return self.other() if self._has_taken else None

    def other(self) -> str | None:
        """Returns which other job has the folder, whether this one ever had it or not; None: no one."""
        try:
            found = json.loads(self._path.read_text())
            other = f"process {found['process']} on {found['host']}, since {found['since']}"
            if found["job"] == self._job:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        folder = self._path.parent
        return f"another job writes in {folder} ({other}): this one saves nothing more; give each job a folder of its own"

    def hold(self) -> None:
        """Takes the folder over, if that was not done yet, or checks that it is still this job's. Before whatever is written.

        Raises:
            FolderLostError: if it is another job's by now.
        """
        self.take()
        if other := self.lost_to():
            raise FolderLostError(other)
