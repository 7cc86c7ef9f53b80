"""A real file system that is soon full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from needs import need_root_and


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """Mounts a file system of a few KiB in a folder of the test's own; goes on only for root."""
    need_root_and(mount="mount", umount="mount")
    folder.mkdir(exist_ok=True)
    # Of a program that was killed.
    _unmount(folder)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], check=True)
        yield folder
    finally:
        _unmount(folder)


def _unmount(folder: Path) -> None:
    if folder.is_mount():
        # Whoever still has a file open there keeps it.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
