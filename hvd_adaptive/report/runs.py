"""Reading a run directory: config.json, rounds.jsonl and, once the run has ended, summary.json."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adaptive.validation import parse_json

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation of a run.

    Attributes:
        train_s: seconds of training before it, evaluations excluded.
        samples: samples consumed before it.
        epoch: passes over the data before it; NaN: not known.
        scores: "p1", "p3", "p5", "psp1", ..., each in [0, 1].
        comparable: False for scores of more test samples than those before it, by which the best model was chosen.
    """

    train_s: float
    samples: float
    scores: dict[str, float]
    epoch: float = math.nan
    comparable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run directory says.

    Attributes:
        path: the directory.
        label: the run's name in tables and pictures, printable characters only; text of a user, to be escaped.
        strategy: "local", "horovod", ...
        slowdown: the emulated slowdowns in words, such as "1x, 2x"; "" where none were emulated.
        factors: the emulated slowdown of each rank where it is constant, else empty.
        rounds: the records of rounds.jsonl, in order.
        evaluations: in order of time; empty before the first.
        config: the content of config.json.
        summary: the content of summary.json; empty for a run that has not ended.
        written_at: when rounds.jsonl was last written, seconds since 1970.
    """

    path: Path
    label: str
    strategy: str
    slowdown: str
    factors: tuple[float, ...]
    rounds: list[dict[str, Any]]
    evaluations: list[Evaluation]
    config: dict[str, Any]
    summary: dict[str, Any]
    written_at: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the run has ended by itself; of one's own loop nobody says."""
        return bool(self.summary) or bool(self.config.get("own_loop"))

    @property
    def train_s(self) -> float:
        """Seconds of training so far, evaluations excluded."""
        return float(self.rounds[-1]["train_s"] if self.rounds else self.summary.get("train_s", 0.0))

    @property
    def num_samples(self) -> float:
        """Samples consumed so far."""
        return float(self.rounds[-1]["samples"] if self.rounds else self.summary.get("samples", 0))

    @property
    def num_ranks(self) -> int:
        """Ranks of the last round; a resume may have changed their number."""
        return _num_ranks(self.rounds[-1]) if self.rounds else int(self.summary.get("world_size", 1))

    def column(self, name: str) -> Array:
        """Returns a number of every round, shape (num_rounds,); NaN where a round does not have it."""
        return np.array([_number(record.get(name)) for record in self.rounds])

    def by_rank(self, name: str) -> Array | None:
        """Returns a number of every round and rank.

        Returns:
            Shape (num_rounds, largest number of ranks), NaN for a rank that was not there; None if no round has it.
        """
        lists = [record["ranks"].get(name) for record in self.rounds]
        if not any(lists):
            return None
        values = np.full((len(lists), max(map(_num_ranks, self.rounds))), np.nan)
        for row, numbers in zip(values, lists, strict=True):
            if numbers:
                row[: len(numbers)] = [_number(number) for number in numbers]
        return values

    @property
    def best_evaluation(self) -> Evaluation | None:
        """The first evaluation with the highest P@1, that of the best model; None before any."""
        return max((item for item in self.evaluations if item.comparable), key=lambda item: item.scores["p1"], default=None)

    def best(self, metric: str) -> float | None:
        """Returns a metric of the best model, None where it was not evaluated."""
        found = self.best_evaluation
        return None if found is None else found.scores.get(metric)

    def is_scored_like(self, other: Run) -> bool:
        """Whether both were scored on the same test samples, or one of the runs does not say on which."""
        own, others = self.summary.get("scored"), other.summary.get("scored")
        return own is None or others is None or own == others

    def seconds_to(self, target_p1: float) -> float | None:
        """Returns the training seconds at the first evaluation with P@1 >= target_p1, None if never."""
        return next((e.train_s for e in self.evaluations if e.comparable and e.scores["p1"] >= target_p1), None)


def read_runs(run_dirs: Sequence[Path], *, leave_out: Callable[[str], None] | None = None) -> list[Run]:
    """Reads run directories, of runs that still go on too; runs of the same label get their directory's name added to it.

    Args:
        run_dirs: a folder that is no run stands for the runs in it.
        leave_out: is told why one cannot be read, where another one can; None: that raises.

    Raises:
        ValueError: there are no directories, or one is not a readable run with at least one finished round.
    """
    if not run_dirs:
        raise ValueError("run_dirs must name at least one run directory, got none")
    runs, errors = list[Run](), list[ValueError]()
    for path in itertools.chain.from_iterable(map(_with_inner_runs, run_dirs)):
        try:
            runs.append(_read_run(path))
        except ValueError as error:
            errors.append(error)
    if errors and (leave_out is None or not runs):
        raise errors[0]
    for why in errors:
        assert leave_out is not None
        leave_out(str(why))
    for distinguish in (lambda run: run.path.resolve().name, lambda run: str(run.path)):
        labels = [run.label for run in runs]
        runs = [
            replace(run, label=f"{run.label} ({printable(distinguish(run))})") if labels.count(run.label) > 1 else run
            for run in runs
        ]
    return runs


def find_target(runs: Sequence[Run]) -> tuple[float, Run] | None:
    """Returns the best P@1 of the first evaluated run of plain Horovod, and that run; None without such a run."""
    for run in runs:
        best = run.best("p1")
        if run.strategy == "horovod" and best is not None:
            return best, run
    return None


def printable(text: str) -> str:
    """Returns the text with what no document may hold (control characters, lone surrogates) replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _with_inner_runs(path: Path) -> list[Path]:
    """Returns a run directory itself, or the runs in a folder, as a demo's."""
    files = ("config.json", "rounds.jsonl")
    with contextlib.suppress(OSError):
        if not any((path / name).exists() for name in files):
            return sorted({file.parent for name in files for file in path.glob(f"*/{name}")}) or [path]
    return [path]


def _read_run(path: Path) -> Run:
    try:
        if not path.is_dir():
            raise ValueError(f"{path} is {'no directory' if path.exists() else 'not there'}: name a run directory")
    except OSError as failure:
        raise ValueError(f"{path} cannot be read: {failure}") from None
    try:
        return _parse_run(path)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: its files are not those of a run: {error!r}") from None


def _parse_run(path: Path) -> Run:
    config = _read_json(path / "config.json", required=True)
    summary = _read_json(path / "summary.json", required=False)
    for name in ("utilisation", "wait_share", "samples_per_s", "predicted_samples_per_s"):
        if not isinstance(summary.get(name), (int, float, type(None))):
            raise ValueError(f"{path / 'summary.json'}: {name} must be a number, got {summary[name]!r}")
    rounds = _read_rounds(path / "rounds.jsonl")
    if not rounds and not summary.get("final"):
        raise ValueError(f"{path}: no round of the run is finished yet; let it run longer")
    evaluations = [
        Evaluation(
            train_s=record["train_s"], samples=record["samples"], scores=record["eval"], epoch=_number(record.get("epoch"))
        )
        for record in rounds
        if record.get("eval") is not None
    ]
    # The last model's may be in the summary alone: with --eval-samples, after merges beside steps, where no round was evaluated.
    if summary.get("final") and not (rounds and rounds[-1].get("eval") == summary["final"]):
        _check_scores(summary["final"], f"{path / 'summary.json'}: final")
        last = rounds[-1] if rounds else {"train_s": 0.0, "samples": 0}
        evaluations.append(
            Evaluation(
                train_s=summary.get("train_s", last["train_s"]),
                samples=summary.get("samples", last["samples"]),
                scores=summary["final"],
                epoch=_number(summary.get("epochs")),
                comparable=not (evaluations and config.get("eval_samples")),
            )
        )
    strategy = str(summary.get("strategy") or config.get("strategy") or "unknown")
    label = summary.get("label") or config.get("label") or config.get("name") or strategy
    slowdown = summary["slowdown"] if "slowdown" in summary else config.get("slowdown")
    factors = _constant_factors(slowdown)
    return Run(
        path=path,
        label=printable(str(label)),
        strategy=printable(strategy),
        slowdown=", ".join(f"{f:g}x" for f in factors) or ("" if not slowdown else f"schedule {printable(str(slowdown))}"),
        factors=factors,
        rounds=rounds,
        evaluations=evaluations,
        config=config,
        summary=summary,
        written_at=(path / "rounds.jsonl").stat().st_mtime,
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
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a run directory?") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read_rounds(path: Path) -> list[dict[str, Any]]:
    """One record a line; an unreadable last line is what a killed run leaves, or one that is being written: it is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: is {path.parent} a run directory?") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    rounds = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from None
        else:
            _check_record(record, f"{path}, line {number}")
            rounds.append(record)
    return rounds


def _check_record(record: Any, where: str) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must hold a JSON object, got {type(record).__name__}")
    for name in ("round", "train_s", "samples"):
        if not math.isfinite(_number(record.get(name))):
            raise ValueError(f"{where}: {name} must be a finite number, got {record.get(name)!r}")
    ranks = record.get("ranks")
    if not isinstance(ranks, dict) or not ranks or not all(isinstance(values, list) and values for values in ranks.values()):
        raise ValueError(f"{where}: ranks must hold one list of numbers a statistic, got {ranks!r}")
    if len({len(values) for values in ranks.values()}) > 1:
        raise ValueError(f"{where}: the lists of ranks must be equally long, one number a rank")
    if record.get("eval") is not None:
        _check_scores(record["eval"], f"{where}: eval")


def _check_scores(scores: Any, where: str) -> None:
    if not isinstance(scores, dict) or "p1" not in scores or any(math.isnan(_number(v)) for v in scores.values()):
        raise ValueError(f"{where} must hold numbers by metric, p1 among them, got {scores!r}")


def _num_ranks(record: dict[str, Any]) -> int:
    return len(next(iter(record["ranks"].values())))


def _number(value: Any) -> float:
    """The value as a float; NaN for what is no number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
