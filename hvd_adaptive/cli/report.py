"""``hvd-adaptive report``: run directories side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_adaptive.report.plots import plot_runs
from hvd_adaptive.report.table import summary_table


def report(runs: Sequence[str], png: str | None) -> None:
    """Prints a table of runs and draws a picture of them.

    Args:
        runs: run directories, the baseline first.
        png: the picture's file; None draws none.

    Raises:
        ValueError: if a run cannot be read, or the picture not be written.
        RuntimeError: if matplotlib is missing.
    """
    directories = [Path(run) for run in runs]
    print(summary_table(directories))
    if png:
        try:
            plot_runs(directories, Path(png))
        except OSError as error:
            raise ValueError(f"--png {png}: cannot be written: {error}") from None
        print(f"picture: {png}")
