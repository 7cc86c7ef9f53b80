"""The folder in memory of a supervisor's job, for its checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

_SHARED_MEMORY = Path("/dev/shm")


def make_memory() -> tuple[Path, IO[bytes]]:
    """Makes a folder for checkpoints in memory and locks it; removes those of this user whose supervisors were killed."""
    prefix = f"hvd-adaptive-{os.getuid()}-"
    for old in _SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (old / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    name = f"{prefix}{secrets.token_hex(8)}"
    # Under another name until it is locked, as another supervisor would remove it.
    folder = _SHARED_MEMORY / f".{name}"
    folder.mkdir(mode=0o700)
    own = (folder / "lock").open("xb")
    fcntl.flock(own, fcntl.LOCK_EX)
    return folder.rename(_SHARED_MEMORY / name), own
