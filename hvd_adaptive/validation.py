"""Checks that every configuration dataclass passes; imports no MPI, and torch only for a compression that is not plain."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from typing import Any

# Finding them out takes a millisecond a class, and there are fifty fields.
_HINTS: dict[type, dict[str, Any]] = {}
# The codecs know which texts they can read, but load torch, which would hold up each start for seconds. These they can read.
_READABLE = re.compile(
    r"auto|none|fp16|bf16|normal:[1-4]|maxmin:[1-8](,(nearest|stochastic))?|topk:0?\.\d*[1-9]\d*|powersgd:[1-9]\d*"
)


def field_type(cls: type, name: str) -> type:
    """Returns the plain type of a field, with ``| None`` removed."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    hint = _HINTS[cls][name]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.cast(type, hint)


def type_words(kind: type) -> str:
    """Returns a type's name with its article."""
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


def parse_json(text: str | bytes) -> Any:
    """Reads JSON of unknown origin.

    Raises:
        ValueError: for anything else, for a name that comes twice, and for what is nested too deeply to be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return values


def option(default: Any, text: str, *choices: str, **needs: tuple[Any, ...]) -> Any:
    """An option; a value other than the default needs each option in ``needs`` to have one of the values there."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "needs": needs})


def check_types_and_choices(config: Any) -> None:
    """Raises ValueError for a field of the wrong type, a number that is not finite, or a value outside of its choices."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        kind = field_type(type(config), item.name)
        if value is None and item.default is None:
            continue
        fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            remedy = f': write "{value}"' if kind is str and type(value) in (int, float) else ""
            raise ValueError(f"{item.name} must be {type_words(kind)}, got {value!r}{remedy}")
        if kind is int and abs(value) >= 2**63:
            raise ValueError(f"{item.name} must be a number of 64 bits (below {2**63}), got {value}")
        if kind is float and not abs(value) < float("inf"):
            raise ValueError(f"{item.name} must be finite, got {value}")
        choices = item.metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{item.name} must be one of {', '.join(choices)}, got {value!r}")


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError if one of these fields is set and not > 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be > 0, got {value}")


def check_count(name: str, value: Any, *, least: int, unit: str) -> None:
    """Raises TypeError for a value that is no whole number, and ValueError for one below ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number of {unit}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least} {unit}, got {value}")


def check_not_negative(config: Any, *names: str) -> None:
    """Raises ValueError if one of these fields is < 0."""
    for name in names:
        if getattr(config, name) < 0:
            raise ValueError(f"{name} must be >= 0, got {getattr(config, name)}")


def check_ranges(config: Any) -> None:
    """Raises ValueError for a number of a :class:`hvd_adaptive.Config` outside its range."""
    check_positive(
        config, "batch_size", "min_batch_size", "max_batch_size", "mega_batch", "batch_size_step", "reference_batch_size",
        "outer_lr", "stall_limit_s", "drain_limit_s", "perturbation_threshold", "global_batch_size", "accumulation_steps",
        "micro_batch_size", "logical_ranks", "num_threads", "reference_ranks", "sma_alpha", "merge_fragments",
        "merges_per_round",
    )  # fmt: skip
    check_not_negative(config, "warmup_epochs", "lr_decay", "hash_interval", "seed", "auto_bits", "outlier_limit", "clip_delta")
    if config.sma_alpha is not None and config.sma_alpha > 1:
        raise ValueError(f"sma_alpha must be in (0, 1], got {config.sma_alpha}")
    if config.fragment_delay is not None and not 0 <= config.fragment_delay <= 1:
        raise ValueError(f"fragment_delay must be in [0, 1], got {config.fragment_delay}: it is a part of a round")
    if config.straggler_limit and config.straggler_limit <= 1:
        raise ValueError(f"straggler_limit must be > 1, or 0 for never, got {config.straggler_limit}")
    for name in ("outer_momentum", "perturbation_delta", "fragment_alpha"):
        if getattr(config, name) is not None and not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(config, name)}")
    if config.stall_limit_s < 1:
        raise ValueError(
            f"stall_limit_s must be >= 1, got {config.stall_limit_s}: a busy machine is quiet for shorter times"
        )
    if config.micro_batch_size is not None and config.micro_batch_size > config.batch_size:
        raise ValueError(
            f"micro_batch_size must be <= batch_size {config.batch_size}, got {config.micro_batch_size}: lower it, or raise "
            "batch_size"
        )
    low, high = config.batch_size_bounds
    if low > high:
        raise ValueError(f"min_batch_size must be <= max_batch_size, got {low} > {high}")
    if not low <= config.batch_size <= high:
        raise ValueError(
            f"batch_size must be within [min_batch_size, max_batch_size], got {config.batch_size} outside [{low}, {high}]"
        )
    if config.slowdown is not None:
        parse_slowdown(config.slowdown)
    if config.island is not None:
        parse_island(config.island)
    if not 0 < config.merge_share < 1:
        raise ValueError(f"merge_share must be in (0, 1), got {config.merge_share}")


def check_codecs(config: Any) -> None:
    """Raises ValueError for a ``compression`` that cannot be read, or whose bits ``auto_bits`` cannot choose."""
    if _READABLE.fullmatch(config.compression.strip()) and not config.auto_bits:
        return
    from hvd_adaptive.exchange.auto_bits import BitChooser
    from hvd_adaptive.exchange.compressed import check_compression

    policy = check_compression(config)
    if config.auto_bits:
        BitChooser(policy, config.auto_bits)


def parse_island(text: str) -> list[int]:
    """Returns the sizes behind ``island``: of all islands alike (one number), of each (several), or none for ``node``.

    Raises:
        ValueError: if the text is none of these.
    """
    if text == "node":
        return []
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ValueError(
            f"island must be 'node', a number of ranks as in 4, or one number for each island as in 1,3, got {text!r}"
        )
    return sizes


def parse_slowdown(text: str) -> list[tuple[float, tuple[float, ...]]]:
    """Returns the schedule behind ``slowdown``: (from this training second, one factor >= 1 a rank), by time.

    Raises:
        ValueError: if the text is not a list of factors or a schedule of such lists.
    """
    remedy = "write one factor >= 1 a rank, as in 4,4,2,1, or a schedule 0:4,4,2,1;30:1,2,4,4"
    schedule = []
    for part in text.split(";"):
        start, _, factors = part.rpartition(":")
        try:
            entry = (float(start) if start else 0.0, tuple(float(x) for x in factors.split(",")))
        except ValueError:
            raise ValueError(f"slowdown: {part!r} is not a list of numbers; {remedy}") from None
        if not all(1 <= x < float("inf") for x in entry[1]):
            raise ValueError(f"slowdown: factors must be finite and >= 1, got {factors!r}; {remedy}")
        schedule.append(entry)
    times = [start for start, _ in schedule]
    if times[0] != 0 or times != sorted(set(times)) or len({len(factors) for _, factors in schedule}) != 1:
        raise ValueError(
            f"slowdown: a schedule starts at 0, its times rise and every entry has as many factors, got {text!r}; {remedy}"
        )
    return schedule
