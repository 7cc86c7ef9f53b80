"""What ``hvd-adaptive calibrate`` writes: options, and measurements in the table ``calibration``; neither torch nor MPI here.

``docs/calibrate.md`` describes each entry.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hvd_adaptive.validation import parse_slowdown

FORMAT = 1
TABLE = "calibration"
# Bounds, recommended for strategy `local` alone: they would keep the shares of `sync` from what takes least time.
LOCAL_ONLY = ("min_batch_size", "max_batch_size")
# What is chosen by the predicted time, unless one of them is given by hand.
BY_CHOICE = frozenset({"strategy", "compression", "merge_fragments"})
# Strategies whose batches have bounds, and that take a step in micro-batches.
_BOUNDED = ("local", "sync")
# Memory is never used to its last byte: fragments, and batches heavier than the measured ones.
MEMORY_PART = 0.8
Table = TypeVar("Table")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCalibration:
    """One rank: a step alone on its host takes ``fixed_s + per_work_s * work`` seconds: of CPU time where torch computes with
    one thread on a CPU, else by the clock.

    Attributes:
        host: its host's name.
        device: "cpu", or the GPU's model.
        threads: that torch computes with.
        fixed_s: seconds of a step without work.
        per_work_s: seconds for each unit of work.
        fit_error: largest relative difference between that line and the measured steps.
        jitter: a step's standard deviation over its mean, at batch_size.
        alone: seconds of step and claim in a session of this rank alone, over what the line says.
        together: the same with all ranks at work (and over the slowdown's factor).
        slowdown: the factor that was emulated meanwhile, >= 1.
        memory: how ``largest_batch`` was found, or why not.
        largest_batch: samples that memory allows, None where no limit was found.
        batch_size: samples of the measured batches.
        step_work: their work.
        step_s: their seconds, medians.
    """

    host: str
    device: str
    threads: int
    fixed_s: float
    per_work_s: float
    fit_error: float
    jitter: float
    alone: float
    together: float
    slowdown: float
    memory: str
    largest_batch: int | None = None
    batch_size: list[int]
    step_work: list[float]
    step_s: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCalibration:
    """Horovod's allreduce of fp32 over all ranks: ``latency_s + per_byte_s * bytes`` seconds."""

    num_hosts: int
    latency_s: float
    per_byte_s: float
    fit_error: float
    bytes: list[int]
    seconds: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeCalibration:
    """The ends of real rounds; lists have one entry for each measured mega-batch, medians over its rounds.

    Attributes:
        mega_batch: samples of a round over all ranks as asked for; an epoch is cut evenly, so real rounds have more or fewer.
        payload_bytes: that a rank sends in a merge.
        merge_s: delta, exchange and outer step; of the slowest rank.
        control_s: statistics, weights, next batch sizes; of the slowest rank.
        wait_s: waiting for the last rank at the end of a round; mean over ranks.
        round_s: the whole round.
        local_s: what of merge_s is not exchange, median.
    """

    mega_batch: list[int]
    payload_bytes: list[int]
    merge_s: list[float]
    control_s: list[float]
    wait_s: list[float]
    round_s: list[float]
    local_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SynchronousCalibration:
    """Steps that all ranks make together; lists have one entry a rank.

    Attributes:
        step_s: seconds of a rank's own step, waiting apart, mean.
        lengthened: the same over what its line and slowdown say.
        exchange_s: seconds of a step that the slowest rank waits for the exchange of gradients, mean.
    """

    step_s: list[float]
    lengthened: list[float]
    exchange_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A way to train, and its speed.

    Attributes:
        strategy: as for :class:`hvd_adaptive.Config`.
        compression: likewise.
        merge_fragments: likewise.
        micro_batch_size: likewise.
        mega_batch: samples of a round; 0 in files of older versions.
        samples_per_s: over all ranks, evaluation excluded.
        source: "measured" of real rounds, or "computed" from other ones and the link.
    """

    strategy: str = "local"
    compression: str = "none"
    merge_fragments: int = 1
    micro_batch_size: int | None = None
    mega_batch: int = 0
    samples_per_s: float
    source: str = "measured"

    def is_way_of(self, config: Any) -> bool:
        """Returns whether a run with a :class:`hvd_adaptive.Config` trains in this way."""
        names = ["strategy", "compression", "merge_fragments", "micro_batch_size"]
        # Of steps that all ranks make together a round's length changes nothing.
        names += ["mega_batch"] if self.strategy == "local" else []
        return all(getattr(self, name) == getattr(config, name) for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The table ``calibration``.

    Attributes:
        format: of the table, 1.
        created: date and time, ISO 8601.
        num_samples: of the training data.
        work: "samples" or "nonzeros", the unit of work.
        work_per_sample: mean over the data.
        model_bytes: trainable parameters and float buffers, as a merge of all rows sends them.
        claim_s: one claim at the shared cursor, median over ranks.
        claim_p99_s: the slowest hundredth, of the slowest rank.
        versions: of the software.
        ranks: in rank order.
        link: between them.
        merge: at the end of a round.
        sync: with shares by speed.
        horovod: with equal batches, plain Horovod.
        predicted: the choice that ``train`` takes, with the options at the file's top.
        choices: the ways to train that were compared; none in files of older versions.
        bounds: those of ``LOCAL_ONLY`` that were given and not recommended, so that ``sync`` keeps to them too.
    """

    format: int
    created: str
    num_samples: int
    work: str
    work_per_sample: float
    model_bytes: int
    claim_s: float
    claim_p99_s: float
    versions: dict[str, str]
    ranks: list[RankCalibration]
    link: LinkCalibration
    merge: MergeCalibration
    sync: SynchronousCalibration
    horovod: SynchronousCalibration
    predicted: Choice
    choices: list[Choice] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)


def read_table(values: Any, where: str) -> Calibration:
    """Checks a table ``calibration`` and returns it.

    Args:
        values: as TOML or JSON gave it.
        where: the file, for messages.

    Raises:
        ValueError: naming the entry, what it must be and what it is.
    """
    name = f"{where}: {TABLE}"
    if isinstance(values, dict) and values.get("format") != FORMAT:
        raise ValueError(
            f"{name}.format must be {FORMAT}, got {values.get('format')!r}: write the file again with this version's calibrate"
        )
    found = _build(Calibration, values, name)
    if not found.ranks:
        raise ValueError(f"{name}.ranks must have at least one rank")
    for rank, one in enumerate(found.ranks):
        if not len(one.batch_size) == len(one.step_work) == len(one.step_s) > 0:
            raise ValueError(f"{name}.ranks[{rank}]: batch_size, step_work and step_s must have one entry a measured size")
        _check_positive(one, f"{name}.ranks[{rank}]", "per_work_s", "together", "slowdown")
    _check_positive(found, name, "num_samples", "work_per_sample", "model_bytes")
    _check_positive(found.link, f"{name}.link", "num_hosts")
    return found


def _check_positive(table: Any, name: str, *entries: str) -> None:
    """Raises ValueError for an entry of 0, by which speeds or sizes would be divided."""
    for entry in entries:
        if (value := getattr(table, entry)) <= 0:
            raise ValueError(f"{name}.{entry} must be > 0, got {value}")


def _build(cls: type[Table], values: Any, name: str) -> Table:
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be a table, got {values!r}")
    hints = typing.get_type_hints(cls)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ValueError(f"{name}.{unknown[0]} is unknown; known are {', '.join(hints)}")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    needed = [one.name for one in fields if one.default is MISSING and one.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{name}.{missing[0]} is missing")
    return cls(**{key: _convert(hints[key], value, f"{name}.{key}") for key, value in values.items()})


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, name)  # type: ignore[arg-type]
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {value!r}")
        return [_convert(arguments[0], one, f"{name}[{index}]") for index, one in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            raise ValueError(f"{name} must be a table of texts, got {value!r}")
        return value
    kind = arguments[0] if arguments else hint
    if value is None and arguments:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, str) if kind is str else number and (kind is float or isinstance(value, int))
    if not fits or (number and not (math.isfinite(value) and value >= 0)):
        what = {str: "a text", int: "a whole number >= 0", float: "a number >= 0"}[kind]
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return float(value) if kind is float else value


def chosen_options(calibration: Calibration, given: Collection[str]) -> dict[str, Any]:
    """Returns the strategy, the compression and the fragments that were recommended, or none of them where one is given by hand.

    Args:
        calibration: of a file.
        given: names of options from everywhere.
    """
    best = calibration.predicted
    if not BY_CHOICE.isdisjoint(given):
        return {}
    fragments = {"merge_fragments": best.merge_fragments} if best.merge_fragments > 1 else {}
    return {"strategy": best.strategy, "compression": best.compression, **fragments}


def options_of(
    values: Mapping[str, Any], calibration: Calibration, *, strategy: str, for_script: bool = False
) -> dict[str, Any]:
    """Returns the options of a calibration's file that are meant for a strategy; of bounds on the batch size, for ``sync``,
    those that were given and the one that every rank's memory sets.

    Args:
        values: the options in the file.
        calibration: the rest of it.
        strategy: of :class:`hvd_adaptive.Config`.
        for_script: a script is to be run, whose forwards micro-batches need not make smaller.
    """
    largest = [rank.largest_batch for rank in calibration.ranks if rank.largest_batch is not None]
    by_memory = {"max_batch_size": max(1, int(MEMORY_PART * min(largest)))} if largest else {}
    given = {name: values[name] for name in calibration.bounds if name in values}
    if largest and "max_batch_size" in given:
        by_memory["max_batch_size"] = min(given["max_batch_size"], by_memory["max_batch_size"])
    without = {name: value for name, value in values.items() if name != "micro_batch_size"}
    if for_script and largest and len(without) < len(values):
        return {**without, **by_memory}
    if strategy == "local":
        return dict(values)
    kept = {name: value for name, value in values.items() if name not in LOCAL_ONLY}
    if strategy not in _BOUNDED:
        return {name: value for name, value in kept.items() if name != "micro_batch_size"}
    # Micro-batches fit into memory, as many as you like.
    return {**kept, **given} if kept.get("micro_batch_size") is not None else {**kept, **given, **by_memory}


def differences(
    values: Mapping[str, Any], calibration: Calibration, config: Any, num_samples: int, model_bytes: int
) -> list[tuple[str, str]]:
    """Returns what a run has otherwise than the ranks that were measured, as pairs of (then, now) in words.

    Args:
        values: the options in the file.
        calibration: the rest of it.
        config: the run's :class:`hvd_adaptive.Config`, for as many ranks.
        num_samples: of the training data.
        model_bytes: of the model's trainable parameters.
    """
    options = options_of(values, calibration, strategy=config.strategy)
    names = [name for name in ("batch_size", *LOCAL_ONLY) if name != "batch_size" or name in options]
    pairs = [(f"{name} {options.get(name, 'open')}", f"{name} {getattr(config, name) or 'open'}") for name in names]
    entries = parse_slowdown(config.slowdown) if config.slowdown else [(0.0, [1.0] * len(calibration.ranks))]
    then, now = (",".join(f"{factor:g}" for factor in one) for one in ([r.slowdown for r in calibration.ranks], entries[0][1]))
    pairs.append((f"slowdown {then}", f"slowdown {now if len(entries) == 1 else config.slowdown}"))
    pairs.append((f"{calibration.num_samples:,} samples", f"{num_samples:,} samples"))
    pairs.append((f"a model of {calibration.model_bytes / 1e6:.3g} MB", f"a model of {model_bytes / 1e6:.3g} MB"))
    return [(then, now) for then, now in pairs if then != now]


def write_file(path: Path, options: Mapping[str, Any], calibration: Calibration, *, comment: str) -> None:
    """Writes options and calibration as TOML, or as JSON where the name ends in .json.

    Args:
        path: the file.
        options: names and values for the top; those that are None are left out.
        calibration: what was measured.
        comment: TOML's first line.

    Raises:
        OSError: if it cannot be written.
    """
    table = {key: value for key, value in options.items() if value is not None}
    whole = {**table, TABLE: dataclasses.asdict(calibration)}
    text = json.dumps(whole, indent=1) + "\n" if path.suffix == ".json" else f"# {comment}\n{to_toml(whole)}"
    path.write_text(text, encoding="utf-8")


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """Returns a table of texts, numbers, lists, tables and lists of tables as TOML; values that are None are left out."""
    lines, tables = [], []
    for key, value in table.items():
        inner = f"{name}.{key}" if name else key
        if isinstance(value, Mapping):
            tables.append(f"\n[{inner}]\n{to_toml(value, inner)}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables += [f"\n[[{inner}]]\n{to_toml(one, inner)}" for one in value]
        elif value is not None:
            lines.append(f"{key} = {_toml_value(value)}\n")
    return "".join([*lines, *tables])


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON's texts, whole numbers, booleans and finite floats are TOML's, but for one character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
