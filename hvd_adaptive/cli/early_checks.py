"""What else is wrong with options, found before ranks start: of what they find, their launcher has ten lines more to say."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_adaptive.algorithm.islands import Islands
from hvd_adaptive.algorithm.slowdown import Slowdown
from hvd_adaptive.cluster.binding import num_restarts
from hvd_adaptive.combinations import check_reference
from hvd_adaptive.config import Config
from hvd_adaptive.xmc.train_config import TrainConfig


def why_missing(path: str) -> str | None:
    """Returns why nobody finds anything at a path: it is not there, or this user may not look. None: it is there."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "is not there"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def check_slowdown_early(slowdown: str | None, num_ranks: int) -> None:
    """Raises ValueError for a slowdown without one factor a rank, and for no ranks."""
    if num_ranks < 1:
        raise ValueError(f"-np must be >= 1, got {num_ranks}")
    Slowdown(slowdown, world_size=num_ranks)


def check_ranks_early(config: Config, num_ranks: int) -> None:
    """Raises ValueError for options that do not fit the number of ranks."""
    check_slowdown_early(config.slowdown, num_ranks)
    check_reference(config)
    if config.island is not None:
        Islands.of(config.island, [""] * num_ranks)


def check_files_early(train: TrainConfig) -> None:
    """Raises ValueError for data or a checkpoint not there, and for a folder with a run."""
    check_data_early(train)
    if train.resume not in (None, "auto") and (reason := why_missing(train.resume)):
        raise ValueError(f"resume: there is no checkpoint in {os.path.abspath(train.resume)}: it {reason}")
    if train.resume is None and train.out and os.path.exists(f"{train.out}/rounds.jsonl") and not num_restarts(os.environ):
        # Only now: it loads torch.
        from hvd_adaptive.xmc.run_directory import RunDirectory

        RunDirectory(Path(train.out)).abandon()


def check_data_early(train: TrainConfig) -> None:
    """Raises ValueError where nothing on this host begins with the path of the data."""
    if train.data is None:
        return
    path = Path(train.data).expanduser()
    if os.path.exists(path) or any(path.parent.glob(f"{path.name}*")):
        return
    # Only now: it loads torch.
    from hvd_adaptive.xmc.data import resolve

    resolve(train.data, train.test_data)
