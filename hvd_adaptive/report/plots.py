"""The picture of one or more runs: accuracy over time, and batch sizes over rounds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_adaptive.report.runs import Run, find_target, read_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, distinguishable with every common colour blindness; its yellow is too faint for
# lines.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK = "#333333"
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.edgecolor": "#999999",
    "axes.labelcolor": _INK,
    "grid.color": "#E5E5E5",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 2.0,
}

_LEADER: Any = {
    "arrowstyle": "-",
    "linewidth": 0.7,
    "alpha": 0.6,
    "relpos": (0, 0.5),
    "shrinkA": 1,
    "shrinkB": 1,
}


def plot_runs(run_dirs: Sequence[Path], path: Path) -> None:
    """Draws P@1 over training seconds, and the batch sizes of every run of strategy "local", into a PNG.

    Args:
        run_dirs: run directories.
        path: the file to write; its folder must exist.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: a directory is not a readable run with at least one evaluation.
    """
    runs = read_runs(run_dirs)
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("plots need matplotlib: pip install 'hvd-adaptive[plots]'") from error
    adaptive = [run for run in runs if run.strategy == "local" and run.rounds]
    with rc_context(_STYLE):
        height = 4.2 + 1.2 * max(0, len(adaptive) - 1)
        figure = Figure(figsize=(10.5 if adaptive else 6.5, height))
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
        columns = figure.add_gridspec(1, 2 if adaptive else 1)
        _draw_accuracy(figure.add_subplot(columns[0]), runs, height_in=0.7 * height)
        if adaptive:
            panels = columns[1].subgridspec(len(adaptive), 1)
            for number, run in enumerate(adaptive):
                axes = figure.add_subplot(panels[number])
                _draw_batch_sizes(axes, run, height_in=0.7 * height / len(adaptive))
            axes.set_xlabel("round")
        width = 90 if adaptive else 55
        title = "\n".join(textwrap.wrap(_title(runs), width))
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=150, format="png", facecolor="white")


def _title(runs: Sequence[Run]) -> str:
    sizes = {run.summary["world_size"] for run in runs if "world_size" in run.summary}
    size = sizes.pop() if len(sizes) == 1 else None
    ranks = "" if size is None else f"{size} rank{'s' if size > 1 else ''}"
    slowed = {run.slowdown for run in runs}
    if slowed == {""}:
        return ranks
    if len(slowed) == 1:
        return f"{ranks + ', ' if ranks else ''}emulated slowdowns {slowed.pop()}"
    parts = [f"{run.label}: {run.slowdown or 'none'}" for run in runs]
    return f"{ranks + ', ' if ranks else ''}emulated slowdowns ({'; '.join(parts)})"


def _draw_accuracy(axes: Axes, runs: Sequence[Run], *, height_in: float) -> None:
    axes.set_title("P@1 on the test set")
    axes.set_xlabel("training time (s), evaluation excluded")
    found = find_target(runs)
    if found:
        axes.axhline(found[0], color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    ends = []
    for run, colour in zip(runs, islice(cycle(_PALETTE), len(runs)), strict=True):
        seconds = [item.train_s for item in run.evaluations]
        accuracy = [item.scores["p1"] for item in run.evaluations]
        marker = "o" if len(seconds) < 3 else ""
        axes.plot(seconds, accuracy, color=colour, marker=marker, solid_capstyle="round", zorder=3)
        ends.append((seconds[-1], accuracy[-1], run.label, colour))
        reached = run.seconds_to(found[0]) if found else None
        if found and reached and run.strategy != "horovod":
            height = accuracy[seconds.index(reached)]
            axes.plot([reached], [height], "o", color=colour, markersize=7, markeredgecolor="white", zorder=4)
            axes.annotate(
                _compare(reached, found[1].seconds_to(found[0])),
                (reached, height),
                xytext=(-6, 5),
                textcoords="offset points",
                ha="right",
                color=colour,
            )
    axes.set_xlim(left=0)
    axes.margins(y=0.08)
    _label_ends(axes, ends, height_in=height_in)


def _compare(seconds: float, reference_s: float | None) -> str:
    if not reference_s:
        return ""
    ratio = reference_s / seconds
    return f"{ratio:.1f}x sooner" if ratio >= 1 else f"{1 / ratio:.1f}x later"


def _draw_batch_sizes(axes: Axes, run: Run, *, height_in: float) -> None:
    axes.set_title(f"Batch size of each rank: {run.label}")
    numbers = [record["round"] for record in run.rounds]
    # A resume may have changed the number of ranks: a rank that was not there has no line.
    lines = list(zip_longest(*(record["ranks"]["batch_size"] for record in run.rounds), fillvalue=math.nan))
    # Ranks whose line ends at the same size share one label.
    groups: dict[float, list[int]] = {}
    for rank, (sizes, colour) in enumerate(zip(lines, islice(cycle(_PALETTE), len(lines)), strict=True)):
        axes.plot(numbers, sizes, color=colour, drawstyle="steps-mid", linewidth=1.8)
        if not math.isnan(sizes[-1]):
            groups.setdefault(round(sizes[-1]), []).append(rank)
    ends = []
    for ranks in groups.values():
        colour = _PALETTE[ranks[0] % len(_PALETTE)] if len(ranks) == 1 else _INK
        text = f"rank{'s' if len(ranks) > 1 else ''} {_join(ranks)}"
        factors = {run.factors[rank] for rank in ranks} if len(run.factors) == len(lines) else set()
        if len(factors) == 1:
            text += f" ({factors.pop():g}x)"
        ends.append((numbers[-1], lines[ranks[0]][-1], text, colour))
    axes.set_ylim(0, 1.08 * max(size for sizes in lines for size in sizes if not math.isnan(size)))
    _label_ends(axes, ends, height_in=height_in)


def _join(ranks: Sequence[int]) -> str:
    """1, 2, 3, 5 -> "1-3, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], *, height_in: float) -> None:
    """Writes (x, y, text, colour) at the right edge, moved apart where lines end close to each other."""
    low, high = axes.get_ylim()
    line_height_points = 13
    gap = (high - low) * line_height_points / (72 * height_in)
    places: list[float] = []
    for _, y, _, _ in sorted(ends, key=lambda end: end[1]):
        places.append(y if not places else max(y, places[-1] + gap))
    overflow = places[-1] - high if places else 0.0
    if overflow > 0:
        places = [place - overflow for place in places]
    for place, (x, y, text, colour) in zip(places, sorted(ends, key=lambda end: end[1]), strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(1.015, place),
            textcoords=("axes fraction", "data"),
            color=colour,
            va="center",
            annotation_clip=False,
            fontweight="bold",
            arrowprops={**_LEADER, "color": colour},
        )
