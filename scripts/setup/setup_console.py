"""What the person sees: lines, a progress line during long commands, and the reasons of a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from setup_options import SetupError

_PLAIN_INTERVAL_S = 15.0
_TERMINAL_INTERVAL_S = 0.5
_MAX_REASON_LINES = 12
_PERCENT = re.compile(r"\[\s*(\d+)%\]")
_REASON = re.compile(
    r"\berror\b[: ]|\bfatal error\b|CMake Error|undefined reference|cannot find -l|\*\*\* \["
    r"|internal compiler error|No space left|Killed|not found|No matching distribution|Could not find"
    r"|Connection|Traceback",
    re.IGNORECASE,
)
_STRONG = re.compile(
    r"\b(fatal )?error:|CMake Error|undefined reference|cannot find -l|No space left|Killed|ERROR:"
)
# pip's own words around a failed build, which do not say why.
_PIP_FRAME = re.compile(
    r"subprocess-exited-with-error|Failed building wheel|Failed to build|did not run successfully"
)
_CMAKE_MESSAGE_LINES = 6
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"Killed|internal compiler error|cannot allocate",
        "the compiler ran out of memory: MAKEFLAGS=-j1 scripts/setup.sh",
    ),
    (r"No space left", "the disk is full: free some, or set TMPDIR and XDG_CACHE_HOME to a larger one"),
    (r"Python\.h", "Python's headers are missing: Debian's python3-dev, or another --python"),
    (r"C\+\+17|unrecognized command.line option|filesystem: No such", "needs GCC 9 or newer: set CXX to one"),
    (r"Could not find.*MPI|mpi\.h", "the MPI has no C++ headers: load its development files, or --mpi pypi"),
    (r"nccl", "NCCL with headers is needed: set HOROVOD_NCCL_HOME to it"),
    (
        r"CUDA_HOME|CUDAToolkit|nvcc",
        "the CUDA toolkit is needed: module load cuda, or set HOROVOD_CUDA_HOME to it",
    ),
    (
        r"CXX compiler|is not able to compile",
        "the C++ compiler does not work: check `$CXX --version`, or unset CXX",
    ),
    (
        r"No matching distribution|Could not find a version",
        "no such package there: check the network, pip's "
        "settings (pip config list), or the folder given to --offline",
    ),
    (
        r"Connection|timed out|Temporary failure|Name or service",
        "the package index cannot be reached: check the network and the proxy, or use --offline DIR",
    ),
)


def say(message: str) -> None:
    """Prints one line on stdout."""
    print(f"setup: {message}", flush=True)


def warn(message: str) -> None:
    """Prints one warning on stderr."""
    print(f"setup: warning: {message}", file=sys.stderr, flush=True)


def format_elapsed(seconds: float) -> str:
    """Minutes and seconds, as in "2:05"."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def failure_reasons(lines: Sequence[str]) -> list[str]:
    """The lines of a failed command's output that say why: compiler errors, else the last lines; at most 12.

    Args:
        lines: the output, oldest first.
    """
    strong: list[str] = []
    num_following = 0
    for line in (line.strip() for line in lines if line.strip()):
        if _PIP_FRAME.search(line):
            continue
        if _STRONG.search(line):
            num_following = _CMAKE_MESSAGE_LINES if "CMake Error" in line else 0
            strong.append(line)
        elif num_following:
            num_following -= 1
            strong.append(line)
    weak = [line.strip() for line in lines if _REASON.search(line)]
    last = [line.strip() for line in lines if line.strip()][-_MAX_REASON_LINES:]
    return list(dict.fromkeys(strong or weak or last))[:_MAX_REASON_LINES]


def hints(lines: Sequence[str]) -> list[str]:
    """What to do about the causes that are recognized in a failed command's reasons; empty if none is."""
    text = "\n".join(lines)
    return [remedy for pattern, remedy in _HINTS if re.search(pattern, text, re.IGNORECASE)]


class _Progress:
    """One line that is rewritten on a terminal, plain lines about every 15 s elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._terminal = sys.stdout.isatty()
        self._start_s = time.monotonic()
        self._percent: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Progress:
        say(f"{self._label} ...")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._terminal:
            print("\r\033[K", end="", flush=True)

    def note(self, line: str) -> None:
        """Takes the percentage from a line of make's output, if it has one."""
        match = _PERCENT.search(line)
        if match:
            self._percent = int(match.group(1))

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def _run(self) -> None:
        interval_s = _TERMINAL_INTERVAL_S if self._terminal else _PLAIN_INTERVAL_S
        while not self._done.wait(interval_s):
            percent = "" if self._percent is None else f"{self._percent:3d} %  "
            text = f"setup:   {self._label}: {percent}{format_elapsed(self.elapsed_s())} elapsed"
            print(
                f"\r\033[K{text}" if self._terminal else text, end="" if self._terminal else "\n", flush=True
            )


def run_logged(
    command: Sequence[str | Path], *, label: str, log: Path, environment: Mapping[str, str], advice: str = ""
) -> None:
    """Runs a command with a progress display; its output goes to the log.

    Args:
        command: program and arguments.
        label: what is being done, for the display.
        log: file that the output is appended to.
        environment: the command's whole environment.
        advice: what to do if it fails and nothing better is recognized.

    Raises:
        SetupError: it did not start or exited non-zero; the message has the error lines, remedy and log.
    """
    text = [str(part) for part in command]
    output: deque[str] = deque(maxlen=20000)
    with log.open("a", encoding="utf-8") as sink, _Progress(label) as progress:
        sink.write(f"\n$ {' '.join(text)}\n")
        sink.flush()
        try:
            process = subprocess.Popen(
                text,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise SetupError(f"{label} failed: {text[0]} does not start: {error}") from error
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sink.write(line)
                output.append(line)
                progress.note(line)
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        elapsed_s = progress.elapsed_s()
    if code == 0:
        say(f"{label}: done in {format_elapsed(elapsed_s)}")
        return
    reasons = failure_reasons(list(output))
    remedies = hints(reasons) or ([advice] if advice else [])
    message = [f"{label} failed after {format_elapsed(elapsed_s)} (exit code {code}):"]
    message += [f"    {line}" for line in reasons]
    message += [f"  what to do: {remedy}" for remedy in remedies]
    message += [f"  full log: {log}"]
    raise SetupError("\n".join(message))


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a command and its children: they lead a process group of their own."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
