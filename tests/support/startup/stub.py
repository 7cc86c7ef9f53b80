"""A rank hands itself over to the zygote (see support/zygote.py): a fork of that one, which has torch already, runs its program.

This process stays as what the launcher knows of the rank. It passes signals on, ends as the fork ends, and the fork with it. Only
what takes no time is imported here.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

ZYGOTE = "HVD_TEST_ZYGOTE"  # set in the processes of a test run: the zygote's socket
ALONE = "HVD_TEST_ALONE"  # set for the first one of a job that is no rank, and shall be a fork as well
# What a library reads when it is loaded: a fork would have the zygote's. (Of KMP_, which scikit-learn sets, no library is there.)
FIXED = ("LD_", "PYTHON", "MKL_", "GOMP_", "OPENBLAS_", "TORCH_", "NUMBA_")
# Not read by then, or handed over; the last one only decides which warnings torch's C++ shows.
_FREE = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_CPP_LOG_LEVEL",
)  # fmt: skip
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK", "TORCHELASTIC_RUN_ID")
_MINE = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}
# Where a process of another one of these cannot be made from outside.
_SPACES = ("pid", "user", "time", "cgroup")


def fixed_variables() -> dict[str, str]:
    """The variables of this process that a fork cannot change any more."""
    found = {name: value for name, value in os.environ.items() if name.startswith(FIXED) and name not in _FREE and value}
    # Each launcher puts its folder in front once more; on another host it also leaves an empty name, which finds nothing there.
    found["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(filter(None, found.get("LD_LIBRARY_PATH", "").split(":"))))
    return found


def identity() -> dict[str, Any]:
    """What this process and the zygote must have in common."""
    flags = [getattr(sys.flags, name) for name in sys.flags.__match_args__ if name not in ("utf8_mode", "dont_write_bytecode")]
    return {
        # PYTHONUTF8 changes nothing where all is UTF-8 anyway.
        "python": [sys.executable, sys.version, flags, sys.stdout.encoding, sys.warnoptions, sys._xoptions],
        "variables": fixed_variables(),
        "spaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in _SPACES},
        "cgroup": open("/proc/self/cgroup").read(),
    }


def show(words: list[str], variables: "dict[bytes, bytes] | None" = None) -> None:
    """Has the system show other words as this process's command line, and other variables as its environment.

    They are written over those with which it began, and what does not fit is left out.
    """
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    with open("/proc/self/mem", "r+b", buffering=0) as memory:

        def write(texts: list[bytes], begin: int, end: int) -> None:
            memory.seek(begin)
            memory.write(b"".join(text + b"\0" for text in texts)[: end - begin - 1].ljust(end - begin, b"\0"))

        write([os.fsencode(word) for word in words], int(fields[45]), int(fields[46]))
        if variables is not None:
            write([name + b"=" + value for name, value in variables.items()], int(fields[47]), int(fields[48]))


def hand_over() -> None:
    """Becomes the stub of a fork of the zygote, if this process is a rank that can be one."""
    if not _is_rank():
        return
    inherited = _inherited()
    ignored = [n for n in signal.valid_signals() - _PYTHON_IGNORES if signal.getsignal(n) == signal.SIG_IGN]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ZYGOTE])
        request = {
            **identity(),
            "argv": sys.argv,
            "orig_argv": sys.orig_argv,
            "path": sys.path,
            "environ": {name.decode("latin-1"): value.decode("latin-1") for name, value in os.environb.items()},
            "ignored": ignored,
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "affinity": list(os.sched_getaffinity(0)),
            "nice": os.nice(0),
            "umask": _umask(),
            "parent": os.getppid(),
            "descriptors": inherited,
        }
        text = json.dumps(request).encode()
        folder = os.open(".", os.O_RDONLY)
        socket.send_fds(connection, [len(text).to_bytes(4, "big")], [0, 1, 2, folder, *inherited])
        connection.sendall(text)
        os.close(folder)
        _stand_for_fork(connection, inherited)


def _is_rank() -> bool:
    is_alone = os.environ.pop(ALONE, None) is not None
    if not (is_alone or any(name in os.environ for name in _RANKS)) or '"clock_s"' in os.environ.get("FAULT_SPEC", ""):
        return False
    # With options of Python but torchrun's, and as one of multiprocessing's, it stays what it is.
    words = program_words(sys.orig_argv)
    return bool(words) and (words[0] in ("-c", "-m") or os.path.isfile(words[0])) and "multiprocessing" not in " ".join(words)


def program_words(argv: "list[str]") -> "list[str]":
    """A command line without Python itself, and without its -u."""
    return argv[2:] if argv[1:2] == ["-u"] else argv[1:]


def _inherited() -> list[int]:
    """The descriptors beside the first three that this process was given."""
    with os.scandir("/proc/self/fd") as entries:
        return sorted(int(entry.name) for entry in entries if int(entry.name) > 2 and _is_inherited(entry.name))


def _is_inherited(number: str) -> bool:
    try:
        return os.get_inheritable(int(number))
    except OSError:
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _stand_for_fork(connection: socket.socket, inherited: "list[int]") -> None:
    """Waits for the fork's end, and ends likewise; comes back if there is none."""
    fork = 0
    early: list[int] = []

    def pass_on(number: int, frame: "FrameType | None") -> None:
        if fork:
            with suppress(ProcessLookupError):
                os.kill(fork, number)
        else:
            early.append(number)

    before = {}
    for number in signal.valid_signals() - _MINE:
        if number <= signal.SIGSYS and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, pass_on)
    stream = connection.makefile("r")
    answer = json.loads(stream.readline())
    if "refused" in answer:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in early:
            os.kill(os.getpid(), number)
        return
    fork = answer["pid"]
    for number in early:
        pass_on(number, None)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    # Whoever reads the other end is to see when the fork closes this one.
    for descriptor in inherited:
        os.close(descriptor)
    with open("/proc/self/comm", "w") as name:
        name.write("rank-stub")
    show([f"stub of {fork}"])
    line = stream.readline()
    code = json.loads(line)["code"] if line else 1
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code)
