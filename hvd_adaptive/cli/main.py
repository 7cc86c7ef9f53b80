"""Parses the command line, reports errors once for all ranks, and hands over to what does the work."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvd_adaptive import __version__
from hvd_adaptive.config import Config, TrainConfig
from hvd_adaptive.launch.binding import read_launcher
from hvd_adaptive.launch.relaunch import relaunch
from hvd_adaptive.option_sources import build_configs, parse_value, read_config_file, read_environment
from hvd_adaptive.validation import field_type
from hvd_adaptive.wrap.options import RunConfig

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 2 for bad input, else the failed job's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    rank = 0
    try:
        rank = read_launcher(os.environ).rank or 0
        configs = None
        if options.command == "report":
            from hvd_adaptive.cli.report import report

            report(options.runs, options.png)
            return 0
        if options.command == "train":
            configs = build_configs(
                read_environment(),
                read_config_file(options.config) if options.config else {},
                _given(options),
            )
        if options.command == "run":
            return _run_script(options, arguments)
        if options.num_ranks is not None:
            return relaunch(options.num_ranks, [*_without_num_ranks(arguments), *_terminal_flag()])
    except (ValueError, RuntimeError) as error:
        return _fail(error, rank)
    _set_up_logging(rank)
    return _run(options, configs, rank)


def _run(options: argparse.Namespace, configs: tuple[Config, TrainConfig] | None, rank: int) -> int:
    # torch's store prints a C++ backtrace for every connection that a dying rank leaves behind.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Only now: a bad option must not wait for torch to load.
    from hvd_adaptive.transport import connect
    from hvd_adaptive.transport.base import AgreedError

    config = configs[0] if configs else Config()
    try:
        transport = connect(
            stall_limit_s=config.stall_limit_s, groups=config.uses_groups, repeatable=config.repeatable
        )
    except RuntimeError as error:
        # No world to agree in. Leave without finalizing MPI, which may not be whole.
        code = _fail(error, rank)
        sys.stderr.flush()
        os._exit(code)
    command: Callable[[], None]
    if configs is not None:
        from hvd_adaptive.cli.train import train

        alone = transport.world_size == 1 and sys.stdout.isatty()
        command = lambda: train(*configs, transport=transport, terminal=options.terminal or alone)  # noqa: E731
    else:
        from hvd_adaptive.cli.use_model import evaluate, predict

        action = evaluate if options.command == "evaluate" else predict
        command = lambda: action(options, transport)  # noqa: E731
    try:
        command()
    except AgreedError as error:
        code = _fail(error, transport.rank)
        transport.close()
        return code
    return 0


def _run_script(options: argparse.Namespace, arguments: list[str]) -> int:
    from hvd_adaptive.cli.run import run, run_config

    config = run_config(options)
    if options.num_ranks is not None:
        # What follows the script is the script's.
        own = len(arguments) - len(options.arguments)
        return relaunch(options.num_ranks, [*_without_num_ranks(arguments[:own]), *arguments[own:]])
    return run(options, config)


def _fail(error: Exception, rank: int) -> int:
    if rank == 0:
        print(f"hvd-adaptive: error: {error}", file=sys.stderr, flush=True)
    else:
        # A launcher ends the job when the first rank exits; rank 0 must have spoken by then.
        time.sleep(2)
    return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvd-adaptive",
        description="Adaptive data-parallel training with Horovod and MPI on GPUs that are not equal.",
    )
    parser.add_argument("--version", action="version", version=f"hvd-adaptive {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    launch = argparse.ArgumentParser(add_help=False)
    group = launch.add_argument_group("launching")
    group.add_argument(
        "-np",
        "--num-ranks",
        type=int,
        metavar="N",
        help="start N ranks under mpirun; without it, the launcher's world or one rank",
    )
    group.add_argument("--terminal", action="store_true", help=argparse.SUPPRESS)

    train = commands.add_parser("train", parents=[launch], help="train a sparse model on multi-label data")
    train.add_argument(
        "--config",
        metavar="FILE",
        help=".toml or .json of these options (a run's config.json is one); options win over it",
    )
    for title, cls in (("what to train", TrainConfig), ("how ranks share the work", Config)):
        _add_fields(train.add_argument_group(title), cls)

    run = commands.add_parser(
        "run", parents=[launch], help="run an existing Horovod script for PyTorch, unedited, with shares that follow the speeds"
    )
    _add_fields(run.add_argument_group("how ranks share the script's batches"), RunConfig)
    run.add_argument("script", help="the script; all that follows it is its own")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")

    using = argparse.ArgumentParser(add_help=False)
    using.add_argument(
        "model", metavar="RUN_DIR|FILE", help="a run directory (its best model) or a .safetensors file of one"
    )
    using.add_argument(
        "--data", metavar="PATH", help="data as for train (default: what the model was trained on)"
    )
    using.add_argument("--cache-dir", metavar="DIR", help="folder of the binary cache")
    using.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:K")
    commands.add_parser("evaluate", parents=[launch, using], help="score a saved model on the test split")
    predict = commands.add_parser(
        "predict", parents=[launch, using], help="print the best labels of each test row as JSON lines"
    )
    predict.add_argument("-k", type=int, default=5, help="labels a row (default: 5)")
    report = commands.add_parser(
        "report", help="compare runs: a table, and a picture of accuracy and batch sizes"
    )
    report.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run directories; the baseline first")
    report.add_argument("--png", metavar="FILE", help="write the picture to this file")
    return parser


def _add_fields(group: Any, cls: type) -> None:
    for item in dataclasses.fields(cls):
        default = (
            ""
            if item.default is None or "default:" in item.metadata["help"]
            else f" (default: {item.default})"
        )
        flag = "--" + item.name.replace("_", "-")
        text = item.metadata["help"].replace("%", "%%") + default
        if field_type(cls, item.name) is bool:
            group.add_argument(
                flag,
                dest=item.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            choices = item.metadata["choices"]
            metavar = "|".join(choices) if choices else field_type(cls, item.name).__name__.upper()
            group.add_argument(flag, dest=item.name, metavar=metavar, default=argparse.SUPPRESS, help=text)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for cls in (Config, TrainConfig):
        for name in cls.__dataclass_fields__:
            if hasattr(options, name):
                value = getattr(options, name)
                values[name] = parse_value(cls, name, value) if isinstance(value, str) else value
    return values


def _without_num_ranks(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("-np", "--num-ranks"):
            skip = True
        elif not argument.startswith(("--num-ranks=", "-np=")):
            kept.append(argument)
    return kept


def _terminal_flag() -> list[str]:
    # mpirun stands between the ranks and the terminal: only this process can see it.
    return ["--terminal"] if sys.stdout.isatty() else []


def _set_up_logging(rank: int) -> None:
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s rank {rank} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
