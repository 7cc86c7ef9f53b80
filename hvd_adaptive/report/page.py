"""One HTML page about runs, with everything in it: no script, nothing from a network."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from hvd_adaptive import __version__
from hvd_adaptive.report import analysis
from hvd_adaptive.report.charts import Chart, comparison_charts, constants, run_charts
from hvd_adaptive.report.drawing import compare
from hvd_adaptive.report.figures import chart_svg, describe_ranks
from hvd_adaptive.report.runs import Run, find_target, printable
from hvd_adaptive.report.style import PALETTE, few_seconds, join_numbers
from hvd_adaptive.report.table import HEADER, table_rows

_MAX_ROUNDS_NAMED = 12
_MAX_RANK_ROWS = 48


def render_page(runs: Sequence[Run], *, target_p1: float | None = None) -> str:
    """Returns the page: a table of the runs, charts in which they meet, and a part on the ranks of each.

    Args:
        runs: the runs, a baseline first.
        target_p1: as for :func:`hvd_adaptive.report.table.table_rows`.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    # Only now: jinja2 comes with torch, which takes no part otherwise.
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    folder = resources.files("hvd_adaptive.report")
    template = environment.from_string((folder / "page.html.jinja").read_text(encoding="utf-8"))

    def figures(charts: Sequence[Chart], prefix: str) -> list[dict[str, Any]]:
        # The only markup that is not escaped: an SVG element that a parser has just written.
        return [
            {"title": c.title, "note": c.note, "svg": Markup(chart_svg(c, f"{prefix}-{c.name}"))}
            for c in charts
        ]

    header, rows, notes = table_rows(runs, target_p1=target_p1)
    # Unscored runs have their speeds already.
    more = ("samples/s", "sent a rank") if header == HEADER else ("sent a rank",)
    names = " against ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    return template.render(
        title=names,
        ranks=describe_ranks(runs),
        version=__version__,
        made_at=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        header=(*header, *more),
        rows=[(*row, *_more_cells(run)[-len(more) :]) for row, run in zip(rows, runs, strict=True)],
        notes=notes,
        findings=_findings(runs, target_p1),
        comparison=figures(comparison_charts(runs), "all"),
        runs=[
            {
                "label": run.label,
                "anchor": f"run-{number}",
                "colour": f"c{number % len(PALETTE)}",
                "path": printable(str(run.path)),
                "state": _state(run),
                "events": _events(run),
                "constants": ", ".join(constants(run)),
                "charts": figures(run_charts(run), f"run-{number}"),
                "ranks": _rank_rows(run),
                "num_ranks": run.num_ranks,
                "options": sorted((printable(str(k)), printable(_show(v))) for k, v in run.config.items()),
                "versions": printable(", ".join(f"{k} {v}" for k, v in (run.summary.get("versions") or {}).items())),
            }
            for number, run in enumerate(runs)
        ],
    )


def _findings(runs: Sequence[Run], target_p1: float | None) -> list[dict[str, str]]:
    """The few numbers that a reader wants first: a large figure and what it says."""
    found = find_target(runs)
    baseline = found[1] if found else None
    target = target_p1 if target_p1 is not None else found[0] if found else None
    findings = []
    for run in runs:
        if run is baseline:
            continue
        # At the start of a sentence, and within one.
        name, within = (run.label, run.label) if len(runs) > 1 else ("The run", "the run")
        seconds = run.seconds_to(target) if target is not None else None
        reference = baseline.seconds_to(target) if baseline and target is not None else None
        if seconds and reference and baseline and run.is_scored_like(baseline):
            figure, _, when = compare(seconds, reference).partition(" ")
            findings.append({
                "figure": figure,
                "text": f"{when}: {name} reached P@1 {target:.4f} after {seconds:.1f} s of training, {baseline.label} after "
                f"{reference:.1f} s",
            })  # fmt: skip
        elif len(runs) == 1 and (best := run.best("p1")) is not None:
            findings.append({"figure": f"{best:.4f}", "text": f"best P@1, in {run.train_s:.1f} s of training"})
        predicted, made = run.summary.get("predicted_samples_per_s"), run.summary.get("samples_per_s")
        if predicted and made:
            findings.append({
                "figure": f"{made / predicted:.2f}",
                "text": f"of the speed that calibrate predicted for {within}: {made:,.0f} samples/s, predicted {predicted:,.0f}",
            })  # fmt: skip
        used, ceiling = run.summary.get("utilisation"), analysis.equal_shares_ceiling(run) if run.rounds else None
        if used is not None:
            most = f"; equal shares would allow {ceiling:.2f} at most" if ceiling else ""
            findings.append({"figure": f"{used:.2f}", "text": f"utilisation of {within}{most}"})
        idle = analysis.idle(run) if run.rounds else None
        if idle and run.num_ranks > 1 and round(idle.reclaimed_s, 1) > 0:
            findings.append({
                "figure": f"{few_seconds(idle.reclaimed_s)} s",
                "text": f"of ranks' idle time reclaimed by {within}: equal shares would have cost {few_seconds(idle.equal_s)} "
                f"rank-seconds at the speeds that the ranks showed; {few_seconds(idle.actual_s)} were idle",
            })  # fmt: skip
    return findings[:9]


def _more_cells(run: Run) -> tuple[str, str]:
    rate = run.num_samples / run.train_s if run.train_s else None
    sent = float(np.nansum(analysis.sent_bytes(run)))
    return "-" if rate is None else f"{rate:,.0f}", f"{sent / 1e6:,.0f} MB" if sent else "-"


def _state(run: Run) -> str:
    count = len(run.rounds)
    done = f"{count} round{'s' * (count != 1)}, {run.num_samples:,.0f} samples, {run.train_s:.1f} s of training"
    ranks = f"{run.num_ranks} rank{'s' * (run.num_ranks > 1)}"
    if run.finished:
        return f"Strategy {run.strategy}, {ranks}, {done}."
    when = datetime.datetime.fromtimestamp(run.written_at).strftime("%Y-%m-%d %H:%M:%S")
    return f"Strategy {run.strategy}, {ranks}. Still going, or interrupted: {done} so far; the last round was written at {when}."


def _events(run: Run) -> list[str]:
    """What went otherwise than it should, or changed on the way."""
    events = []
    if run.slowdown:
        events.append(f"Unequal ranks were emulated: {run.slowdown}.")
    if run.summary.get("utilisation_error"):
        events.append(printable(str(run.summary["utilisation_error"])))
    if run.summary.get("ranks_agreed") is False:
        events.append("The ranks did NOT hold the same model at the end.")
    if run.summary.get("inexact"):
        events.append(printable(f"Not exactly one machine's update: {_show(run.summary['inexact'])}."))
    failed = (run.summary.get("checkpoints") or {}).get("failed", 0)
    if failed:
        events.append(f"{failed} checkpoint{'s' * (failed > 1)} could not be written: see the run's log.")
    counts = [len(next(iter(record["ranks"].values()))) for record in run.rounds]
    for before, after, record in zip(counts, counts[1:], run.rounds[1:], strict=False):
        if before != after:
            events.append(f"From round {record['round']} on there were {after} ranks instead of {before}.")
    events += _straggler_events(run)
    preempted = [record["round"] for record in run.rounds if record.get("preempted")]
    if preempted:
        events.append(f"The job's end was announced to the ranks in round {_name_rounds(preempted)}.")
    for name, what, is_event in (
        ("finite", "had parameters that were not finite, and was reset by the merge", lambda v: v == 0),
        ("skipped_steps", "left out steps whose gradients held NaN or Inf", lambda v: v > 0),
        ("ceiling", "ran out of memory, and keeps to smaller batches since", lambda v: v > 0),
    ):
        values = run.by_rank(name)
        if values is None:
            continue
        for rank, column in enumerate(values.T):
            rounds = [run.rounds[i]["round"] for i in np.flatnonzero(is_event(column))]
            if rounds:
                when = f"from round {rounds[0]} on" if name == "ceiling" else f"in round {_name_rounds(rounds)}"
                events.append(f"Rank {rank} {what}: {when}.")
    sums = run.column("weight_sum")
    if np.isfinite(sums).any() and np.nanmax(np.abs(sums - 1)) > 1e-6:
        low, high = np.nanmin(sums), np.nanmax(sums)
        events.append(f"Merge weights added up to {low:.4f} to {high:.4f}: the rule does not normalize them.")
    return events


def _straggler_events(run: Run) -> list[str]:
    """What the ranks themselves noticed while they trained (``--straggler-limit``)."""
    seen: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for record in run.rounds:
        for found in record.get("stragglers") or []:
            if isinstance(found, dict):
                key = tuple(str(found.get(name, "")) for name in ("rank", "host", "device", "against"))
                seen.setdefault(key, []).append((record["round"], float(found.get("factor", 1.0))))
    return [
        printable(
            f"Rank {rank} on {host} ({device}) was up to {max(factor for _, factor in rounds):.1f} times slower than {against}: "
            f"round {_name_rounds([number for number, _ in rounds])}."
        )
        for (rank, host, device, against), rounds in seen.items()
    ]


def _rank_rows(run: Run) -> list[tuple[str, ...]]:
    if not run.rounds:
        return []
    reports = analysis.rank_reports(run)
    if len(reports) > _MAX_RANK_ROWS:
        reports = sorted(reports, key=lambda report: report.relative_speed)[:_MAX_RANK_ROWS]
    return [
        (
            str(report.rank),
            printable(report.host) or "-",
            f"{report.samples:,.0f}",
            "-" if np.isnan(report.speed) else f"{report.speed:,.0f}",
            "-" if np.isnan(report.relative_speed) else f"{report.relative_speed:.2f}",
            f"{report.last_share:.0%}",
            f"{len(report.slow_rounds)} (to {report.worst:.1f}x: {_name_rounds(report.slow_rounds)})"
            if report.slow_rounds
            else "none",
        )
        for report in reports
    ]


def _name_rounds(rounds: Sequence[int]) -> str:
    named = join_numbers(list(rounds)[:_MAX_ROUNDS_NAMED])
    return f"{named}, ..." if len(rounds) > _MAX_ROUNDS_NAMED else named


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
