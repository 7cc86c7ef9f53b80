"""Configuration: one frozen dataclass a concern, validated on construction. Imports neither torch nor MPI."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "HVD_ADAPTIVE_"


def _option(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How ranks share the work and merge their models: all that :class:`hvd_adaptive.Session` needs.

    Every field is an option of ``hvd-adaptive train``, whose help describes it; ``metadata["help"]`` holds that text.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
    """

    strategy: str = _option(
        "local",
        "local: ranks train by themselves and merge models every mega-batch (Adaptive SGD); "
        "horovod: plain DistributedOptimizer with equal batches, the baseline; "
        "sma: CROSSBOW's synchronous model averaging with equal batches, a baseline",
        "local",
        "horovod",
        "sma",
    )
    batch_size: int = _option(64, "samples in a rank's batch at the start")
    min_batch_size: int | None = _option(
        None, "lower bound of a rank's batch size (default: batch_size / 8, as in the paper)"
    )
    max_batch_size: int | None = _option(
        None, "upper bound of a rank's batch size (default: batch_size, as in the paper)"
    )
    mega_batch: int | None = _option(
        None, "samples between two merges, over all ranks (default: 100 x batch_size)"
    )
    batch_size_rule: str = _option(
        "fixed", "how batch sizes follow the ranks' speeds", "fixed", "paper", "heterogpu"
    )
    batch_size_step: float | None = _option(
        None,
        "samples a batch size moves: beta of 'paper' (default: min_batch_size / 2), the step of 'heterogpu' (default: 32)",
    )
    lr_rule: str = _option(
        "linear", "how the learning rate follows the actual batch size", "linear", "sqrt", "none"
    )
    reference_batch_size: int | None = _option(
        None, "batch size at which the optimizer's own learning rate holds (default: batch_size)"
    )
    warmup_epochs: float = _option(
        0.0, "epochs with the smallest batch size and a linear ramp of the learning rate"
    )
    lr_decay: float = _option(0.0, "learning rate is divided by 1 + lr_decay x (epoch - warmup_epochs)")
    work: str = _option(
        "samples",
        "what a batch size and the cursor count; with nonzeros a batch of heavy rows is a smaller batch",
        "samples",
        "nonzeros",
    )
    merge_weights: str = _option(
        "updates",
        "what each rank's delta counts in a merge",
        "paper",
        "heterogpu",
        "uniform",
        "updates",
        "samples",
        "fednova",
    )
    perturbation: bool = _option(
        False, "the paper's perturbation of the merge weights ('paper' and 'heterogpu')"
    )
    perturbation_threshold: float = _option(0.1, "L2 norm per parameter under which the perturbation acts")
    perturbation_delta: float = _option(0.1, "size of the perturbation")
    outer_step: str = _option(
        "nesterov",
        "how the merged delta moves the model; momentum is the paper's, nesterov DiLoCo's",
        "none",
        "momentum",
        "nesterov",
    )
    outer_lr: float | None = _option(
        None, "learning rate of the outer step (default: 0.7 for nesterov, else 1)"
    )
    outer_momentum: float = _option(0.9, "gamma of the outer step")
    optimizer_state: str = _option(
        "keep", "a rank's optimizer state after a merge", "keep", "reset", "average"
    )
    hash_interval: int = _option(10, "rounds between checks that all ranks hold the same model; 0: never")
    seed: int = _option(0, "seed of the shuffling and of the model's initial weights")
    stall_limit_s: float = _option(60.0, "seconds after which a dead, frozen or stuck rank ends the job")
    slowdown: str | None = _option(
        None,
        "emulate unequal ranks: stretch each rank's compute by a factor, 4,4,2,1; as a schedule over training seconds: "
        "0:4,4,2,1;30:1,2,4,4",
    )
    sparse_merge: str = _option(
        "auto",
        "merge only those rows of parameters with sparse gradients that some rank touched; auto: where that takes less time",
        *("auto", "always", "never"),
    )
    row_weights: bool = _option(False, "average rows of such parameters only over the ranks that touched them")
    sma_alpha: float | None = _option(None, "how far 'sma' pulls replicas, in (0, 1] (default: 1 / ranks, as in the paper)")
    overlap_merge: bool = _option(
        False, "exchange a round's deltas beside the next round's steps; the merged model is one round behind"
    )

    def __post_init__(self) -> None:
        _check_types_and_choices(self)
        _check_positive(
            self,
            "batch_size",
            "min_batch_size",
            "max_batch_size",
            "mega_batch",
            "batch_size_step",
            "reference_batch_size",
            "outer_lr",
            "stall_limit_s",
            "perturbation_threshold",
            "sma_alpha",
        )
        if self.sma_alpha is not None and self.sma_alpha > 1:
            raise ValueError(f"sma_alpha must be in (0, 1], got {self.sma_alpha}")
        if self.overlap_merge and (self.row_weights or self.sparse_merge == "always"):
            raise ValueError("overlap_merge exchanges all rows: it needs row_weights false and sparse_merge 'auto' or 'never'")
        _check_not_negative(self, "warmup_epochs", "lr_decay", "hash_interval", "seed")
        for name in ("outer_momentum", "perturbation_delta"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.stall_limit_s < 1:
            raise ValueError(
                f"stall_limit_s must be >= 1, got {self.stall_limit_s}: a busy machine is quiet for shorter times"
            )
        low, high = self.batch_size_bounds
        if low > high:
            raise ValueError(f"min_batch_size must be <= max_batch_size, got {low} > {high}")
        if not low <= self.batch_size <= high:
            raise ValueError(
                f"batch_size must be within [min_batch_size, max_batch_size], got {self.batch_size} outside [{low}, {high}]"
            )
        if self.perturbation and self.merge_weights not in ("paper", "heterogpu"):
            raise ValueError(
                f"perturbation needs merge_weights 'paper' or 'heterogpu', got {self.merge_weights!r}"
            )
        if self.slowdown is not None:
            parse_slowdown(self.slowdown)

    @property
    def batch_size_bounds(self) -> tuple[int, int]:
        """Smallest and largest batch size, samples."""
        low = self.min_batch_size if self.min_batch_size is not None else max(1, self.batch_size // 8)
        high = self.max_batch_size if self.max_batch_size is not None else max(self.batch_size, low)
        return low, high

    @property
    def mega_batch_samples(self) -> int:
        """Samples between two merges over all ranks."""
        return self.mega_batch if self.mega_batch is not None else 100 * self.batch_size

    @property
    def batch_size_step_samples(self) -> float:
        """Samples a batch size moves by."""
        if self.batch_size_step is not None:
            return self.batch_size_step
        return 32.0 if self.batch_size_rule == "heterogpu" else self.batch_size_bounds[0] / 2

    @property
    def outer_learning_rate(self) -> float:
        """Learning rate of the outer step."""
        if self.outer_lr is not None:
            return self.outer_lr
        return 0.7 if self.outer_step == "nesterov" else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """What ``hvd-adaptive train`` trains, on which data, for how long. Fields are options, as in :class:`Config`.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
    """

    data: str | None = _option(
        None,
        "training data in the XMC format: a directory, PREFIX (of PREFIX_train.txt[.gz]) or a file; default: the embedded set",
    )
    test_data: str | None = _option(None, "test data, where --data names one file")
    cache_dir: str | None = _option(None, "folder of the binary cache (default: the user's cache folder)")
    out: str | None = _option(None, "run directory (default: runs/NAME-DATE)")
    name: str | None = _option(None, "label of the run in tables and pictures (default: the strategy)")
    epochs: float | None = _option(
        None, "stop after this many passes over the data (default: 5, unless another limit is given)"
    )
    time_limit: float | None = _option(None, "stop after this many seconds of training, evaluation excluded")
    target_p1: float | None = _option(None, "stop when P@1 on the test data reaches this, in (0, 1]")
    hidden_size: int = _option(128, "width of the hidden layer")
    input_gradients: str = _option("sparse", "gradients of the input layer", "sparse", "dense")
    optimizer: str = _option("sgd", "the local optimizer", "sgd", "adagrad")
    lr: float = _option(1.0, "learning rate of the optimizer at the reference batch size")
    momentum: float = _option(0.0, "momentum of sgd; needs --input-gradients dense")
    weight_decay: float = _option(0.0, "weight decay; needs --input-gradients dense")
    device: str = _option("auto", "auto, cpu, cuda or cuda:K")
    eval_rounds: int = _option(1, "rounds between evaluations; 0: only at the end")
    eval_samples: int | None = _option(
        None, "test samples of the evaluations on the way, the same ones each time (default: all)"
    )
    calibration: bool = _option(True, "measure each rank's own speed before the run, for the utilisation")

    def __post_init__(self) -> None:
        _check_types_and_choices(self)
        _check_positive(self, "epochs", "time_limit", "hidden_size", "lr", "eval_samples")
        _check_not_negative(self, "momentum", "weight_decay", "eval_rounds")
        if self.target_p1 is not None and not 0 < self.target_p1 <= 1:
            raise ValueError(f"target_p1 must be in (0, 1], got {self.target_p1}")
        if self.test_data is not None and self.data is None:
            raise ValueError("test_data needs data: name the training file with --data")
        if self.input_gradients == "sparse" and (self.momentum or self.weight_decay):
            raise ValueError(
                "momentum and weight_decay need input_gradients 'dense': torch has no sparse form of them"
            )
        if self.target_p1 is not None and self.eval_rounds == 0:
            raise ValueError("target_p1 needs evaluations on the way: set eval_rounds to 1 or more")

    @property
    def max_epochs(self) -> float | None:
        """Passes over the data after which the run stops, None for no such limit."""
        if self.epochs is None and self.time_limit is None and self.target_p1 is None:
            return 5.0
        return self.epochs


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


ConfigClass = typing.TypeVar("ConfigClass", Config, TrainConfig)


def field_type(cls: type, name: str) -> type:
    """Returns the plain type of a field, with ``| None`` removed."""
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.cast(type, hint)


def read_config_file(path: str) -> dict[str, Any]:
    """Reads a .toml or .json file of option names and values; a run directory's config.json is one.

    Raises:
        ValueError: if it cannot be read or parsed, or is not a table of names.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--config {path}: not valid {file.suffix.lstrip('.') or 'JSON'}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"--config {path}: must hold a table of option names and values, got {type(values).__name__}"
        )
    return {name.replace("-", "_"): value for name, value in values.items()}


def read_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the options that HVD_ADAPTIVE_* variables set, converted to their types.

    Raises:
        ValueError: for a variable that names no option, or a value of the wrong type.
    """
    values = {}
    for key, text in environment.items():
        if key.startswith(ENVIRONMENT_PREFIX):
            name = key[len(ENVIRONMENT_PREFIX) :].lower()
            cls = next((c for c in (Config, TrainConfig) if name in c.__dataclass_fields__), None)
            if cls is None:
                raise ValueError(f"environment variable {key}: {unknown_name(name)}")
            values[name] = parse_value(cls, name, text)
    return values


def parse_value(cls: type, name: str, text: str) -> Any:
    """Converts an option's text to its type.

    Raises:
        ValueError: naming the option, if the text does not fit.
    """
    kind = field_type(cls, name)
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"{name} must be true or false, got {text!r}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be a {kind.__name__}, got {text!r}") from None


def unknown_name(name: str) -> str:
    """Returns the message for a name that is no option, with the nearest ones."""
    known = [*Config.__dataclass_fields__, *TrainConfig.__dataclass_fields__]
    near = difflib.get_close_matches(name, known, n=2)
    return f"unknown option {name!r}" + (
        f"; did you mean {' or '.join(near)}?" if near else f"; options are {', '.join(known)}"
    )


def build_configs(*sources: Mapping[str, Any]) -> tuple[Config, TrainConfig]:
    """Builds both configurations from mappings of option names to values; later sources win.

    Raises:
        ValueError: for an unknown name, or a value that its field refuses.
    """
    merged: dict[str, Any] = {}
    for source in sources:
        merged.update(source)
    for name in merged:
        if name not in Config.__dataclass_fields__ and name not in TrainConfig.__dataclass_fields__:
            raise ValueError(unknown_name(name))
    return (
        Config(**{k: v for k, v in merged.items() if k in Config.__dataclass_fields__}),
        TrainConfig(**{k: v for k, v in merged.items() if k in TrainConfig.__dataclass_fields__}),
    )


def _check_types_and_choices(config: Config | TrainConfig) -> None:
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        kind = field_type(type(config), item.name)
        if value is None and item.default is None:
            continue
        fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{item.name} must be a {kind.__name__}, got {value!r}")
        if kind is float and not abs(value) < float("inf"):
            raise ValueError(f"{item.name} must be finite, got {value}")
        choices = item.metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{item.name} must be one of {', '.join(choices)}, got {value!r}")


def _check_positive(config: Config | TrainConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be > 0, got {value}")


def _check_not_negative(config: Config | TrainConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 0:
            raise ValueError(f"{name} must be >= 0, got {getattr(config, name)}")
