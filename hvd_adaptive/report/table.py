"""A table of runs, readable as plain text and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvd_adaptive.report import analysis
from hvd_adaptive.report.runs import Run, find_target

HEADER = (
    "run",
    "strategy",
    "best P@1",
    "at epoch",
    "P@3",
    "P@5",
    "s to target",
    "speed-up",
    "utilisation",
    "waiting",
)
# Of runs that nobody has scored, as of one's own loop.
UNSCORED_HEADER = ("run", "strategy", "epochs", "last loss", "seconds", "samples/s", "computing", "waiting", "merging")
_NONE = "-"


def table_rows(
    runs: Sequence[Run], *, target_p1: float | None = None
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Compares runs: the best model's metrics and its epoch, training seconds to a target P@1, utilisation and waiting. If none
    was scored: their losses, speeds, and where the ranks' time went.

    Args:
        runs: the runs, one row each, in this order.
        target_p1: the target; None: the best P@1 of the first run whose strategy is "horovod".

    Returns:
        The header, ``HEADER`` or ``UNSCORED_HEADER``, rows of as many cells, and lines of notes on the target, emulated slowdowns
        and runs that have not ended. The speed-up is the seconds to the target of the first "horovod" run divided by the run's
        own.
    """
    if not any(run.evaluations for run in runs):
        return UNSCORED_HEADER, [_unscored_row(run) for run in runs], _notes(runs, None, None, from_baseline=False)
    found = find_target(runs)
    baseline = found[1] if found else None
    if target_p1 is None and found:
        target_p1 = found[0]
    from_baseline = bool(found and target_p1 == found[0])
    rows = [_row(run, target_p1, baseline, from_baseline=from_baseline) for run in runs]
    return HEADER, rows, _notes(runs, target_p1, baseline, from_baseline=from_baseline)


def summary_table(runs: Sequence[Run], *, target_p1: float | None = None) -> str:
    """Returns :func:`table_rows` as a Markdown table with aligned columns, and its notes below."""
    header, cells, notes = table_rows(runs, target_p1=target_p1)
    rows = [header, *((row[0].replace("|", "/"), *row[1:]) for row in cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        _line(
            [_pad(cell, width, column) for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        )
        for row in rows
    ]
    rule = [("-" * width) if column < 2 else ("-" * (width - 1) + ":") for column, width in enumerate(widths)]
    lines.insert(1, _line(rule))
    return "\n".join([*lines, "", *notes])


def _row(run: Run, target_p1: float | None, baseline: Run | None, *, from_baseline: bool) -> tuple[str, ...]:
    is_like = baseline is None or run.is_scored_like(baseline)
    seconds = None if target_p1 is None or (from_baseline and not is_like) else run.seconds_to(target_p1)
    reference = baseline.seconds_to(target_p1) if baseline is not None and target_p1 is not None and is_like else None
    return (
        run.label,
        run.strategy,
        _format(run.best("p1"), ".4f"),
        _epoch(run),
        *(_format(run.best(metric), ".4f") for metric in ("p3", "p5")),
        _NONE if seconds is None else f"{seconds:.1f}",
        f"{reference / seconds:.2f}x" if seconds and reference is not None else _NONE,
        _format(run.summary.get("utilisation"), ".3f"),
        _format(run.summary.get("wait_share"), ".1%"),
    )


def _unscored_row(run: Run) -> tuple[str, ...]:
    losses, epochs = (values[np.isfinite(values)] for values in (run.column("loss"), run.column("epoch")))
    shares = analysis.time_shares(run) if run.rounds else {}
    return (
        run.label,
        run.strategy,
        f"{epochs[-1]:.1f}" if len(epochs) else _NONE,
        f"{losses[-1]:.4g}" if len(losses) else _NONE,
        f"{run.train_s:.1f}",
        f"{run.num_samples / run.train_s:,.0f}" if run.train_s else _NONE,
        *(_format(shares.get(part), ".1%") for part in ("compute", "wait", "merge")),
    )


def _notes(
    runs: Sequence[Run], target_p1: float | None, baseline: Run | None, *, from_baseline: bool
) -> list[str]:
    notes = []
    if target_p1 is None and any(run.evaluations for run in runs):
        notes.append("No target: there is no run of plain Horovod to take it from.")
    elif target_p1 is not None:
        source = f", the best of {baseline.label}" if baseline is not None and from_baseline else ""
        notes.append(f"Target: P@1 {target_p1:.4f}{source}. Seconds are training time, evaluation excluded.")
    for run in runs:
        if baseline is not None and not run.is_scored_like(baseline):
            on = f"{run.summary['scored']}, {baseline.label} on {baseline.summary['scored']}"
            notes.append(f"{run.label} was scored on {on}: they are not compared.")
    slowed = {run.slowdown for run in runs}
    if len(slowed) == 1 and slowed != {""}:
        notes.append(f"Emulated slowdowns of the ranks: {slowed.pop()}.")
    else:
        notes += [f"Emulated slowdowns in {run.label}: {run.slowdown}." for run in runs if run.slowdown]
    for run in runs:
        predicted, made = run.summary.get("predicted_samples_per_s"), run.summary.get("samples_per_s")
        if predicted and made:
            notes.append(f"{run.label} made {made:,.0f} samples/s; calibrate predicted {predicted:,.0f}.")
        if run.evaluations and not run.evaluations[-1].comparable:
            scored, last = run.config["eval_samples"], run.evaluations[-1].scores["p1"]
            notes.append(f"{run.label} was scored on {scored} test samples, and its last model on all: P@1 {last:.4f}.")
        if not run.finished:
            rounds = f"{len(run.rounds)} round{'s' * (len(run.rounds) > 1)}"
            notes.append(f"{run.label} has not ended: {rounds}, {run.train_s:.0f} s of training so far.")
    return notes


def _epoch(run: Run) -> str:
    found = run.best_evaluation
    return _NONE if found is None or math.isnan(found.epoch) else f"{found.epoch:.1f}"


def _format(value: float | None, spec: str) -> str:
    return _NONE if value is None else format(value, spec)


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
