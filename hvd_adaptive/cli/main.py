"""Parses the command line, reports errors once for all ranks, and hands over to what does the work."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_adaptive.cli.arguments import NUM_RANKS, without_options
from hvd_adaptive.cli.bench import bench_comm, bench_compress, uses_groups
from hvd_adaptive.cli.calibrate_options import check_calibrate
from hvd_adaptive.cli.doctor import doctor
from hvd_adaptive.cli.early_checks import check_data_early, check_files_early, check_ranks_early
from hvd_adaptive.cli.elastic import check_only_elastic, supervise_script, supervise_training
from hvd_adaptive.cli.fields import fields_of
from hvd_adaptive.cli.option_sources import (
    build_configs,
    predicted_speed,
    read_environment,
    run_path,
    told_sources,
    typed,
    with_config_file,
    world_config,
)
from hvd_adaptive.cli.parser import make_parser
from hvd_adaptive.cli.simulate import run_simulation
from hvd_adaptive.cli.streams import (
    OutputError,
    flush_output,
    go_on_without_output,
    leave_output_to_script,
    tell_of_output,
)
from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.cluster.last_checkpoint import describe_newest
from hvd_adaptive.cluster.output import refuse, say
from hvd_adaptive.cluster.relaunch import relaunch
from hvd_adaptive.config import Config
from hvd_adaptive.exit_codes import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_PREEMPTED
from hvd_adaptive.state.preemption import PREEMPTION, SIGNALS
from hvd_adaptive.xmc.train_config import TrainConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 2 for bad input, else the failed job's."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            flush_output()
    except OutputError as error:
        return tell_of_output(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["submit"]:
        return _submit(arguments[1:])
    if not arguments:
        make_parser().print_help(sys.stderr)
        return EXIT_BAD_INPUT
    rank, is_alone = 0, False
    try:
        # Variables of another job's rank may be left over, and no rank 0 is there to speak.
        is_alone = arguments[0] in ("report", "simulate", "doctor") or arguments[:2] == ["bench", "compress"]
        # A script has options of its own.
        is_alone |= "-np" in (arguments[1:2] if arguments[0] == "run" else arguments)
        rank = read_launcher(os.environ).rank or 0
        options = make_parser().parse_args(arguments)
        _check_working_directory()
        configs = None
        if options.command in ("train", "run"):
            go_on_without_output()
        if options.command == "report":
            from hvd_adaptive.cli.report import report

            report(options.runs, out=options.out, png=options.png, target_p1=options.target_p1)
            return 0
        if options.command == "simulate":
            run_simulation(options)
            return 0
        if options.command == "bench" and options.bench == "compress":
            bench_compress(options)
            return 0
        if options.command == "doctor":
            return doctor(options, without_options(arguments, NUM_RANKS))
        if options.command == "run":
            return _run_script(options, arguments)
        if options.command == "calibrate":
            configs = _train_configs(options)
            check_calibrate(configs[0], options.calibration_file, options.seconds)
        if options.command == "train":
            configs = _train_configs(options)
            if options.elastic:
                return supervise_training(options, [*arguments, *_terminal_flag()], configs)
            check_only_elastic(options)
        config = configs[0] if configs is not None else world_config(options)
        if options.num_ranks is not None:
            if configs is not None and options.command == "train":
                check_ranks_early(configs[0], options.num_ranks)
                check_files_early(configs[1])
            elif configs is not None:
                check_data_early(configs[1])
            return _start_ranks(options, arguments, configs, config.backend)
    except (ValueError, RuntimeError) as error:
        return refuse(error, speaks=is_alone or rank == 0)
    if options.command == "train":
        # Before torch is loaded, which takes seconds in which the signal would end the rank.
        # A shell that starts the command in the background has SIGINT ignored.
        interrupt = () if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else (signal.SIGINT,)
        PREEMPTION.catch_signals((*SIGNALS, *interrupt))
    _set_up_logging(rank)
    return _run(options, config, configs, rank)


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ValueError(f"the working directory cannot be used: {error.strerror}; change to one that is there") from None


def _run(options: argparse.Namespace, config: Config, configs: tuple[Config, TrainConfig] | None, rank: int) -> int:
    # torch's store prints a C++ backtrace for every connection that a dying rank leaves behind.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Only now: a bad option must not wait for torch to load.
    from hvd_adaptive.comm import connect
    from hvd_adaptive.comm.protocols import AgreedError

    groups = uses_groups(options) if options.command == "bench" else config.uses_groups
    try:
        transport = connect(
            stall_limit_s=config.stall_limit_s, backend=config.backend, groups=groups, repeatable=config.repeatable,
            seldom=options.command != "bench" and config.sums_seldom,
        )  # fmt: skip
    except RuntimeError as error:
        # No world to agree in. Leave without finalizing MPI, which may not be whole.
        code = refuse(error, speaks=rank == 0)
        sys.stderr.flush()
        # A supervisor takes 2 for bad options; a host that cannot be reached is worth another launch.
        os._exit(1 if getattr(options, "launch", None) is not None else code)
    command: Callable[[], int | None]
    if options.command == "calibrate" and configs is not None:
        from hvd_adaptive.cli.calibrate import calibrate

        command = lambda: calibrate(  # noqa: E731
            *configs, _chosen(options), options.calibration_file, options.seconds, transport
        )
    elif configs is not None:
        from hvd_adaptive.cli.train import train
        from hvd_adaptive.session.supervised import Supervised

        # Open MPI's mpirun gives a rank a pseudo-terminal, wherever the output goes.
        alone = transport.world_size == 1 and sys.stdout.isatty() and read_launcher(os.environ).name != "openmpi"
        supervised = None
        if options.launch is not None:
            supervised = Supervised(options.launch, options.memory_dir and Path(options.memory_dir))
            supervised.mark("imports")
        predicted = functools.partial(predicted_speed, options.config, config, world_size=transport.world_size)
        command = lambda: train(  # noqa: E731
            *configs,
            transport=transport,
            terminal=options.terminal or alone,
            predicted_speed=predicted,
            supervised=supervised,
        )
    elif options.command == "bench":
        command = lambda: bench_comm(options, transport)  # noqa: E731
    else:
        from hvd_adaptive.cli.use_model import evaluate, predict

        action = evaluate if options.command == "evaluate" else predict
        command = lambda: action(options, transport)  # noqa: E731
    try:
        return command() or 0
    except AgreedError as error:
        if transport.rank == 0:
            refuse(error, speaks=True)
        # All ranks are here, and meet: none leaves before rank 0 has spoken.
        transport.close()
        return EXIT_BAD_INPUT
    except OutputError as error:
        if transport.world_size > 1:
            # The others wait for this rank.
            transport.abort(f"hvd-adaptive: error: {error.strerror}", 1)
        raise


def _start_ranks(
    options: argparse.Namespace, arguments: list[str], configs: tuple[Config, TrainConfig] | None, backend: str
) -> int:
    argv = [*without_options(arguments, NUM_RANKS), *_terminal_flag()]
    if configs is None or options.command != "train":
        return relaunch(options.num_ranks, argv, backend=backend)
    # A rank that is killed says nothing, and its launcher does not know what was saved.
    path = run_path(*configs).absolute()
    code = relaunch(options.num_ranks, [*argv, "--out", str(path)], backend=backend, ends_in_order=True)
    if code not in (0, EXIT_BAD_INPUT):
        saved = describe_newest(path / "checkpoints")
        after = {
            EXIT_INTERRUPTED: " after Ctrl-C (which their launcher passes on to ranks as another signal)",
            EXIT_PREEMPTED: " after a signal (which their launcher may pass on to ranks as another one)",
            128 + signal.SIGKILL: ": a rank was killed (kill -9, or for want of memory)",
        }.get(code, "")
        # The terminal may be closed, or the disk full.
        with contextlib.suppress(OSError):
            say(f"the job ended with exit code {code}{after}; {saved}")
    return code


def _submit(arguments: list[str]) -> int:
    from hvd_adaptive.cli.submit import submit

    def check(command: Sequence[str], num_ranks: int) -> None:
        options = make_parser().parse_args(command)
        if options.num_ranks is not None:
            raise ValueError("submit: leave -np out, the number of ranks is --nodes times --ntasks-per-node")
        if options.elastic:
            raise ValueError(
                "submit: what it writes starts the ranks by srun or mpirun, and --elastic starts them itself: write the batch "
                "script by hand, as docs/elastic.md has it"
            )
        if options.command == "train":
            config, train = _train_configs(options)
            check_ranks_early(config, num_ranks)
            try:
                check_files_early(train)
            except ValueError as error:
                # It may change until the job starts, and nodes may have what this host has not.
                say(f"warning: if the job started now on this host, it would end with: {error}")
            if config.backend == "torch":
                raise ValueError("submit: what it writes starts ranks for Horovod: leave backend 'torch' out")
        else:
            from hvd_adaptive.cli.run import run_config

            options.num_ranks = num_ranks
            run_config(options)

    try:
        return submit(arguments, check)
    except (ValueError, RuntimeError) as error:
        return refuse(error, speaks=True)


def _train_configs(options: argparse.Namespace) -> tuple[Config, TrainConfig]:
    variables, chosen = read_environment(), _chosen(options)
    with told_sources(given=vars(options), path=options.config, in_file=chosen, variables=variables):
        return build_configs(variables, chosen)


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the file and of the command line, which wins, by name."""
    given = typed(vars(options), fields_of(Config, TrainConfig))
    return with_config_file(options.config, given, read_environment(), takes_choice=options.command == "train")


def _run_script(options: argparse.Namespace, arguments: list[str]) -> int:
    from hvd_adaptive.cli.run import run, run_config

    if options.elastic:
        if options.verify is not None:
            raise ValueError("--verify ends after its steps: leave --elastic out")
        return supervise_script(options, arguments)
    check_only_elastic(options)
    config = run_config(options)
    if options.verify is not None:
        from hvd_adaptive.cli.verify import check_verify, verify

        check_verify(options, config)
        if options.verify_file is None:
            return verify(options, arguments, config)
    if options.num_ranks is not None:
        # What follows the script is the script's.
        own = len(arguments) - len(options.arguments)
        return relaunch(options.num_ranks, [*without_options(arguments[:own], NUM_RANKS), *arguments[own:]])
    leave_output_to_script()
    return run(options, config)


def _terminal_flag() -> list[str]:
    # mpirun stands between the ranks and the terminal: only this process can see it.
    return ["--terminal"] if sys.stdout.isatty() else []


def _set_up_logging(rank: int) -> None:
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s rank {rank} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
