"""The charts of runs: what each shows, in words too, and how it is drawn on matplotlib's axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hvd_adaptive.report import analysis
from hvd_adaptive.report.drawing import (
    MAX_LINES,
    MAX_POINTS,
    bin_size,
    draw_accuracy,
    draw_by_rank,
    draw_loss,
    draw_stack,
    name_bars,
    number_rounds,
    thin,
    thousands,
)
from hvd_adaptive.report.runs import Array, Run, find_target
from hvd_adaptive.report.style import FAINT, colour, dashes, few_seconds, label_ends, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH_IN = 6.6
_HEIGHT_IN = 3.3
_BAR_IN = 0.36
_MAX_BARS = 48
_BY_RANK = {
    "batch_size": ("batch-size", "Batch size"),
    "lr": ("learning-rate", "Learning rate"),
    "weight": ("weights", "Merge weight"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart that can be drawn as often as wanted.

    Attributes:
        name: for file names and anchors.
        title: what it shows.
        alt: what can be read from it, for those who do not see it.
        note: how to read it; may be "".
        draw: draws it on empty axes.
        height_in: height of the figure, inches.
    """

    name: str
    title: str
    alt: str
    draw: Callable[[Axes], None]
    note: str = ""
    height_in: float = _HEIGHT_IN


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns the charts in which all runs meet; without those for which the runs hold no data."""
    charts = []
    evaluated = [run for run in runs if run.evaluations]
    if evaluated:
        best = "; ".join(_describe_accuracy(run) for run in evaluated)
        for name, title in (("accuracy-time", "over training time"), ("accuracy-samples", "over samples")):
            by_time = name == "accuracy-time"
            charts.append(
                Chart(
                    name=name,
                    title=f"Accuracy {title}",
                    alt=f"P@1 on the test set {title}. {best}.",
                    note="Dashed: the best of plain Horovod." if find_target(runs) else "",
                    draw=partial(draw_accuracy, runs=runs, height_in=0.75 * _HEIGHT_IN, by_time=by_time),
                )
            )
    with_loss = [run for run in runs if np.isfinite(run.column("loss")).any()]
    if with_loss:
        charts.append(_loss_chart(runs))
    if len(runs) > 1:
        charts += _comparing_bars(runs)
    if any((analysis.sent_bytes(run) > 0).any() for run in runs):
        charts.append(_bytes_chart(runs))
    return charts


def run_charts(run: Run) -> list[Chart]:
    """Returns the charts of one run's ranks; without those for which the run holds no data."""
    if not run.rounds:
        return []
    charts = [_time_chart(run)]
    for field, (name, what) in _BY_RANK.items():
        values = run.by_rank(field)
        if values is None or _is_constant(values):
            continue
        note = ""
        if field == "weight":
            note = "Horizontal: equal weights."
        elif field == "lr":
            note = "Of the last step of each round; the last batches of a round can be cut short, and the rate follows the batch."
        charts.append(_rank_chart(run, name, f"{what} of each rank", values, note))
    speeds = analysis.rank_speeds(run)
    if np.isfinite(speeds).any():
        title = "Speed of each rank (samples per second of computing)"
        charts.append(_rank_chart(run, "speed", title, speeds, "A dip is a rank that was slow."))
    if np.isfinite(run.column("utilisation")).any():
        charts.append(_utilisation_chart(run))
    return charts


def constants(run: Run) -> list[str]:
    """Returns what :func:`run_charts` would draw of all ranks but for it being the same always, such as "batch size 32"."""
    found = []
    for field, (_, what) in _BY_RANK.items():
        values = run.by_rank(field)
        if values is not None and _is_constant(values):
            found.append(f"{what.lower()} {np.nanmax(values):.4g}")
    return found


def _rank_chart(run: Run, name: str, title: str, values: Array, note: str) -> Chart:
    present = np.flatnonzero(~np.isnan(values[-1]))
    ends = ", ".join(f"rank {rank} {values[-1, rank]:.4g}" for rank in present[:MAX_LINES])
    more = f" and {len(present) - MAX_LINES} more ranks" if len(present) > MAX_LINES else ""
    if len(run.rounds) > MAX_POINTS:
        note += f" Each point is the median of {bin_size(len(run.rounds))} rounds."
    if values.shape[1] > MAX_LINES:
        note += " Areas: all ranks, and the middle 80% of them."

    def draw(axes: Axes) -> None:
        if name == "weights":
            axes.axhline(1 / len(present), color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        draw_by_rank(axes, run, values, height_in=0.75 * _HEIGHT_IN)

    alt = f"{title} over rounds. In the last round: {ends}{more}."
    return Chart(name=name, title=title, alt=alt, note=note.strip(), draw=draw)


def _is_constant(values: Array) -> bool:
    return bool(np.nanmax(values) - np.nanmin(values) <= 1e-9 * abs(np.nanmax(values)))


def _loss_chart(runs: Sequence[Run]) -> Chart:
    lasts = []
    for run in runs:
        finite = run.column("loss")[np.isfinite(run.column("loss"))]
        if len(finite):
            lasts.append(f"{run.label} {finite[0]:.3g} at first, {finite[-1]:.3g} at last")
    return Chart(
        name="loss",
        title="Training loss of each round",
        alt=f"Mean loss over each round's samples. {'; '.join(lasts)}.",
        draw=partial(draw_loss, runs=runs, height_in=0.75 * _HEIGHT_IN),
    )


def _comparing_bars(runs: Sequence[Run]) -> list[Chart]:
    charts = []
    timed = [run for run in runs if run.rounds]
    if timed:
        shares = [analysis.time_shares(run) for run in timed]
        words = "; ".join(
            f"{run.label}: " + ", ".join(f"{part} {value:.0%}" for part, value in share.items() if value >= 0.005)
            for run, share in zip(timed, shares, strict=True)
        )
        charts.append(
            Chart(
                name="time",
                title="Where the ranks' time went",
                alt=f"Parts of all ranks' training time. {words}.",
                note="Of plain Horovod and sync, waiting contains the exchange."
                if any(map(analysis.exchange_in_wait, timed))
                else "",
                height_in=_bars_height(len(timed)),
                draw=lambda axes: draw_stack(
                    axes, [shorten(run.label, 26) for run in timed], shares, "share of the training time (%)", scale=100
                ),
            )
        )
    utilisation = _utilisation_bars(runs)
    if utilisation:
        charts.append(utilisation)
    idles = [(run, found) for run in timed if (found := analysis.idle(run))]
    if idles:
        charts.append(_idle_bars(idles, [run.label for run in timed if analysis.exchange_in_wait(run)]))
    return charts


def _utilisation_bars(runs: Sequence[Run]) -> Chart | None:
    rows = [(run, run.summary.get("utilisation")) for run in runs]
    known = [(run, float(value), analysis.equal_shares_ceiling(run)) for run, value in rows if value is not None]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        for place, (_, value, ceiling) in enumerate(known):
            axes.barh(place, value, color=colour(0), height=0.6)
            if ceiling:
                axes.plot([ceiling, ceiling], [place - 0.42, place + 0.42], color=colour(1), linewidth=3)
                left = ceiling > 0.9
                # On white: it may stand on the bar.
                axes.annotate(
                    f"{ceiling:.2f}", (ceiling, place), xytext=(-5 if left else 5, 0), textcoords="offset points", va="center",
                    ha="right" if left else "left", color=colour(1), bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                )  # fmt: skip
        axes.axvline(1, color=FAINT, linewidth=1)
        axes.set_xlim(0, 1.05)
        axes.set_xlabel("utilisation; line at 1: every rank always computing")
        name_bars(axes, [f"{shorten(run.label, 20)}: {value:.2f}" for run, value, _ in known])

    words = "; ".join(
        f"{run.label} {value:.2f}" + (f", equal shares allow {ceiling:.2f}" if ceiling else "") for run, value, ceiling in known
    )
    return Chart(
        name="utilisation",
        title="Utilisation against its ceilings",
        alt=f"Samples computed over what the ranks could have computed in the time. {words}.",
        note="Orange mark: the most that equal shares allow at the speeds that the ranks showed, as the slowest one decides.",
        height_in=_bars_height(len(known)),
        draw=draw,
    )


def _idle_bars(idles: Sequence[tuple[Run, analysis.Idle]], unknown: Sequence[str]) -> Chart:
    without = f" Not known for {', '.join(unknown)}, whose waiting contains the exchange." if unknown else ""

    def draw(axes: Axes) -> None:
        for place, (_, idle) in enumerate(idles):
            for number, (value, text) in enumerate(((idle.actual_s, "as it was"), (idle.equal_s, "with equal shares"))):
                middle = place + 0.2 - 0.4 * number
                axes.barh(middle, value, color=colour(number), height=0.36)
                text = f"{few_seconds(value)} s {text}"
                axes.annotate(text, (value, middle), xytext=(5, 0), textcoords="offset points", va="center", color=colour(number))
        axes.set_xlim(0, 1.4 * axes.get_xlim()[1])
        axes.set_xlabel("idle seconds of all ranks together")
        name_bars(axes, [shorten(run.label, 26) for run, _ in idles])

    words = "; ".join(
        f"{run.label}: {few_seconds(idle.equal_s)} rank-seconds at equal shares, {few_seconds(idle.actual_s)} as it was"
        for run, idle in idles
    )
    return Chart(
        name="idle",
        title="Idle time against equal shares",
        alt=f"{words}.",
        note="Orange, above: with equal shares, at the speeds that the ranks showed. Blue, below: as it was." + without,
        height_in=_bars_height(len(idles)) + 0.2,
        draw=draw,
    )


def _bytes_chart(runs: Sequence[Run]) -> Chart:
    totals = [(run, float(np.nansum(analysis.sent_bytes(run)))) for run in runs]

    def draw(axes: Axes) -> None:
        axes.set_xlabel("samples")
        ends = []
        for number, (run, total) in enumerate(totals):
            if not total:
                continue
            sent = np.nancumsum(analysis.sent_bytes(run)) / 1e6
            samples = run.column("samples")
            keep = np.unique(np.linspace(0, len(sent) - 1, min(len(sent), MAX_POINTS)).astype(int))
            marker = "o" if len(keep) < 3 else ""
            axes.plot(samples[keep], sent[keep], color=colour(number), linestyle=dashes(number), marker=marker)
            ends.append((samples[-1], sent[-1], shorten(run.label), colour(number)))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        thousands(axes)
        label_ends(axes, ends, height_in=0.75 * _HEIGHT_IN)

    uncounted = [run.label for run, total in totals if not total]
    words = "; ".join(f"{run.label} {total / 1e6:,.0f} MB" for run, total in totals if total)
    return Chart(
        name="bytes",
        title="Megabytes that each rank put on the wire",
        alt=f"Bytes that each rank gave into merges, added up. {words}.",
        note=f"Nothing sent, or not counted: {', '.join(uncounted)}." if uncounted else "",
        draw=draw,
    )


def _time_chart(run: Run) -> Chart:
    parts = analysis.rank_seconds(run)
    names, rows = _fold_ranks(parts)
    words = "; ".join(
        f"{name}: " + ", ".join(f"{part} {value:.1f}" for part, value in row.items() if value >= 0.05)
        for name, row in list(zip(names, rows, strict=True))[:MAX_LINES]
    )
    return Chart(
        name="rank-time",
        title="Where each rank's time went",
        alt=f"Seconds of training by rank. {words}.",
        note="Waiting contains the exchange." if analysis.exchange_in_wait(run) else "",
        height_in=_bars_height(len(names)),
        draw=lambda axes: draw_stack(axes, names, rows, "seconds of training"),
    )


def _utilisation_chart(run: Run) -> Chart:
    ceiling = analysis.equal_shares_ceiling(run)

    def draw(axes: Axes) -> None:
        numbers, values = thin(run.column("round"), run.column("utilisation")[:, None])
        axes.plot(numbers, values[:, 0], color=colour(0), marker="o" if len(numbers) < 3 else "")
        axes.axhline(1, color=FAINT, linewidth=1)
        ends = [(numbers[-1], float(values[-1, 0]), "utilisation", colour(0))]
        if ceiling:
            axes.axhline(ceiling, color=colour(1), linewidth=1.5, linestyle=(0, (4, 3)))
            ends.append((numbers[-1], ceiling, "most at equal shares", colour(1)))
        axes.set_ylim(0, max(1.05, 1.05 * np.nanmax(values)))
        number_rounds(axes, numbers)
        label_ends(axes, [end for end in ends if not np.isnan(end[1])], height_in=0.75 * _HEIGHT_IN)

    mean = np.nanmean(run.column("utilisation"))
    return Chart(
        name="utilisation",
        title="Utilisation of each round",
        alt=f"Samples computed over what the ranks could have computed. On average {mean:.2f}"
        + (f"; equal shares allow at most {ceiling:.2f}." if ceiling else "."),
        note="Line at 1: every rank always computing.",
        draw=draw,
    )


def _bars_height(count: int) -> float:
    return 1.5 + _BAR_IN * count


def _fold_ranks(parts: dict[str, Array]) -> tuple[list[str], list[dict[str, float]]]:
    """Rows of bars: one a rank; means of neighbouring ranks where there are too many."""
    size = len(parts["compute"])
    step = -(-size // _MAX_BARS)
    names, rows = [], []
    for start in range(0, size, step):
        end = min(start + step, size)
        names.append(f"rank {start}" if step == 1 else f"ranks {start}-{end - 1}")
        rows.append({part: float(values[start:end].mean()) for part, values in parts.items()})
    return names, rows


def _describe_accuracy(run: Run) -> str:
    best = run.best("p1")
    last = run.evaluations[-1]
    return f"{run.label}: best {best:.4f}, last {last.scores['p1']:.4f} after {last.train_s:.1f} s"
