"""Runs a person's script in this process as one rank, with its loaders and optimizers intercepted."""

from __future__ import annotations

import atexit
import contextlib
import dis
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvd_adaptive.cluster.binding import read_launcher, starts_alone
from hvd_adaptive.cluster.output import refuse, say
from hvd_adaptive.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED
from hvd_adaptive.wrap.compilers import intercept_compile, intercept_graphs
from hvd_adaptive.wrap.gradient_hooks import intercept_gradient_hooks
from hvd_adaptive.wrap.graphs import intercept_backward
from hvd_adaptive.wrap.last_words import LastWords
from hvd_adaptive.wrap.loader_calls import intercept_loaders
from hvd_adaptive.wrap.modules import intercept_modules
from hvd_adaptive.wrap.optimizer_calls import intercept_horovod
from hvd_adaptive.wrap.own_use import intercept_own_use
from hvd_adaptive.wrap.pulse import Pulse
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.wrap.share_exchange import DryRunOver
from hvd_adaptive.wrap.shared_gpu import prepare_for_shared_gpus, watch_for_shared_gpus
from hvd_adaptive.wrap.sizes import is_installed
from hvd_adaptive.wrap.wrapped_run import BadOptions, Engine

if TYPE_CHECKING:
    from hvd_adaptive.wrap.launched import Launched

_EQUAL = "If the script cannot take batches of another size, run it with --shares equal"
_engine: Engine | None = None


def is_intercepted() -> bool:
    """Whether this process has been intercepted, which is for good."""
    return _engine is not None


def start_world(stall_limit_s: float = 60.0) -> Any:
    """Starts MPI before the script's hvd.init() could, where a launcher of MPI ranks started this process. COLLECTIVE.

    An uncaught exception on any rank then ends the job. Under Gloo, or without a launcher, Horovod starts by itself.

    Args:
        stall_limit_s: ranks that have not all started after five times as many seconds end the job. From 60 s on the limit is
            300 s, or the stall limit if that is more.

    Returns:
        A communicator of all ranks; None where MPI was not started.

    Raises:
        RuntimeError: if the launcher's world and MPI's are not one.
    """
    info = read_launcher(os.environ)
    if info.name == "horovodrun-gloo":
        return None
    from hvd_adaptive.comm import choose_backend, set_mpi_environment

    if not starts_alone(info, os.environ):
        choose_backend("horovod", info)
    set_mpi_environment(info)
    if starts_alone(info, os.environ):
        return None
    from hvd_adaptive.comm.horovod_mpi import start_mpi
    from hvd_adaptive.comm.start_watch import START_LIMITS, start_watch

    limit_s = max(stall_limit_s, START_LIMITS * min(stall_limit_s, 60.0))
    with start_watch(info.rank, stall_limit_s=stall_limit_s, limit_s=limit_s):
        return start_mpi(info)


def intercept(
    config: RunConfig,
    *,
    comm: Any = None,
    describe: Callable[[nn.Module], list[str]] = lambda module: [],
) -> Engine:
    """Intercepts torch's loaders and Horovod's optimizers in this process, for good.

    Args:
        config: the options.
        comm: what :func:`start_world` returned, for heartbeats; None: there are none.
        describe: see :class:`Engine`.
    """
    global _engine
    engine = _engine = Engine(config, describe=describe)
    if comm is not None:
        pulse = Pulse(comm, config.stall_limit_s)
        engine.on_start.append(pulse.start)
        engine.on_failure = pulse.abandon
        engine.find_store = lambda: pulse.store
        # Before Horovod's own: then it runs after Horovod's shutdown, which frees ranks that still wait for this one.
        atexit.register(pulse.stop)
    engine.on_start.append(lambda: watch_for_shared_gpus(engine.report.note))
    # Before that, as it needs it.
    atexit.register(engine.over)
    intercept_loaders(engine)
    intercept_backward(engine.losses)
    if config.strategy == "sync":
        intercept_gradient_hooks(lambda: engine.refuse_batch(Reason.CLIPPED), lambda: engine.follower.is_tracing)
        intercept_own_use(engine.own_use)

    def in_training(reason: Reason) -> Callable[[], None]:
        return lambda: engine.refuse_batch(reason) if torch.is_grad_enabled() else None

    micro = engine.micro_batches
    intercept_compile(engine.follower.unwatched, in_training(Reason.COMPILED), None if micro is None else micro.call)
    # Whoever takes graphs for autograd replays them without gradients, and inductor as well.
    intercept_graphs(engine.follower.unwatched, in_training(Reason.GRAPHED))
    if config.strategy == "local":
        intercept_modules(engine)
    # Before the collectives are watched: who watches shall see the script's own tensors.
    prepare_for_shared_gpus()
    intercept_horovod(engine)
    return engine


def run_script(path: str, arguments: Sequence[str], engine: Engine, launched: Launched | None, *, is_module: bool) -> int:
    """Runs a script as ``python path arguments`` would, as this rank. COLLECTIVE as far as the script is.

    Args:
        path: the script, or a module's name.
        arguments: its arguments.
        engine: what :func:`intercept` returned.
        launched: under a supervisor, says which launch this is.
        is_module: run it as ``python -m path arguments`` would.

    Returns:
        The exit code.
    """
    if launched is not None:
        _tell_supervisor(engine, launched)
    # Python names a script's file so, which may change its folder; sys.argv[0] becomes the same.
    file = os.path.abspath(path)
    sys.argv = [path, *arguments]
    # As python does; workers that are spawned or served by a fork server find the script's classes through it.
    if not getattr(sys.flags, "safe_path", False):
        # The console command's folder, or the working one.
        del sys.path[0]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(path).resolve().parent))
    code = 0
    # The supervisor's ranks end in another way.
    speaks = launched is None and (read_launcher(os.environ).rank or 0) == 0
    last_words = LastWords(lambda: _say_last(engine)) if speaks else None
    try:
        if is_module:
            runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(file, run_name="__main__")
    except DryRunOver:
        pass
    except BadOptions as error:
        return refuse(error, speaks=engine.rank == 0)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if not isinstance(leave.code, int | None):
            print(leave.code, file=sys.stderr)
        if launched is not None and code not in (0, EXIT_PREEMPTED):
            launched.say("raised", any_rank=True)
        if code:
            # Rank 0 may have left, and its store with it.
            with contextlib.suppress(RuntimeError):
                _tell_failure(engine)
            engine.on_failure()
            if engine.report.is_started and not (launched is not None and code == EXIT_PREEMPTED):
                # The other ranks lose Horovod then, and each says that it has failed.
                frames = [f for f in traceback.extract_tb(leave.__traceback__) if not is_installed(f.filename)]
                where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
                say(f"rank {engine.rank} left the script with exit code {int(code)}{where}")
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        engine.on_failure()
        so_far = "; what was done so far:" if engine.rank == 0 and not engine.report.is_silent else ""
        say(f"rank {engine.rank} was interrupted by SIGINT (Ctrl-C){so_far}")
    except BaseException as error:
        # Else it is another rank's fault, whom the launcher or the heartbeats name.
        if launched is not None and type(error).__name__ != "HorovodInternalError":
            launched.say("raised", any_rank=True)
        # Before the error: its telling ends the job.
        is_scripts = type(error).__name__ != "HorovodInternalError" and not _is_own(error)
        if is_scripts and any(loader.fractions for loader in engine.report.loaders):
            tried = ", which the dry run tried" if engine.config.dry_run else ""
            say(f"the error below came while ranks had unequal shares{tried}. {_EQUAL}")
        try:
            _tell_failure(engine)
        except RuntimeError as later:
            # torch raises a worker's death wherever its rank is then, and the first error may be what comes of it.
            if "DataLoader worker" in str(later):
                error = later
        sys.excepthook(type(error), error, _from_script(error, path if is_module else file))
        return 1
    finally:
        if last_words is not None:
            last_words.stop()
    engine.over()
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    if not engine.report.is_started and code == 0 and not asks_for_help:
        return refuse(
            f"{path} never called hvd.init() of horovod.torch, so nothing was shared between ranks: is it a Horovod script for "
            "PyTorch?",
            speaks=(read_launcher(os.environ).rank or 0) == 0,
        )
    print_report(engine)
    if launched is not None and code == 0:
        launched.say("finished")
    return code


def _tell_supervisor(engine: Engine, launched: Launched) -> None:
    """Has the supervisor hear how far the script is, the script which launch it is in, and commits outlive the job."""
    from hvd_adaptive.wrap.commits import intercept_elastic

    def started() -> None:
        launched.rank = engine.rank

    engine.on_start.append(started)
    engine.on_step = launched.stepped
    os.environ["HVD_ADAPTIVE_LAUNCH"] = str(launched.launch)
    intercept_elastic(launched, engine.report.note)


_FAILED = "script-failed"


def _tell_failure(engine: Engine) -> None:
    """Has rank 0 know that this rank's error is why the job ends, and not what the report is for."""
    store = engine.find_store()
    if store is not None:
        store.add(_FAILED, 1)


def _say_last(engine: Engine) -> None:
    store = engine.find_store()
    if not engine.report.is_silent and (store is None or not store.add(_FAILED, 0)):
        say("rank 0 was asked to end (SIGTERM from its launcher, as at Ctrl-C or for a lost rank); what was done so far:")
        print_report(engine)


def print_report(engine: Engine) -> None:
    """Writes the report on standard error, on rank 0."""
    if engine.report.is_started and engine.rank == 0 and not engine.report.is_silent:
        sys.stdout.flush()
        sys.stderr.write("".join(f"hvd-adaptive: {line}\n" for line in engine.report.lines()))
        sys.stderr.flush()


def _is_own(error: BaseException) -> bool:
    """Whether this package has raised an error itself, rather than a function that it has called for the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_globals.get("__name__", "").startswith("hvd_adaptive."):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _from_script(error: BaseException, path: str) -> types.TracebackType | None:
    """The traceback from the script's own first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace if trace is not None else error.__traceback__
