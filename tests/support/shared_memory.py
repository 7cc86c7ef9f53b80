"""What supervisors of elastic jobs have left in shared memory: they keep checkpoints there, and remove them at their end."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE_S = 3.0


def abandoned() -> set[Path]:
    """Returns this user's folders there that no living supervisor holds: jobs of other tests run beside, and have theirs."""
    end_s = time.monotonic() + _PATIENCE_S
    # One that is removed just now has lost its lock already: it is looked at again.
    while (found := _without_owner()) and time.monotonic() < end_s:
        time.sleep(1)
    return found


def _without_owner() -> set[Path]:
    folders = _SHARED_MEMORY.glob(f"hvd-adaptive-{os.getuid()}-*")
    return {folder for folder in folders if not _has_owner(folder)}


def _has_owner(folder: Path) -> bool:
    """Whether somebody holds the lock; also where there is no such folder any more."""
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return not folder.exists()
