"""What a job that has ended leaves to go on from, as far as its files' names tell."""

from __future__ import annotations

import re
from pathlib import Path


def newest_checkpoint(*folders: Path) -> Path | None:
    """Returns the newest checkpoint of some folders, of equally new ones the first folder's; None if there is none.

    Args:
        folders: of checkpoints; need not be there.
    """
    return next(iter(_found(r"round-\d+", folders)), None)


def newest_commit(*folders: Path) -> Path | None:
    """Returns the newest commit of a script's state, as :func:`newest_checkpoint` does."""
    return next(iter(commits(*folders)), None)


def commits(*folders: Path) -> list[Path]:
    """Returns the commits of a script's state, newest first."""
    return _found(r"commit-\d+\.safetensors", folders)


def commit_name(number: int) -> str:
    """Returns the file name of a script's commit, which counts from 1."""
    return f"commit-{number:08d}.safetensors"


def number_of(path: Path) -> int:
    """Returns the number in the name of a checkpoint or commit."""
    return int(path.stem.rpartition("-")[2])


def describe_newest(*folders: Path) -> str:
    """Says in a part of a sentence which checkpoint is the last."""
    newest = newest_checkpoint(*folders)
    return f"the last checkpoint is {newest}" if newest else f"there is no checkpoint in {folders[-1]}"


def _found(pattern: str, folders: tuple[Path, ...]) -> list[Path]:
    found = [path for folder in folders for path in folder.glob("*") if re.fullmatch(pattern, path.name, re.ASCII)]
    return sorted(found, key=number_of, reverse=True)
