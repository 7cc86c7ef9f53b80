"""The user's cache folder, and locks that keep concurrent runs apart."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setup_console import say, warn
from setup_options import SetupError

# Of file systems without locks: Lustre mounted without flock, NFS without lockd.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def cache_dir() -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/hvd_adaptive; not created here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "hvd_adaptive"


def binary_key(python_tag: str) -> str:
    """What cached binaries depend on: Python (e.g. "cp311"), platform, C library; part of a folder's name."""
    return "_".join([python_tag, sysconfig.get_platform(), "".join(platform.libc_ver())])


@contextmanager
def locked(file: Path, *, what: str) -> Iterator[None]:
    """Holds an exclusive lock; waits for another holder, and says so. Where the file system has no locks, it warns instead.

    Args:
        file: the lock's file; it stays, empty.
        what: what the other holder does, for the message.

    Raises:
        SetupError: the lock's file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.open("a", encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"{file} cannot be written: {error.strerror}\n"
            "  what to do: make that folder writable, or set XDG_CACHE_HOME (for the cache) to one that is"
        ) from error
    with handle:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for {what} ({file} is locked) ...")
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warn(
                f"{file.parent} is on a file system without locks ({error.strerror}): nothing keeps this run apart from {what}; "
                "start no other one until this one has ended"
            )
        yield
