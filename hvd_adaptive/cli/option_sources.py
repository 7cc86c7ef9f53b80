"""Where options come from: files, HVD_ADAPTIVE_* variables (read nowhere else) and text, on their way to a configuration."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_adaptive.calibrate.file import (
    TABLE,
    Calibration,
    chosen_options,
    differences,
    options_of,
    read_table,
)
from hvd_adaptive.cli.fields import fields_of
from hvd_adaptive.config import GONE_OPTIONS, Config
from hvd_adaptive.validation import field_type, parse_json, type_words
from hvd_adaptive.xmc.train_config import TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "HVD_ADAPTIVE_"
# No option: what `run --elastic` tells the script, and whatever that starts.
LAUNCH_VARIABLE = "HVD_ADAPTIVE_LAUNCH"
_PATHS = ("data", "test_data", "cache_dir", "out", "resume", "replay")


def read_config_file(path: str, *, measurements: bool = False, option: str = "--config") -> dict[str, Any]:
    """Reads a .toml or .json file of option names and values; a run directory's config.json is one, and so is what
    ``calibrate`` writes, whose measurements are checked and left out.

    Args:
        path: the file.
        measurements: leave the measurements in, unchecked.
        option: that named the file.

    Raises:
        ValueError: if it cannot be read or parsed, is not a table of names, or its measurements are not whole.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        values = tomllib.loads(text) if file.suffix == ".toml" else parse_json(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {path}: cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{option} {path}: not valid {file.suffix.lstrip('.') or 'JSON'}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{option} {path}: must hold a table of option names and values, got {type(values).__name__}"
        )
    if not measurements:
        _take_measurements(values, path)
    values = {name.replace("-", "_"): value for name, value in values.items()}
    return {name: value for name, value in values.items() if (name, value) not in GONE_OPTIONS}


def _take_measurements(values: dict[str, Any], path: str) -> Calibration | None:
    # A run's own configuration has an option of that name, which is true or false.
    if isinstance(values.get(TABLE, False), bool):
        return None
    return read_table(values.pop(TABLE), f"--config {path}")


def with_config_file(
    path: str | None,
    given: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    takes_choice: bool = False,
    for_script: bool = False,
) -> dict[str, Any]:
    """Returns the options of a file and those given, which win; those of the environment, last of all, are another source.

    Of what ``calibrate`` wrote, recommendations for strategy ``local`` are left out where another is chosen
    (:func:`hvd_adaptive.calibrate.file.options_of`).

    Args:
        path: the file, if there is one.
        given: options of the command line.
        environment: options of variables.
        takes_choice: take the strategy, compression and fragments that ``calibrate`` recommends for its own model.
        for_script: as for :func:`hvd_adaptive.calibrate.file.options_of`.

    Raises:
        ValueError: as :func:`read_config_file`.
    """
    if not path:
        return dict(given)
    values = read_config_file(path, measurements=True)
    calibration = _take_measurements(values, path)
    if calibration is not None:
        if takes_choice:
            values = {**chosen_options(calibration, {*environment, *values, *given}), **values}
        strategy = {"strategy": Config().strategy, **environment, **values, **given}["strategy"]
        values = options_of(values, calibration, strategy=strategy, for_script=for_script)
    return merge_sources(values, given)


def predicted_speed(
    path: str | None, config: Config, *, world_size: int, num_samples: int, model_bytes: int
) -> float | None:
    """Returns the samples a second that ``calibrate`` predicted for a run, None for a way to train that it has not measured. For
    other data, another model, other batches or speeds than were measured there is no prediction either, and rank 0 says so.

    Args:
        path: the file of options, if there is one.
        config: the run's.
        world_size: number of ranks.
        num_samples: of the training data.
        model_bytes: of its trainable parameters.
    """
    values = read_config_file(path, measurements=True) if path else {}
    calibration = _take_measurements(values, path or "")
    if calibration is None or len(calibration.ranks) != world_size:
        return None
    ways = [calibration.predicted, *(one for one in calibration.choices if one.source == "measured")]
    speed = next((one.samples_per_s for one in ways if one.is_way_of(config)), None)
    if speed is not None and (different := differences(values, calibration, config, num_samples, model_bytes)):
        then, now = (", ".join(side) for side in zip(*different, strict=True))
        log.info("%s was measured with %s; this run has %s: no speed is predicted, calibrate again", path, then, now)
        return None
    return speed


def read_environment(
    environment: Mapping[str, str] = os.environ, *, also: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Returns the options that HVD_ADAPTIVE_* variables set, converted to their types.

    Args:
        environment: the process's.
        also: the dataclass of each option of another command; it comes before an option of ``train`` of that name.

    Raises:
        ValueError: for a variable that names no option, or a value of the wrong type.
    """
    fields = {**fields_of(Config, TrainConfig), **(also or {})}
    found = [key for key in environment if key.startswith(ENVIRONMENT_PREFIX) and key != LAUNCH_VARIABLE]
    names = {key.removeprefix(ENVIRONMENT_PREFIX).lower(): key for key in found}
    for name, key in names.items():
        if name not in fields:
            raise ValueError(f"environment variable {key}: {unknown_name(name, fields)}")
    with told_sources(variables=names):
        return typed({name: environment[key] for name, key in names.items()}, fields)


@contextlib.contextmanager
def told_sources(
    *,
    given: Iterable[str] = (),
    path: str | None = None,
    in_file: Iterable[str] = (),
    variables: Iterable[str] = (),
    option: str = "--config",
) -> Iterator[None]:
    """Has an error of this block that names an option say where its value is from, unless that is the command line.

    Args:
        given: options of the command line, which win.
        path: the file of options.
        in_file: options of that file, which come next.
        variables: options of the environment.
        option: that named the file.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        named = dict.fromkeys(re.findall(r"\w+", text))
        sources = [
            f"{name} is from " + (f"{option} {path}" if name in in_file else f"variable {ENVIRONMENT_PREFIX}{name.upper()}")
            for name in named
            # A word such as data is more often no option.
            if ("_" in name or text.startswith((name, f"unknown option {name!r}")))
            and name not in given
            and (name in in_file or name in variables)
        ]
        # What has been told within an inner block is not told again.
        sources = [source for source in sources if source not in text]
        raise (ValueError(f"{text} ({', '.join(sources)})") if sources else error) from None


def typed(values: Mapping[str, Any], fields: Mapping[str, type]) -> dict[str, Any]:
    """Returns the options among some values, those that are text converted to their types.

    Args:
        values: by name; names that are no options are left out.
        fields: the dataclass of each option.

    Raises:
        ValueError: naming the option, if a text does not fit.
    """
    return {
        name: parse_value(fields[name], name, value) if isinstance(value, str) else value
        for name, value in values.items()
        if name in fields
    }


def world_config(options: argparse.Namespace) -> Config:
    """Returns how ranks meet and compute, for a command that takes no other options of Config: its backend, and what variables
    say of that, of the stall limit and of threads.

    Raises:
        ValueError: for a value that one of them may not have.
    """
    names = {"backend", "stall_limit_s", "num_threads"}
    variables, given = ({n: source[n] for n in names & source.keys()} for source in (read_environment(), vars(options)))
    with told_sources(given=given, variables=variables):
        return Config(**{**variables, **given})


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
        raise ValueError(f"{name} must be {type_words(kind)}, got {text!r}") from None


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Returns the message for a name that is none of the known options, with the nearest ones."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f"unknown option {name!r}" + (
        f"; did you mean {' or '.join(near)}?" if near else f"; options are {', '.join(known)}"
    )


def merge_sources(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of several sources, by name; later ones win. Test data go with the data that they were named with:
    they are left out where a later source names other data."""
    merged: dict[str, Any] = {}
    for source in sources:
        if "data" in source and _place(source["data"]) != _place(merged.get("data")):
            merged.pop("test_data", None)
        merged.update(source)
    return merged


def _place(path: Any) -> Any:
    return os.path.abspath(os.path.expanduser(path)) if isinstance(path, str) else path


def build_configs(*sources: Mapping[str, Any]) -> tuple[Config, TrainConfig]:
    """Builds both configurations from sources of options, as :func:`merge_sources`. ``~`` in paths is expanded.

    Raises:
        ValueError: for an unknown name, or a value that its field refuses.
    """
    merged = merge_sources(*sources)
    fields = fields_of(Config, TrainConfig)
    for name in merged:
        if name not in fields:
            raise ValueError(unknown_name(name, fields))
        if name in _PATHS and isinstance(merged[name], str):
            # No shell does it in --out=~/a, nor in a file.
            merged[name] = os.path.expanduser(merged[name])
    config = Config(**{name: value for name, value in merged.items() if fields[name] is Config})
    train = TrainConfig(**{name: value for name, value in merged.items() if fields[name] is TrainConfig})
    if train.input_gradients == "dense" and config.sparse_merge == "always":
        raise ValueError("sparse_merge 'always' needs input_gradients 'sparse': else no rows are told apart")
    if config.loss_reduction == "targets":
        raise ValueError(
            "loss_reduction 'targets' is for your own loop, which counts them in batch.num_targets: the built-in trainer's loss "
            "is a mean or a sum over samples"
        )
    return config, train


def run_path(config: Config, train: TrainConfig) -> Path:
    """Returns the run directory: ``train.out``, or a new one under ``runs``, named after label, time and any Slurm job."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    # Slurm starts several jobs of an array in one second.
    stamp = "-".join([stamp, *filter(None, [os.environ.get("SLURM_JOB_ID")])])
    return Path(train.out) if train.out else Path("runs") / f"{train.name or config.strategy}-{stamp}"
