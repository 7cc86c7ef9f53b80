"""``-np N``: run the same command again as N ranks, under the MPI launcher with the flags that it needs, or under torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from hvd_adaptive.cluster import tether
from hvd_adaptive.cluster.binding import read_launcher, requested_threads
from hvd_adaptive.cluster.host import usable_cores
from hvd_adaptive.cluster.signals import Stop, blocked, ending_signals, handled, pass_on

Flavour = Literal["openmpi4", "openmpi5", "hydra", "torchrun"]

_SCHEDULER_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_FORWARDED = re.compile(
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CUDA_DEVICE_ORDER"
    r"|OMP_.*|HVD_ADAPTIVE_.*|HOROVOD_.*|GLOO_.*|NCCL_.*|TORCH_.*|MASTER_(ADDR|PORT)"
)
_QUIET_S = 1.0
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Launcher:
    """An mpirun on this machine, or this Python for torchrun: its path, and which family of flags it takes."""

    path: str
    flavour: Flavour


def find_launcher(env: Mapping[str, str], *, beside: Path | None = None) -> Launcher:
    """Finds mpirun (or mpiexec): beside this Python, where a virtual environment has it, or on PATH.

    Args:
        env: the environment, for PATH.
        beside: the folder to look in first; None: that of this Python interpreter.

    Raises:
        RuntimeError: there is none, or it is of a family that is not known.
    """
    folder = Path(sys.executable).parent if beside is None else beside
    search = os.pathsep.join([str(folder), env.get("PATH", os.defpath)])
    path = shutil.which("mpirun", path=search) or shutil.which("mpiexec", path=search)
    if path is None:
        raise RuntimeError(
            f"no mpirun or mpiexec beside {sys.executable} or on PATH: run scripts/setup.sh, load the site's "
            "MPI module, start the ranks with srun or horovodrun instead of -np, or try without MPI and Horovod: --backend torch"
        )
    answer = subprocess.run([path, "--version"], env=dict(env), capture_output=True, text=True, timeout=60)
    return Launcher(path, recognize(path, answer.stdout + answer.stderr))


def choose_launcher(env: Mapping[str, str], backend: str) -> Launcher:
    """Finds mpirun as `find_launcher` does; where there is none, backend "torch" takes torchrun, which comes with torch.

    Args:
        env: the environment, for PATH.
        backend: what shall carry the ranks' tensors.

    Raises:
        RuntimeError: there is no usable mpirun, and Horovod needs one.
    """
    try:
        return find_launcher(env)
    except RuntimeError:
        if backend != "torch":
            raise
        return Launcher(sys.executable, "torchrun")


@contextlib.contextmanager
def meeting_place(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Says where ranks over torch.distributed meet, as variables: at a port of this host, which is held for them meanwhile.

    Args:
        env: the environment; a place that it names stays.
    """
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        yield {}
        return
    scheduled = any(name in env for name in _SCHEDULER_VARIABLES)
    with socket.socket() as holder:
        # Bound and not listening: rank 0, of the same user, may listen there, and nobody else gets it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("" if scheduled else "127.0.0.1", 0))
        address = socket.gethostname() if scheduled else "127.0.0.1"
        yield {"MASTER_ADDR": address, "MASTER_PORT": str(holder.getsockname()[1])}


def recognize(path: str, version_text: str) -> Flavour:
    """Tells the family of an mpirun from what its --version prints.

    Args:
        path: the program, for the message.
        version_text: its output.

    Raises:
        RuntimeError: it is neither Open MPI >= 4 nor MPICH or a relative that uses hydra.
    """
    match = re.search(r"\(Open MPI\) (\d+)\.", version_text)
    if match is not None and int(match[1]) >= 4:
        return "openmpi4" if int(match[1]) == 4 else "openmpi5"
    if re.search(r"HYDRA|Intel\(R\) MPI", version_text):
        return "hydra"
    first = version_text.strip().splitlines()[:1]
    raise RuntimeError(
        f"{path} is neither Open MPI >= 4 nor MPICH (it says {first}): start the ranks with its own flags, "
        "without -np"
    )


def torchrun(python: str, num_ranks: int) -> list[str]:
    """Returns the start of a command for that many ranks on this machine.

    As --standalone, which needs an entry for "localhost" in /etc/hosts and tries for minutes without one.
    """
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [python, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={num_ranks}"]


def launch_command(
    num_ranks: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    launcher: Launcher,
    num_cores: float,
    is_root: bool,
    hosts: Mapping[str, int] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Builds the command and environment that run a program as N ranks.

    Ranks are not bound to cores, as Open MPI by default binds each to one. On a machine of one's own more
    ranks than cores are allowed; with fewer than two cores each they yield while they wait. In a scheduler's job it counts
    the slots, and what concerns this project is forwarded to the other hosts. Variables that are set already are kept.

    Args:
        num_ranks: ranks to start, >= 1.
        argv: the program and its arguments.
        env: the environment to start from.
        launcher: the mpirun to use.
        num_cores: cores' worth of time that this process may use, > 0.
        is_root: the user is root, which Open MPI refuses unless told otherwise.
        hosts: ranks on each host by its name; None: this machine, or where the scheduler puts them.

    Returns:
        The command, and the whole environment for it.

    Raises:
        ValueError: num_ranks is below 1.
        RuntimeError: this process is already a rank of an MPI world.
    """
    if num_ranks < 1:
        raise ValueError(f"-np must be >= 1, got {num_ranks}")
    world = read_launcher(env)
    # An interactive `srun --pty` shell is a step of one task, and starting ranks from it is what it is for,
    # and so may a container be.
    if world.name != "none" and not (world.name in ("slurm", "torchrun") and world.world_size == 1):
        raise RuntimeError(
            f"-np {num_ranks} starts ranks of its own, but this process is already rank {world.rank} of "
            f"{world.world_size} ({world.name}): give the number of ranks to that launcher, and leave -np out"
        )
    scheduled = any(name in env for name in _SCHEDULER_VARIABLES)
    # Below ERROR, torch's store writes a C++ backtrace for each connection that a dying rank loses.
    added = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    # This machine's cores say nothing of other hosts'; ranks count theirs by themselves.
    if not scheduled and not hosts and requested_threads(env) is None:
        added["OMP_NUM_THREADS"] = str(max(1, int(num_cores // num_ranks)))
    if launcher.flavour in ("openmpi4", "openmpi5"):
        added["OMPI_MCA_btl_base_warn_component_unused"] = "0"
        # A signal is for the ranks, not for their DataLoaders' workers.
        for project in ("OMPI", "PRTE"):
            added[f"{project}_MCA_odls_base_signal_direct_children_only"] = "1"
        if is_root:
            for project in ("OMPI", "PRTE"):
                added |= {f"{project}_ALLOW_RUN_AS_ROOT": "1", f"{project}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    whole = {**env, **{name: value for name, value in added.items() if not env.get(name)}}
    if launcher.flavour == "torchrun":
        return [*torchrun(launcher.path, num_ranks), "--no-python", *argv], whole
    command = [launcher.path, "-np", str(num_ranks)]
    places = ",".join(f"{host}:{count}" for host, count in (hosts or {}).items())
    if launcher.flavour == "hydra":
        command += ["-bind-to", "none", *(["-hosts", places] if places else [])]
    else:
        by_slot = "slot" if scheduled or launcher.flavour == "openmpi4" else "slot:OVERSUBSCRIBE"
        command += ["--bind-to", "none", "--map-by", by_slot, *(["--host", places] if places else [])]
        if not scheduled and launcher.flavour == "openmpi4":
            command.append("--oversubscribe")
        if scheduled or places:
            # A scheduler gives each node GPUs of its own, and this node's names for them would win there.
            also = set() if scheduled else {"CUDA_VISIBLE_DEVICES"}
            for name in sorted(whole):
                command += ["-x", name] if _FORWARDED.fullmatch(name) or name in also else []
    return [*command, *argv], whole


def python_module(name: str) -> list[str]:
    """Returns the command that runs a module of ours, as the console command would: a random.py of the working folder is not
    Python's own. Python 3.10 knows no such option, and a checkout that is not installed is found through its folder."""
    safe = sys.version_info >= (3, 11) and not Path("hvd_adaptive").is_dir()
    return [sys.executable, *(["-P"] if safe else []), "-m", name]


def build_command(
    num_ranks: int, argv: Sequence[str], *, hosts: Mapping[str, int] | None = None, launcher: Launcher | None = None
) -> tuple[list[str], dict[str, str]]:
    """As :func:`ranks_command`, for ``python -m hvd_adaptive ARGV``."""
    return ranks_command(num_ranks, [*python_module("hvd_adaptive"), *argv], hosts=hosts, launcher=launcher)


def ranks_command(
    num_ranks: int, program: Sequence[str], *, hosts: Mapping[str, int] | None = None, launcher: Launcher | None = None
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and environment that run a program as N ranks from this process.

    Args:
        num_ranks: ranks to start, >= 1.
        program: with its arguments.
        hosts: as for `launch_command`.
        launcher: None: the mpirun that `find_launcher` finds.

    Raises:
        ValueError: num_ranks is below 1.
        RuntimeError: there is no usable mpirun, or this process is already a rank.
    """
    return launch_command(
        num_ranks,
        program,
        env=os.environ,
        launcher=launcher or find_launcher(os.environ),
        num_cores=usable_cores(),
        is_root=os.geteuid() == 0,
        hosts=hosts,
    )


def start(
    command: Sequence[str], env: Mapping[str, str], *, stdout: int | None = None, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts a launcher in a session of its own, without standard input. From the main thread.

    When this process is killed or lets go of what is returned, the launcher gets a SIGTERM. Signals that are blocked here are not
    blocked there.

    Args:
        command: from `build_command`.
        env: from `build_command`.
        stdout: as for Popen.
        stderr: as for Popen.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", tether.__file__, *command],
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def relaunch(num_ranks: int, argv: Sequence[str], *, backend: str = "auto", ends_in_order: bool = False) -> int:
    """Runs ``python -m hvd_adaptive ARGV`` as N ranks and waits for them. From the main thread.

    SIGINT and SIGTERM go on to the launcher, which ends the ranks, and SIGUSR1 and SIGUSR2, which it passes on to them. It
    runs in a session of its own, so that Ctrl-C reaches it once and not twice, and without standard input. SIGHUP, of a terminal
    that is closed, counts as SIGTERM: in its own session the launcher would not hear of it.

    Args:
        num_ranks: ranks to start, >= 1.
        argv: the command's arguments, without -np.
        backend: what shall carry the ranks' tensors; ranks over "torch" are told where to meet.
        ends_in_order: the ranks end by themselves after SIGUSR1: the first SIGTERM or SIGINT is passed on as that, as mpirun
            leaves its ranks one second after those; torchrun leaves them thirty after SIGTERM, and passes on nothing else.

    Returns:
        The launcher's exit code; 128 + the signal's number if a signal ended it; 130 if a SIGINT did, in order or not; with
        ends_in_order 75 if another did: a second one, or the first before the ranks caught it.

    Raises:
        ValueError: num_ranks is below 1.
        OSError: standard output cannot be written; the ranks have been ended.
        RuntimeError: there is no usable mpirun, or this process is already a rank.
    """
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(meeting_place(os.environ)) if backend == "torch" else {}
        launcher = choose_launcher(os.environ, backend)
        command, env = build_command(num_ranks, argv, launcher=launcher)
        return _run(command, {**env, **place}, is_torchrun=launcher.flavour == "torchrun", ends_in_order=ends_in_order)


def _run(command: Sequence[str], env: Mapping[str, str], *, is_torchrun: bool, ends_in_order: bool) -> int:
    """Runs a launcher, and passes signals on; returns its exit code."""
    signals = (*ending_signals(), signal.SIGUSR1, signal.SIGUSR2)
    with contextlib.ExitStack() as handling:
        # Until the child exists a signal must wait: it could not be passed on.
        with blocked(signals):
            # Into a pipe Python writes in large pieces; mpirun's ranks have had one before.
            unbuffered = {"PYTHONUNBUFFERED": "1"} if is_torchrun else {}
            started_s = time.monotonic()
            child = start(command, {**unbuffered, **env}, stdout=subprocess.PIPE)
            stop = Stop()
            asking = (*ending_signals(), *([signal.SIGUSR1] if ends_in_order else []))

            def forward(number: int, frame: FrameType | None = None) -> None:
                is_first = not stop.first
                # mpirun may hang for ever when a second SIGTERM meets it while it ends.
                if number in asking and not stop.take(number):
                    return
                # Any other signal than these two would end torchrun, and leave its ranks.
                asks = is_torchrun and (number != signal.SIGINT or (ends_in_order and is_first))
                in_order = ends_in_order and is_first and not asks
                pass_on(child, signal.SIGTERM if asks else number, in_order, started_s=started_s)

            handling.enter_context(handled(signals, forward))

        def end() -> None:
            # A terminal that is closed says so twice: by SIGHUP, and by what cannot be written there.
            if not stop.first:
                forward(signal.SIGTERM)

        _pass_on(child, end)
        code = child.wait()
    code = code if code >= 0 else 128 - code
    return stop.job_code(code, in_order=ends_in_order) if code and stop.first else code


def _pass_on(child: subprocess.Popen[bytes], end: Callable[[], None]) -> None:
    """Copies what the ranks write to standard output until they end: a launcher would drop what cannot be written, and not tell.

    Args:
        child: the launcher.
        end: asks it to end; called when what it says cannot be written.

    Raises:
        OSError: it cannot be written, and the ranks have been ended.
    """
    assert child.stdout is not None
    failure: OSError | None = None
    ended_s: float | None = None
    while True:
        is_ready = bool(select.select([child.stdout], [], [], _QUIET_S)[0])
        if child.poll() is not None:
            # A process that a rank has left behind may hold it, and go on writing.
            ended_s = ended_s or time.monotonic()
            if not is_ready or time.monotonic() - ended_s > _QUIET_S:
                break
        if not is_ready:
            continue
        if not (chunk := os.read(child.stdout.fileno(), _CHUNK_BYTES)):
            break
        if failure is not None:
            continue
        try:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        except OSError as error:
            failure = error
            end()
    if failure is not None:
        child.wait()
        raise failure
