"""The folder in memory of a supervisor's job, for its checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

from hvd_adaptive.cluster.last_checkpoint import newest_checkpoint

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


def move_to_disk(memory: Path, folder: Path, *, kind: str) -> None:
    """Copies the newest checkpoint or commit from a folder in memory to one on the disk, unless that has one as new.

    Args:
        memory: the supervisor's folder.
        folder: made if it is not there.
        kind: as for `find_checkpoints`.

    Raises:
        OSError: it cannot be written; nothing is left of it on the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    newest = newest_checkpoint(folder, memory, kind=kind)
    if newest is None or newest.parent != memory:
        return
    part = folder / f".part-{newest.name}"
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(newest, part)
        part.rename(folder / newest.name)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, shutil.Error):
            # It has one for each file.
            raise OSError(error.args[0][0][2]) from None
        raise


def keep(memory: Path, *, kind: str) -> Path:
    """Has a folder in memory outlive its supervisor; returns what it is called now."""
    # By a name that the next supervisor does not take for an abandoned one's.
    kept = memory.with_name(f"hvd-adaptive-{kind}s-{secrets.token_hex(4)}")
    memory.rename(kept)
    (kept / "lock").unlink(missing_ok=True)
    return kept
