"""What else is wrong with options, found before ranks start: of what they find, their launcher has ten lines more to say."""

from __future__ import annotations

from pathlib import Path

from hvd_adaptive.xmc.train_config import TrainConfig


def check_data_early(train: TrainConfig) -> None:
    """Raises ValueError where nothing on this host begins with the path of the data."""
    if train.data is None:
        return
    path = Path(train.data).expanduser()
    if path.exists() or any(path.parent.glob(f"{path.name}*")):
        return
    # Only now: it loads torch.
    from hvd_adaptive.xmc.data import resolve

    resolve(train.data, train.test_data)
