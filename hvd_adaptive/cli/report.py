"""``hvd-adaptive report``: run directories side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_adaptive.cli.arguments import write_output
from hvd_adaptive.cluster.output import say
from hvd_adaptive.report.figures import write_pngs
from hvd_adaptive.report.page import render_page
from hvd_adaptive.report.runs import read_runs
from hvd_adaptive.report.table import summary_table


def report(runs: Sequence[str], *, out: str | None, png: str | None, target_p1: float | None) -> None:
    """Prints a table of runs; writes a page and pictures of them.

    Args:
        runs: run directories, the baseline first.
        out: the page's file; None writes none.
        png: the pictures' folder; None draws none.
        target_p1: P@1 to which seconds are counted; None: the best of the first run of plain Horovod.

    Raises:
        ValueError: if a run cannot be read, or a file not be written.
        RuntimeError: if matplotlib is missing.
    """
    if target_p1 is not None and not 0 < target_p1 <= 1:
        raise ValueError(f"--target-p1 must be in (0, 1], got {target_p1}")
    if out and Path(out).is_dir():
        raise ValueError(f"--out names the page's file, such as {Path(out) / 'report.html'}, got the folder {out}")
    if png and (Path(png).suffix.lower() == ".png" or Path(png).is_file()):
        raise ValueError(f"--png names a folder, which gets one picture a chart, got the file {png}")
    found = read_runs([Path(run) for run in runs], leave_out=lambda why: say(f"left out: {why}"))
    print(summary_table(found, target_p1=target_p1))
    if out:
        write_output("--out", out, render_page(found, target_p1=target_p1))
        print(f"page: {out}")
    if png:
        try:
            files = write_pngs(found, Path(png))
        except OSError as error:
            raise ValueError(f"--png {png}: cannot be written: {error}") from None
        print(f"pictures: {png} ({len(files)} files, {files[0].name} first)")
    if not out and not png:
        print("Charts: add --out report.html for a page, --png FOLDER for pictures.")
