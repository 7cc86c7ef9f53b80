"""A process that has imported torch and Horovod, and forks the ranks of tests: importing takes longer than most tests.

A rank under mpirun starts as a stub (see startup/stub.py), which sends its descriptors, its environment and all else that a
process inherits. The fork takes that over and runs the program in a new `__main__`. The zygote initializes nothing and starts no
threads. What a fork has in common with the others, and processes of their own have not, is the seed of hashes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import itertools
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from hvd_adaptive.cluster.relaunch import find_launcher, launch_command

STARTUP = Path(__file__).resolve().parent / "startup"
ZYGOTE_SOCKET, ALONE = "HVD_TEST_ZYGOTE", "HVD_TEST_ALONE"  # as in startup/stub.py
_REPO = Path(__file__).resolve().parents[2]
_ROOM_BYTES = 1 << 15  # for the command line of a fork, and for its environment
_CLONE = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "net": 0x40000000}
_PR_SET_PDEATHSIG = 1
_MOST_DESCRIPTORS = 64
_PLAIN = "HVD_TEST_PLAIN_LIBRARY_PATH"
_LIBRARIES = (
    "horovod.torch.elastic", "torch._dynamo", "torch.distributed", "torch.utils.data", "mpi4py", "numba", "safetensors.torch",
    "functorch.compile", "networkx", "rich.progress", "numpy.random", "pytest", "_pytest.fixtures", "unittest.mock",
    "sklearn.datasets", "jinja2", "torch.utils.tensorboard",
)  # fmt: skip


class Zygote:
    """The zygote of a test run. It ends with `close`, or with this process."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket

    def start(self, *, wait: bool = True) -> Path:
        """Starts it if it does not run; returns the socket where ranks find it, and wait until it is ready.

        Args:
            wait: until it is ready, so that the limit of the first job need not have room for that.
        """
        if self._folder is None:
            atexit.register(self.close)
            self._folder = Path(tempfile.mkdtemp(prefix="hvd-zygote-"))
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(STARTUP), str(_REPO), os.environ.get("PYTHONPATH", "")]),
                # As ranks that `-np` has started.
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "HVD_TEST_ROOM": "x" * _ROOM_BYTES,
                _PLAIN: os.environ.get("LD_LIBRARY_PATH", ""),
                **_of_ranks(),
            }
            path = self._folder / "socket"
            self._lifeline, its_end = socket.socketpair()
            with socket.socket(socket.AF_UNIX) as listener, (self._folder / "log").open("wb") as log, its_end:
                listener.bind(str(path))
                listener.listen(64)
                self._child = subprocess.Popen(
                    [sys.executable, __file__, str(listener.fileno()), "x" * _ROOM_BYTES],
                    env=environment, stdin=its_end, stdout=log, stderr=log, pass_fds=[listener.fileno()],
                    start_new_session=True,
                )  # fmt: skip
            if wait and not self._lifeline.recv(1):
                raise RuntimeError(f"the zygote did not start: {self.close()}")
        return self._folder / "socket"

    def close(self) -> str:
        """Ends it; returns how many ranks it has forked, and what it has said besides."""
        if self._child is None or self._folder is None:
            return ""
        self._lifeline.close()
        self._child.wait(60)
        said = (self._folder / "log").read_text(errors="replace")
        for file in self._folder.iterdir():
            file.unlink()
        self._folder.rmdir()
        self._folder = self._child = None
        return said


def _of_ranks() -> dict[str, str]:
    """What the launcher adds to the libraries that ranks find."""
    try:
        launcher = find_launcher(os.environ)
    except RuntimeError:
        return {}
    argv = ["printenv", "LD_LIBRARY_PATH"]
    command, env = launch_command(1, argv, env=os.environ, launcher=launcher, num_cores=1, is_root=os.geteuid() == 0)
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout.strip()
    return {"LD_LIBRARY_PATH": said} if said else {}


def stub_of(pid: int) -> int:
    """The process that stands for a fork where its launcher looks."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().rstrip(b"\0") == f"stub of {pid}".encode():
                return int(folder.name)
        except OSError:
            continue
    raise ProcessLookupError(f"{pid} has no stub")


class _Fork(BaseException):
    """In a fork: leaves the server's loop, so that the program runs where the server began."""


class _Server:
    def __init__(self, listener: socket.socket, own: dict[str, Any], threads: str) -> None:
        self._listener = listener
        self._own = own
        self._threads = threads
        self._spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in _CLONE}
        self._selector = selectors.DefaultSelector()
        self._stubs: dict[int, socket.socket] = {}
        self._num_forks = 0
        self._cpu_s = 0.0
        self._others: Counter[str] = Counter()  # ranks that run in processes of their own, by the reason
        self._wakeup, self._woken = os.pipe()
        for descriptor in (self._wakeup, self._woken):
            os.set_blocking(descriptor, False)

    def serve(self) -> None:
        """Forks until standard input ends. Raises _Fork in a fork."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken)
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError):  # the end is read next
            os.write(0, b"r")
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    for pid in self._stubs:
                        os.kill(pid, signal.SIGKILL)
                    others = "; ".join(f"{count} not, for {reason}" for reason, count in self._others.most_common())
                    forked = f"{self._num_forks} ranks were forked, and used {self._cpu_s:.0f} s of CPU"
                    print(f"{forked}; {others}" if others else forked)
                    return
                if key.fileobj == self._wakeup:
                    os.read(self._wakeup, 1 << 12)
                    self._reap()
                elif key.fileobj is self._listener:
                    self._take(self._listener.accept()[0])
                elif key.data in self._stubs:
                    # The stub says nothing any more: it was killed.
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)

    def _take(self, stub: socket.socket) -> None:
        stub.settimeout(60)
        try:
            head, descriptors, _, _ = socket.recv_fds(stub, 4, _MOST_DESCRIPTORS)
            if len(head) < 4:
                raise ConnectionError("the stub was killed at its start")
            length, text = int.from_bytes(head, "big"), b""
            while len(text) < length:
                if not (part := stub.recv(length - len(text))):
                    raise ConnectionError("the stub has ended")
                text += part
        except OSError as error:
            print(f"a rank was not understood: {error!r}", flush=True)
            stub.close()
            return
        request = json.loads(text)
        variables = request["variables"]
        # Other launchers than mpirun add no folder of libraries, and their ranks find the same ones.
        if variables["LD_LIBRARY_PATH"] == os.environ[_PLAIN]:
            variables["LD_LIBRARY_PATH"] = self._own["variables"]["LD_LIBRARY_PATH"]
        other = next((name for name, value in self._own.items() if request[name] != value), None)
        # A fork would have one of the threads.
        if reason := self._threads or (other and f"other {other}{_difference(request[other], self._own[other])}"):
            self._others[reason] += 1
            stub.sendall(json.dumps({"refused": reason}).encode() + b"\n")
            stub.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        pid_of_stub = int.from_bytes(stub.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wakeup)
            os.close(self._woken)
            for connection in (self._listener, stub, *self._stubs.values()):
                connection.close()
            raise _Fork(request, descriptors, pid_of_stub, self._spaces)
        for descriptor in descriptors:
            os.close(descriptor)
        self._num_forks += 1
        self._stubs[pid] = stub
        self._selector.register(stub, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):  # it was killed, as is seen by the next select
            stub.sendall(json.dumps({"pid": pid}).encode() + b"\n")

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._cpu_s += used.ru_utime + used.ru_stime
            stub = self._stubs.pop(pid)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(stub)
            with contextlib.suppress(OSError):
                stub.sendall(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
            stub.close()


def _difference(request: Any, own: Any) -> str:
    if not isinstance(own, dict):
        return ""
    return " " + ", ".join(sorted(name for name in {*request, *own} if request.get(name) != own.get(name)))


def _import_all(ancestors: dict[int, int]) -> str:
    """Imports what ranks do; returns the first import after which more threads than one ran, or nothing."""
    from hvd_adaptive.comm import launcher_end

    find = launcher_end.find_launcher_process

    def find_launcher_process(pid: int, *options: Any) -> Any:
        # A fork's parent is the zygote; its launcher is its stub's.
        return find(ancestors.get(pid, pid), *options)

    launcher_end.find_launcher_process = find_launcher_process
    from hvd_adaptive import cli

    main = cli.main
    own = (module.name for module in pkgutil.walk_packages([str(_REPO / "hvd_adaptive")], "hvd_adaptive."))
    first = ""
    for name in itertools.chain(_LIBRARIES, own):
        if not name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
            first = first or (name if _other_threads() else "")
    cli.main = main  # and not the module of that name
    return first


def _other_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names += [] if task.name == str(os.getpid()) else [task.joinpath("comm").read_text().strip()]
    return names


def _warm_up() -> None:
    """Loads the kernels that each rank would load by itself, or where they are not kept on the disk compile."""
    import torch

    from hvd_adaptive.compress import parse_codec
    from hvd_adaptive.compress.codec import of_values

    for spec in ("maxmin:4", "normal:2"):
        codec, values = of_values(parse_codec(spec)), torch.ones(64)
        payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8)
        codec.encode_(values, payload, key=1)
        codec.decode_(payload, values)


def _inherit(request: dict[str, Any], descriptors: list[int], stub: int, spaces: dict[str, str]) -> None:
    """Takes over what a process has from the one that starts it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    for name, flag in _CLONE.items():
        space = f"/proc/{stub}/ns/{name}"
        try:
            is_mine = os.readlink(space) == spaces[name]
        except FileNotFoundError:
            os._exit(1)  # it was killed
        if not is_mine:
            with open(space) as file:
                if libc.setns(file.fileno(), flag):
                    raise OSError(ctypes.get_errno(), f"setns {space}")
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.fchdir(descriptors[3])
    # Beyond all numbers that they shall have, as these may be taken.
    others = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in descriptors[4:]]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(request["descriptors"], others, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["affinity"])
    os.nice(request["nice"] - os.nice(0))
    environ = {name.encode("latin-1"): value.encode("latin-1") for name, value in request["environ"].items()}
    # All at once: what is left of the old ones would point to what is written over.
    os.environ.clear()
    os.environb.update(environ)
    # Importing MPI takes signals that were ignored, too.
    caught = int(next(line for line in open("/proc/self/status") if line.startswith("SigCgt")).split()[1], 16)  # noqa: SIM115
    for number in request["ignored"]:
        if not caught >> (number - 1) & 1:
            signal.signal(number, signal.SIG_IGN)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or request["orig_argv"][1] == "-u"
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            open(number, "wb", buffering=0 if unbuffered else -1, closefd=False),  # noqa: SIM115
            encoding=getattr(sys, name).encoding,
            errors="backslashreplace" if number == 2 else getattr(sys, name).errors,
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv, sys.orig_argv, sys.path[:] = request["argv"], request["orig_argv"], request["path"]
    sys.path_importer_cache.clear()
    import numpy as np
    import torch

    np.random.seed()
    torch.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0] or len(os.sched_getaffinity(0))))
    own, parent, getppid = os.getpid(), request["parent"], os.getppid
    os.getppid = lambda: parent if os.getpid() == own else getppid()
    from stub import show

    show(request["orig_argv"], environ)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _run_program() -> None:
    """Runs what the command line says, as Python does."""
    from stub import program_words

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if "FAULT_SPEC" in os.environ:
        importlib.import_module("faulty").main()
    kind, *words = program_words(sys.orig_argv)
    if kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[1:]], [""]
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv, sys.path[:0] = ["-m", *words[1:]], [os.getcwd()]
        runpy._run_module_as_main(words[0])
    else:
        sys.argv, sys.path[:0] = [kind, *words], [str(Path(kind).resolve().parent)]
        loader = importlib.machinery.SourceFileLoader("__main__", kind)
        main.__dict__.update(__file__=kind, __loader__=loader, __cached__=None)
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def _serve(listener: int) -> tuple[Any, ...]:
    """Serves until the end, which is the process's; returns in a fork."""
    from stub import identity

    own = json.loads(json.dumps(identity()))
    ancestors: dict[int, int] = {}
    first = _import_all(ancestors)
    _warm_up()
    others = _other_threads()
    threads = f"threads that run since {first or 'codecs'} came: {', '.join(others)}" if others else ""
    gc.collect()
    gc.freeze()
    try:
        _Server(socket.socket(fileno=listener), own, threads).serve()
    except _Fork as fork:
        ancestors[os.getpid()] = fork.args[2]
        return fork.args
    sys.stdout.flush()
    os._exit(0)


def _leave(code: int) -> NoReturn:
    """Ends as Python does, but for deleting what is there, which takes a second where torch is loaded."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if (module := sys.modules.get("mpi4py.MPI")) is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()
    os._exit(code)


if __name__ == "__main__":
    _inherit(*_serve(int(sys.argv[1])))
    code: Any = None
    try:
        _run_program()
    except SystemExit as leaving:
        code = leaving.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Without this file's lines.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    _leave(code or 0)
