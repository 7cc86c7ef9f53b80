"""``hvd-adaptive run``: an existing Horovod script, unedited."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_adaptive.cli.arguments import NUM_RANKS
from hvd_adaptive.cli.early_checks import check_slowdown_early, why_missing
from hvd_adaptive.cli.fields import fields_of
from hvd_adaptive.cli.option_sources import (
    read_environment,
    told_sources,
    typed,
    unknown_name,
    with_config_file,
)
from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.cluster.output import say
from hvd_adaptive.config import Config
from hvd_adaptive.exit_codes import EXIT_BAD_INPUT
from hvd_adaptive.validation import parse_slowdown
from hvd_adaptive.wrap.run_options import LOCAL_OPTIONS, RunConfig, check_shares
from hvd_adaptive.xmc.train_config import TrainConfig

_PYTHON = re.compile(r"python[\d.]*")


def run_config(
    options: argparse.Namespace | None = None, environment: Mapping[str, str] = os.environ
) -> RunConfig:
    """Returns the options, those of the command line (None: there is none) before those of its --config file, which may hold
    options of ``train`` as well, and before HVD_ADAPTIVE_* variables.

    Raises:
        ValueError: for a bad value, or a script that is not there. The options' script, module and arguments are changed where
            they begin with the word python.
    """
    fields = fields_of(RunConfig)
    path = getattr(options, "config", None)
    given = typed(vars(options or argparse.Namespace()), fields)
    variables = read_environment(environment, also=fields)
    strategy = {"strategy": variables.get("strategy", RunConfig().strategy)}
    of_strategy = {name: given[name] for name in given.keys() & strategy}
    from_file = with_config_file(path, of_strategy, strategy, for_script=True)
    known = fields_of(RunConfig, Config, TrainConfig)
    unknown = sorted(from_file.keys() - known.keys())
    if unknown:
        raise ValueError(f"--config {path}: {unknown_name(unknown[0], known)}")
    # A file may serve several commands; what the command line or a variable says is still checked.
    without = _not_chosen(from_file)
    if from_file.get("strategy", strategy["strategy"]) == "sync":
        without.update(LOCAL_OPTIONS)
    from_file = {name: value for name, value in from_file.items() if name not in without}
    with told_sources(given=given, path=path, in_file=from_file, variables=variables):
        config = RunConfig(**typed({**variables, **from_file, **given}, fields))
        if config.slowdown is not None:
            parse_slowdown(config.slowdown)
    num_ranks = getattr(options, "num_ranks", None) or read_launcher(environment).world_size
    if num_ranks is not None:
        check_shares(config.shares, num_ranks)
        check_slowdown_early(config.slowdown, num_ranks)
    if options is not None and getattr(options, "script", None) is not None:
        _leave_out_python(options)
        _check_script(options.script, is_module=options.module)
    return config


def _not_chosen(values: Mapping[str, Any]) -> set[str]:
    """Returns the options of a file that have train's default where run has no such choice; or, in a run's config.json, which has
    all of train's options, wherever run has a default of its own."""
    has_all = values.keys() >= {name for name, item in TrainConfig.__dataclass_fields__.items() if item.default is not None}
    own, trains = RunConfig.__dataclass_fields__, Config.__dataclass_fields__
    # Whoever names a training's file wants its strategy.
    return {
        name
        for name in (values.keys() & own.keys() & trains.keys()) - {"strategy"}
        if values[name] == trains[name].default
        and (has_all or (own[name].metadata["choices"] and values[name] not in own[name].metadata["choices"]))
    }


def _leave_out_python(options: argparse.Namespace) -> None:
    """Has ``run python -u train.py`` mean ``run train.py``: people put ``run`` before the command that they know."""
    if not _PYTHON.fullmatch(os.path.basename(options.script)):
        return
    rest = list(options.arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest.pop(0)
    if rest and rest[0] == "-m":
        options.module = True
        rest.pop(0)
    if not rest or rest[0] == "-c":
        raise ValueError(f"{options.script} needs a script or -m module behind it: hvd-adaptive run [options] train.py")
    options.script, *options.arguments = rest


def _check_script(script: str, *, is_module: bool) -> None:
    if is_module:
        package = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise ValueError(f"module {script!r} is not there (looked in {os.getcwd()} and where Python looks)")
    elif not os.path.isfile(script):
        raise ValueError(f"script {script!r} {why_missing(script) or 'is no file'} (looked in {os.getcwd()})")


def run(options: argparse.Namespace, config: RunConfig) -> int:
    """Runs the script as this rank; returns its exit code.

    Raises:
        RuntimeError: if the world cannot be joined.
    """
    verification: Any = None
    if options.verify_file is not None:
        from hvd_adaptive.wrap.verification import Verification

        verification = Verification(Path(options.verify_file), options.verify)
    script = _script_module()
    engine = make_engine(config, script.start_world(config.stall_limit_s))
    if verification is not None:
        verification.intercept(engine)
    launched: Any = None
    if options.launch is not None:
        from hvd_adaptive.wrap.launched import Launched

        memory = options.memory_dir and Path(options.memory_dir)
        launched = Launched(options.launch, memory, Path(options.commit_dir), options.job)
    code = script.run_script(options.script, options.arguments, engine, launched, is_module=options.module)
    if verification is not None and code == 0:
        verification.save()
    # Not -n: many scripts have one of their own.
    own = {*NUM_RANKS} - {"-n"} | {*(f"--{name.replace('_', '-')}" for name in fields_of(RunConfig))}
    misplaced = [text for text in options.arguments if text.partition("=")[0] in own]
    # As argparse ends a script.
    if code == EXIT_BAD_INPUT and misplaced and not read_launcher(os.environ).rank:
        say(f"{', '.join(misplaced)}: options of run go before the script: run [options] {options.script}")
    return code


def make_engine(config: RunConfig, comm: Any) -> Any:
    """Intercepts as the options say; returns the engine.

    Raises:
        ValueError: for a compression that cannot be read.
    """
    from hvd_adaptive.exchange.compressed import check_compression
    from hvd_adaptive.strategies.exactness import what_breaks_equality

    check_compression(config.merging())
    return _script_module().intercept(
        config, comm=comm, describe=lambda module: what_breaks_equality(module, loss_reduction="mean", in_step=True)
    )


def _script_module() -> Any:
    # Only now: a bad option must not wait for torch to load.
    from hvd_adaptive.wrap import script

    return script
