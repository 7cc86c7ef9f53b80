"""What a person sees of a run: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.xmc.data import SparseDataset

_PLAIN_INTERVAL_S = 2.0


class Progress:
    """Shows a run's rounds on standard output.

    Args:
        splits: the data.
        config: how ranks share and merge.
        world_size: number of ranks.
        carrier: what carries their tensors, in words; empty for one rank without it.
        terminal: the output goes to a terminal, perhaps through mpirun, which gives a rank a pseudo-terminal either way.
    """

    def __init__(
        self, splits: tuple[SparseDataset, SparseDataset], config: Config, world_size: int, *, carrier: str, terminal: bool
    ) -> None:
        self._console = Console(force_terminal=terminal, soft_wrap=True, highlight=False)
        self._splits = splits
        self._config = config
        self._world_size = world_size
        self._carrier = carrier
        self._live: Live | None = None
        self._last_line_s = 0.0
        self._last_p1: float | None = None
        self._last_p1_epoch = 0.0
        self._previous = (0.0, 0)

    def start(self, path: Path) -> None:
        """Says what begins."""
        train, test = self._splits
        ranks = f"{self._world_size} rank{'s' * (self._world_size > 1)}"
        text = (
            f"{train.name}: {len(train):,} training and {len(test):,} test samples, {train.num_features:,} features, "
            f"{train.num_labels:,} labels\n{ranks}{self._carrier and f' over {self._carrier}'}, strategy {self._config.strategy}"
        )
        if self._config.slowdown:
            text += f", EMULATED slowdown {self._config.slowdown}"
        self._console.print(Text(f"{text}\nrun directory {path}"))

    def show(self, record: RoundRecord, scores: dict[str, float] | None, left_s: float | None) -> None:
        """Shows a round."""
        if scores:
            self._last_p1, self._last_p1_epoch = scores["p1"], record.epoch
        line = self._line(record, left_s)
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._last_line_s >= _PLAIN_INTERVAL_S:
            self._last_line_s = time.monotonic()
            self._console.print(Text(line))

    def stop(self) -> None:
        """Ends the line that changes, and shows the terminal's cursor again. However the run ends."""
        if self._live is not None:
            self._live.stop()

    def finish(self, summary: dict[str, Any], path: Path) -> None:
        """Says how it ended, after :meth:`stop`."""
        best, epoch = summary["best"], summary["best_epoch"]
        scores = "  ".join(
            f"{name.upper().replace('P', 'P@')} {best[name]:.4f}"
            for name in best
            if name.startswith("p") and name[1:].isdigit()
        )
        when = "after" if epoch is None else f"reached at epoch {epoch:.2f} of"
        expected = summary["predicted_samples_per_s"]
        predicted = f"; predicted {expected:,.0f}" if expected else ""
        scored = f", on {summary['eval_samples']:,} test samples" if summary["eval_samples"] else ""
        on_all = f"; the last model on all: P@1 {summary['final']['p1']:.4f}" if scored else ""
        lines = [
            f"best model{scored}: {scores}, {when} {summary['epochs']:.2f}{on_all}",
            f"{summary['samples']:,} samples in {summary['train_s']:.1f} s of training "
            f"({summary['samples_per_s']:,.0f} samples/s{predicted}), {summary['wall_s']:.1f} s with evaluation",
            f"waiting for other ranks {summary['wait_share']:.1%}, merging {summary['merge_share']:.1%}"
            + (f", utilisation {summary['utilisation']:.2f}" if summary["utilisation"] is not None else ""),
            f"all ranks hold the same model: {'yes' if summary['ranks_agreed'] else 'NO'}",
            f"written to {path}",
        ]
        self._console.print(Text("\n".join(lines)))

    def _line(self, record: RoundRecord, left_s: float | None) -> str:
        before_s, before = self._previous
        self._previous = (record.train_s, record.num_samples)
        rate = (record.num_samples - before) / max(record.train_s - before_s, 1e-9)
        sizes = " ".join(str(int(size)) for size in np.rint(record.stats["batch_size"]))
        waited = record.stats["wait_s"].mean() / max(record.train_s - before_s, 1e-9)
        parts = [
            f"round {record.round + 1}",
            f"epoch {record.epoch:.2f}",
            f"{record.train_s:.1f} s",
            f"{rate:,.0f} samples/s",
            f"batch {sizes}",
            f"wait {waited:.0%}",
        ]
        if record.loss is not None:
            parts.append(f"loss {record.loss:.3f}")
        if self._last_p1 is not None:
            at = "" if self._last_p1_epoch == record.epoch else f" (epoch {self._last_p1_epoch:.2f})"
            parts.append(f"P@1 {self._last_p1:.4f}{at}")
        if left_s is not None:
            parts.append(f"at most {int(left_s) // 60}:{int(left_s) % 60:02d} left")
        return "  ".join(parts)
