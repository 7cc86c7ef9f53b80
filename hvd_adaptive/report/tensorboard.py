"""TensorBoard scalars from the records of rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Of each rank: the field of a record, and its tag.
_BY_RANK = {
    "batch_size": "batch size",
    "lr": "learning rate",
    "weight": "merge weight",
    "samples": "samples",
    "busy_s": "compute (s)",
    "claim_s": "claim (s)",
    "wait_s": "wait (s)",
    "merge_s": "merge (s)",
    "average_s": "averages of moments (s)",
    "checkpoint_s": "checkpoint (s)",
}
_MAX_RANKS = 16


class ScalarWriter:
    """Writes each round as scalars, at the number of the round; for one rank only.

    Of more than 16 ranks the smallest, mean and largest value is written instead of each rank's. Where the first round is not
    round 0, because a run goes on from a checkpoint, earlier scalars from that round on are hidden.

    Args:
        folder: where event files go; made at the first round.

    Raises:
        ValueError: if the package tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"tensorboard needs the package tensorboard ({error}): pip install tensorboard, or leave "
                "--tensorboard out"
            ) from None
        self._folder = folder
        self._make = SummaryWriter
        self._writer: Any = None

    def add_round(self, record: Mapping[str, Any]) -> None:
        """Writes a line of rounds.jsonl, or what ``RoundRecord.to_json`` returns, and flushes it to the file.

        Raises:
            OSError: if the folder cannot be written.
        """
        number = int(record["round"])
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=number or None)
        scalars = {
            "loss": record.get("loss"),
            "epoch": record.get("epoch"),
            "training time (s)": record.get("train_s"),
            "samples": record.get("samples"),
            "payload (MB)": record.get("payload_bytes", 0) / 1e6,
            "utilisation": record.get("utilisation"),
            "merge weights' sum": record.get("weight_sum"),
        }
        values = {f"round/{name}": value for name, value in scalars.items()}
        values.update({f"test/{name}": value for name, value in (record.get("eval") or {}).items()})
        for field, name in _BY_RANK.items():
            ranks = record["ranks"].get(field)
            if ranks and len(ranks) <= _MAX_RANKS:
                values.update({f"{name}/rank {rank}": value for rank, value in enumerate(ranks)})
            elif ranks:
                values.update({f"{name}/smallest": min(ranks), f"{name}/mean": np.mean(ranks), f"{name}/largest": max(ranks)})
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, float(value), number)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
