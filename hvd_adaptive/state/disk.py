"""What has been written is on the disk, also after a power failure, and others may read it as the umask says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any


def sync_file(stream: IO[Any]) -> None:
    """Forces what was written to an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Forces a directory's entries to the disk; some network file systems cannot, and need not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share(path: Path) -> None:
    """Gives a file or folder that was made private the mode of any other."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
