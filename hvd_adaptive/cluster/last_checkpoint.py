"""What a job leaves to go on from, as far as names tell: a run's checkpoints, and the commits of a script's state."""

from __future__ import annotations

import re
from pathlib import Path

ROUND, COMMIT = "round", "commit"
# Says in a folder which job writes there (hvd_adaptive.state.folder_owner).
OWNER = ".owner"


def directory_name(number: int, kind: str = ROUND) -> str:
    """Returns the name of the checkpoint after this many rounds, or of this commit, which count from 1."""
    return f"{kind}-{number:08d}"


def number_of(path: Path) -> int:
    """Returns the number in the name of a checkpoint or commit."""
    return int(path.stem.rpartition("-")[2])


def find_checkpoints(*folders: Path, kind: str = ROUND) -> list[Path]:
    """Returns the checkpoints or commits of some folders, newest first, of equally new ones the first folder's; valid or not.

    Args:
        folders: of checkpoints; need not be there.
        kind: ROUND or COMMIT.
    """
    # Commits of older versions were files, which are to be refused by name and not overlooked.
    form = re.compile(rf"{kind}-\d{{8,}}(\.safetensors)?", re.ASCII)
    found = [path for folder in folders for path in folder.glob(f"{kind}-*") if form.fullmatch(path.name)]
    return sorted(found, key=number_of, reverse=True)


def newest_checkpoint(*folders: Path, kind: str = ROUND) -> Path | None:
    """Returns the first of `find_checkpoints`; None if there is none."""
    return next(iter(find_checkpoints(*folders, kind=kind)), None)


def resume_when_requeued(resume: str | None, out: str | None) -> str | None:
    """Returns what a run that a scheduler has started again resumes from: "auto", unless it is to go on from another run's
    checkpoint and has written none of its own yet.

    Args:
        resume: what it was to resume from, None for nothing.
        out: its run directory; None for a new one at each start.
    """
    if out is None or (resume is not None and newest_checkpoint(Path(out) / "checkpoints") is None):
        return resume
    return "auto"


def describe_newest(*folders: Path) -> str:
    """Says in a part of a sentence which checkpoint is the last; raises nothing, as a job that ends by a broken disk asks."""
    try:
        newest = newest_checkpoint(*folders)
    except OSError as error:
        return f"{folders[-1]} cannot be read: {error.strerror}"
    return f"the last checkpoint is {newest}" if newest else f"there is no checkpoint in {folders[-1]}"
