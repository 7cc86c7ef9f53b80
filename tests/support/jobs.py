"""Programs that tests start, alone or as ranks under mpirun; whatever becomes of one, no process of it stays behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from zygote import ALONE, STARTUP, ZYGOTE_SOCKET, Zygote

from hvd_adaptive.cluster.relaunch import find_launcher, launch_command

MARK = "HVD_TEST_JOB"  # set in every process of a job, so that all of them can be found
GRACE_S = 5.0
# By which processes may outlive their launcher: on a busy machine one that is killed dies when it gets its turn.
OUTLIVE_S = 15.0
_REPO = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
ZYGOTE = Zygote()  # forks the ranks of all jobs


def exit_on_signals() -> None:
    """Has SIGTERM and Ctrl-C raise SystemExit, so that all that was made is removed; another one does not disturb that."""

    def leave(number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def forking_environment(*, alone: bool = False) -> dict[str, str]:
    """Variables of a program that this process starts by itself, and whose ranks shall be forks of the zygote.

    Args:
        alone: as for `Job`.
    """
    return {
        **({ALONE: "1"} if alone else {}),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), str(_REPO), os.environ.get("PYTHONPATH", "")]),
        ZYGOTE_SOCKET: os.environ.get(ZYGOTE_SOCKET) or str(ZYGOTE.start()),
    }


def job_mark(pid: int) -> bytes:
    """The mark that all processes of a job have in their environment, from one of them; empty if that has ended."""
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(f"{MARK}=".encode()):
                return word
    return b""


def marked_processes(mark: bytes) -> dict[int, str]:
    """The running processes with a mark, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark and mark in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().rstrip(b"\0") + b" "
                found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@dataclass
class JobResult:
    """What became of a job: exit code, output, seconds, whether it ran out of time, for how long processes of it outlived it, and
    which still ran at last."""

    argv: list[str]
    returncode: int
    stdout: str
    stderr: str
    wall_s: float
    timed_out: bool
    outlived_s: float = 0.0
    leftover: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """The end of both outputs, for a failure message."""
        head = f"exit code {self.returncode} after {self.wall_s:.1f} s" + (
            ", OUT OF TIME" if self.timed_out else ""
        )
        head += f", and {self.outlived_s:.1f} s later {self.leftover}" if self.leftover else ""
        output = f"-- stdout\n{self.stdout[-6000:]}\n-- stderr\n{self.stderr[-6000:]}"
        return f"{' '.join(self.argv)}\n{head}\n{output}"


class Job:
    """A running program; :meth:`end` must be called.

    Args:
        argv: the program and its arguments.
        np: number of ranks under mpirun; None: the program by itself.
        env: variables to add.
        cwd: where to run it.
        forked: ranks are forks of the zygote; else each is a process of its own.
        alone: the program itself, which is no rank and imports torch, is one as well.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        np: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = _REPO,
        forked: bool = True,
        alone: bool = False,
    ) -> None:
        self._token = secrets.token_hex(8)
        whole = {
            **os.environ,
            MARK: self._token,
            # Other tests run beside these: a rank that waits must not keep the core of the one that it waits for.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PYTHONPATH": os.pathsep.join([str(STARTUP), str(_REPO), os.environ.get("PYTHONPATH", "")]),
        }
        if forked:
            # Workers have one together, and a test within a test has the outer one's.
            whole[ZYGOTE_SOCKET] = whole.get(ZYGOTE_SOCKET) or str(ZYGOTE.start())
            if alone:
                whole[ALONE] = "1"
        else:
            whole.pop(ZYGOTE_SOCKET, None)
        whole |= env or {}
        self.argv = list(argv)
        if np is not None:
            cores, is_root = len(os.sched_getaffinity(0)), os.geteuid() == 0
            launcher = find_launcher(whole)
            self.argv, whole = launch_command(
                np, argv, env=whole, launcher=launcher, num_cores=cores, is_root=is_root
            )
        self._begin = time.monotonic()
        self._outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed by end()
        out, err = self._outputs
        self.child = subprocess.Popen(
            self.argv, env=whole, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd
        )

    def wait(self, timeout: float) -> bool:
        """Waits until the program ends; False if it has not after so many seconds since its start."""
        try:
            self.child.wait(max(0.0, timeout - (time.monotonic() - self._begin)))
        except subprocess.TimeoutExpired:
            return False
        return True

    def output_bytes(self) -> tuple[int, int]:
        """How much it has written on standard output and on standard error."""
        out, err = (os.fstat(stream.fileno()).st_size for stream in self._outputs)
        return out, err

    def end(self, *, timed_out: bool = False, since: tuple[int, int] = (0, 0), grace_s: float | None = None) -> JobResult:
        """Ends all processes of the job: at once if it is out of time, else those that outlive it.

        Args:
            timed_out: it still runs, and shall not: SIGTERM to the program, 5 s later SIGKILL to all its processes.
            since: what of its output to leave out, as :meth:`output_bytes` had it.
            grace_s: seconds by which its processes may outlive it; None: `OUTLIVE_S`.
        """
        grace_s = OUTLIVE_S if grace_s is None else grace_s
        leftover: dict[int, str] = {}
        try:
            if timed_out and self.child.poll() is None:
                self.child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.child.wait(GRACE_S)
            wall_s = time.monotonic() - self._begin
            # A launcher may return a moment before its ranks are gone.
            ended = time.monotonic()
            while (leftover := self._processes()) and not timed_out and time.monotonic() < ended + grace_s:
                time.sleep(0.05)
            outlived_s = time.monotonic() - ended
        finally:
            # Until they are gone: whoever comes next may look for them.
            end_s = time.monotonic() + OUTLIVE_S
            left = leftover or self._processes()
            while left and time.monotonic() < end_s:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
                left = self._processes()
        self.child.wait()
        texts = []
        for stream, start in zip(self._outputs, since, strict=True):
            stream.seek(start)
            texts.append(stream.read().decode(errors="replace"))
            stream.close()
        return JobResult(self.argv, self.child.returncode, *texts, wall_s, timed_out, outlived_s, sorted(leftover.values()))

    def _processes(self) -> dict[int, str]:
        return marked_processes(f"{MARK}={self._token}".encode())


def run_job(
    argv: Sequence[str],
    *,
    np: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_S,
    cwd: Path = _REPO,
    during: Callable[[subprocess.Popen[bytes]], None] | None = None,
    grace_s: float | None = None,
    forked: bool = True,
    alone: bool = False,
) -> JobResult:
    """Runs a program, as ``np`` ranks under mpirun unless that is None, and leaves no process of it behind.

    Args:
        argv: the program and its arguments.
        np: number of ranks.
        env: variables to add.
        timeout: seconds; then SIGTERM to the program, 5 s later SIGKILL to all its processes.
        cwd: where to run it.
        during: called once when the program runs, to disturb it; must return where the program has ended.
        grace_s: seconds by which processes of it may outlive it; None: `OUTLIVE_S`.
        forked: as for `Job`.
        alone: as for `Job`.
    """
    job = Job(argv, np=np, env=env, cwd=cwd, forked=forked, alone=alone)
    ended, late = False, threading.Event()

    def give_up() -> None:
        late.set()
        job.child.terminate()
        if not job.wait(timeout + GRACE_S):
            job.child.kill()

    try:
        if during is not None:
            timer = threading.Timer(timeout, give_up)
            timer.start()
            try:
                during(job.child)
            finally:
                timer.cancel()
                timer.join()
        ended = job.wait(timeout) and not late.is_set()
    finally:
        result = job.end(timed_out=not ended, grace_s=grace_s)
    return result
