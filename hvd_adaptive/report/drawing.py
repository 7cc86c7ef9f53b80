"""How the charts are drawn on matplotlib's axes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvd_adaptive.report.runs import Array, Run, find_target
from hvd_adaptive.report.style import (
    EDGE,
    FAINT,
    INK,
    PAPER,
    TIME_COLOURS,
    colour,
    dashes,
    join_numbers,
    label_ends,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_POINTS = 500
MAX_LINES = 8


def draw_accuracy(axes: Axes, runs: Sequence[Run], *, height_in: float, by_time: bool = True) -> None:
    """Draws P@1 of every run over training seconds or samples, and how much sooner each reached plain Horovod's best."""
    axes.set_xlabel("training time (s), evaluation excluded" if by_time else "samples")
    found = find_target(runs)
    if found:
        axes.axhline(found[0], color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    ends = []
    for number, run in enumerate(runs):
        if not run.evaluations:
            continue
        x = [item.train_s if by_time else item.samples for item in run.evaluations]
        accuracy = [item.scores["p1"] for item in run.evaluations]
        marker = "o" if len(x) < 3 else ""
        axes.plot(x, accuracy, color=colour(number), linestyle=dashes(number), marker=marker, zorder=3)
        label = shorten(run.label)
        reached = run.seconds_to(found[0]) if found and by_time and run.is_scored_like(found[1]) else None
        if found and reached and run.strategy != "horovod":
            height = accuracy[x.index(reached)]
            axes.plot(
                [reached], [height], "o", color=colour(number), markersize=7, markeredgecolor=PAPER, zorder=4
            )
            label += f"  {compare(reached, found[1].seconds_to(found[0]))}"
        ends.append((x[-1], accuracy[-1], label, colour(number)))
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    if not by_time:
        thousands(axes)
    label_ends(axes, ends, height_in=height_in)


def compare(seconds: float, reference_s: float | None) -> str:
    """Returns "2.0x sooner" or "1.5x later"; "" without a reference."""
    if not reference_s:
        return ""
    ratio = reference_s / seconds
    return f"{ratio:.1f}x sooner" if ratio >= 1 else f"{1 / ratio:.1f}x later"


def draw_loss(axes: Axes, runs: Sequence[Run], *, height_in: float) -> None:
    """Draws the mean training loss of each round over training seconds; ``height_in``: of the axes."""
    axes.set_xlabel("training time (s), evaluation excluded")
    ends = []
    for number, run in enumerate(runs):
        seconds, loss = thin(run.column("train_s"), run.column("loss")[:, None])
        finite = np.flatnonzero(np.isfinite(loss[:, 0]))
        if len(finite):
            marker = "o" if len(finite) < 3 else ""
            axes.plot(seconds, loss[:, 0], color=colour(number), linestyle=dashes(number), marker=marker)
            ends.append((seconds[finite[-1]], loss[finite[-1], 0], shorten(run.label), colour(number)))
    axes.set_xlim(left=0)
    label_ends(axes, ends, height_in=height_in)


def draw_by_rank(axes: Axes, run: Run, values: Array, *, height_in: float) -> None:
    """Draws a number of each rank over rounds, shape (num_rounds, num_ranks); of many ranks the spread and the extremes."""
    numbers, values = thin(run.column("round"), values)
    number_rounds(axes, numbers)
    marker = "o" if len(numbers) < 3 else ""
    last = values[-1]
    if values.shape[1] > MAX_LINES:
        bands = np.nanpercentile(values, [0, 10, 50, 90, 100], axis=1)
        axes.fill_between(numbers, bands[0], bands[4], color=colour(5), alpha=0.25, linewidth=0)
        axes.fill_between(numbers, bands[1], bands[3], color=colour(5), alpha=0.45, linewidth=0)
        axes.plot(numbers, bands[2], color=colour(0), marker=marker)
        present = np.flatnonzero(~np.isnan(last))
        low, high = present[last[present].argmin()], present[last[present].argmax()]
        ends = [(numbers[-1], bands[2][-1], "median", colour(0))]
        if low != high:
            ends += [(numbers[-1], last[rank], f"rank {rank}", INK) for rank in (low, high)]
    else:
        # Ranks whose line ends at the same value share one label.
        groups: dict[float, list[int]] = {}
        for rank, line in enumerate(values.T):
            axes.plot(
                numbers, line, color=colour(rank), drawstyle="steps-mid", linewidth=1.8, marker=marker, linestyle=dashes(rank)
            )
            if not np.isnan(last[rank]):
                groups.setdefault(float(f"{last[rank]:.3g}"), []).append(rank)
        ends = []
        for ranks in groups.values():
            ink = colour(ranks[0]) if len(ranks) == 1 else INK
            text = f"rank{'s' if len(ranks) > 1 else ''} {join_numbers(ranks)}"
            factors = {run.factors[rank] for rank in ranks} if len(run.factors) == values.shape[1] else set()
            if len(factors) == 1 and factors != {1.0}:
                text += f" (slowed {factors.pop():g}x)"
            ends.append((numbers[-1], last[ranks[0]], text, ink))
    axes.set_ylim(0, 1.08 * np.nanmax(values) or 1.0)
    label_ends(axes, ends, height_in=height_in)


def number_rounds(axes: Axes, numbers: Array) -> None:
    """Makes x the numbers of rounds, which are whole; a single round has room on both sides."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(numbers) == 1:
        axes.set_xlim(numbers[0] - 0.5, numbers[0] + 0.5)


def draw_stack(
    axes: Axes, names: Sequence[str], rows: Sequence[dict[str, float]], label: str, *, scale: float = 1.0
) -> None:
    """Draws one bar a row, of parts as in ``TIME_COLOURS``, each times ``scale``."""
    shown = [part for part in TIME_COLOURS if any(row[part] > 0.002 * sum(row.values()) for row in rows)]
    left = np.zeros(len(rows))
    for part in shown:
        widths = np.array([scale * row[part] for row in rows])
        axes.barh(range(len(rows)), widths, left=left, color=TIME_COLOURS[part], height=0.7, label=part)
        left += widths
    axes.set_xlabel(label)
    name_bars(axes, names)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, borderaxespad=0.2, handlelength=1, columnspacing=1.2
    )


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Writes names beside horizontal bars, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_color(EDGE)


def bin_size(count: int) -> int:
    """Returns how many of so many rounds :func:`thin` puts into one point."""
    return -(-count // MAX_POINTS)


def thin(numbers: Array, values: Array) -> tuple[Array, Array]:
    """Medians of bins of neighbouring rounds, so that a long run's page stays small."""
    step = bin_size(len(numbers))
    if step <= 1:
        return numbers, values
    starts = range(0, len(numbers), step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rank that was not there has no median
        thinned = np.array([np.nanmedian(values[start : start + step], axis=0) for start in starts])
    return numbers[list(starts)], thinned


def thousands(axes: Axes) -> None:
    """Writes large numbers along x as 20k, 1.5M."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
