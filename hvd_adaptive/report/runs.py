"""Reading a run directory: config.json, rounds.jsonl and, once the run has ended, summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation of a run.

    Attributes:
        train_s: seconds of training before it, evaluations excluded.
        scores: "p1", "p3", "p5", "psp1", ..., each in [0, 1].
    """

    train_s: float
    scores: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run directory says.

    Attributes:
        path: the directory.
        label: the run's name in tables and pictures.
        strategy: "local", "horovod", ...
        slowdown: the emulated slowdowns in words, such as "1x, 2x"; "" where none were emulated.
        factors: the emulated slowdown of each rank where it is constant, else empty.
        rounds: the records of rounds.jsonl, in order.
        evaluations: in order of time, at least one.
        summary: the content of summary.json; empty for a run that has not ended.
    """

    path: Path
    label: str
    strategy: str
    slowdown: str
    factors: tuple[float, ...]
    rounds: list[dict[str, Any]]
    evaluations: list[Evaluation]
    summary: dict[str, Any]

    def best(self, metric: str) -> float:
        """Returns the highest value of a metric over all evaluations.

        Raises:
            ValueError: no evaluation has this metric.
        """
        values = [item.scores[metric] for item in self.evaluations if metric in item.scores]
        if not values:
            raise ValueError(f"{self.path}: no evaluation has the metric {metric!r}")
        return max(values)

    def seconds_to(self, target_p1: float) -> float | None:
        """Returns the training seconds at the first evaluation with P@1 >= target_p1, None if never."""
        return next((e.train_s for e in self.evaluations if e.scores["p1"] >= target_p1), None)


def read_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Reads run directories; runs of the same label get their directory's name added to it.

    Raises:
        ValueError: there are no directories, or one is not a readable run with at least one evaluation.
    """
    if not run_dirs:
        raise ValueError("run_dirs must name at least one run directory, got none")
    runs = [_read_run(Path(path)) for path in run_dirs]
    labels = [run.label for run in runs]
    return [
        replace(run, label=f"{run.label} ({run.path.name})") if labels.count(run.label) > 1 else run
        for run in runs
    ]


def find_target(runs: Sequence[Run]) -> tuple[float, Run] | None:
    """Returns the best P@1 of the first run of plain Horovod, and that run; None without such a run."""
    return next(((run.best("p1"), run) for run in runs if run.strategy == "horovod"), None)


def _read_run(path: Path) -> Run:
    config = _read_json(path / "config.json", required=True)
    summary = _read_json(path / "summary.json", required=False)
    rounds = _read_rounds(path / "rounds.jsonl")
    evaluations = [
        Evaluation(train_s=record["train_s"], scores=record["eval"])
        for record in rounds
        if record.get("eval") is not None
    ]
    # A run that evaluates only at its end may have that evaluation in the summary alone.
    if summary.get("final") and not (rounds and rounds[-1].get("eval")):
        evaluations.append(Evaluation(train_s=summary["train_s"], scores=summary["final"]))
    if not evaluations:
        raise ValueError(
            f"{path}: the run has no evaluation yet; let it run longer, or evaluate more often with "
            "--eval-rounds 1"
        )
    strategy = str(summary.get("strategy") or config.get("strategy") or "unknown")
    label = summary.get("label") or config.get("label") or config.get("name") or strategy
    slowdown = summary["slowdown"] if "slowdown" in summary else config.get("slowdown")
    factors = _constant_factors(slowdown)
    return Run(
        path=path,
        label=str(label),
        strategy=strategy,
        slowdown=", ".join(f"{f:g}x" for f in factors) or ("" if not slowdown else f"schedule {slowdown}"),
        factors=factors,
        rounds=rounds,
        evaluations=evaluations,
        summary=summary,
    )


def _constant_factors(slowdown: Any) -> tuple[float, ...]:
    """The factors of a slowdown given as [1, 2] or "1,2"; empty for none and for a schedule over time."""
    parts = slowdown.split(",") if isinstance(slowdown, str) else slowdown or []
    try:
        return tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        return ()


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a run directory?") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_rounds(path: Path) -> list[dict[str, Any]]:
    """One record a line; an unreadable last line is what a killed run leaves, and is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a run directory?") from None
    rounds = []
    for number, line in enumerate(lines, 1):
        try:
            rounds.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from None
    return rounds
