"""What a test must leave in its rank as it found it: put back where that is simple, else looked for and told."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pkgutil
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Whose functions and methods a test, or the product, might replace.
_WATCHED = ("hvd_adaptive.", "horovod.", "torch.utils.data.", "torch.nn.modules.module.")
_PATIENCE_S = 1.0
_Key = tuple[str, str, str]


class RankState:
    """The state of a rank before its first test."""

    def __init__(self) -> None:
        self._uses_torch = "torch" in sys.modules
        if self._uses_torch:
            _import_watched()
            import torch

            self._num_threads = torch.get_num_threads()
        self._environ = dict(os.environ)
        self._argv, self._path, self._folder = list(sys.argv), list(sys.path), Path.cwd()
        self._hook = sys.excepthook
        self._signals = _signals()
        self._handlers, self._level = list(logging.root.handlers), logging.root.level
        self._threads = set(threading.enumerate())
        self._children = _children()
        self._comm: Any = None
        self._values = _replaceable()

    def restore(self) -> None:
        """Makes of this process what a new one would be, as far as that is possible."""
        # Only what differs: MPI's threads may read the environment meanwhile.
        for name in set(os.environ) - set(self._environ):
            del os.environ[name]
        for name, value in self._environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.argv[:], sys.path[:] = self._argv, self._path
        os.chdir(self._folder)
        sys.excepthook = self._hook
        random.seed()
        if "numpy" in sys.modules:
            import numpy as np

            np.random.seed()
        if self._uses_torch:
            import torch

            torch.seed()
            torch.set_num_threads(self._num_threads)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            if torch.are_deterministic_algorithms_enabled():  # setting it imports much
                torch.use_deterministic_algorithms(False)
        # Modules that the test was the first to import.
        self._values = {**_replaceable(), **self._values}

    def leaks(self) -> list[str]:
        """What else is not as before, in words. COLLECTIVE."""
        gc.collect()
        found = []
        end = time.monotonic() + _PATIENCE_S
        while (threads := set(threading.enumerate()) - self._threads) and time.monotonic() < end:
            time.sleep(0.01)
        if threads:
            found.append(f"threads run: {sorted(thread.name for thread in threads)}")
        while (children := _children() - self._children) and time.monotonic() < end:
            time.sleep(0.01)
        if children:
            found.append(f"processes run: {sorted(children)}")
        else:
            self._forget_workers()
        mpi_ops = sys.modules.get("horovod.torch.mpi_ops")
        if mpi_ops is not None and mpi_ops.is_initialized():
            found.append("Horovod is initialized")
        if _signals() != self._signals:
            found.append("signal handlers differ")
        if (logging.root.handlers, logging.root.level) != (self._handlers, self._level):
            found.append("logging is set up")
        values = dict(_values())
        replaced = [key for key, value in self._values.items() if values.get(key, value) is not value]
        if replaced:
            names = [".".join(filter(None, key)) for key in replaced]
            found.append(f"replaced: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}")
        if self._unread_messages():
            found.append("a message that nobody has received")
        return found

    def _forget_workers(self) -> None:
        """Puts back the handler with which PyTorch, from the first loader on, watches for dead workers; it will set it again."""
        handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
        before = self._signals[signal.SIGCHLD]
        if handling is not None and handling._SIGCHLD_handler_set and signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before)
            handling._SIGCHLD_handler_set = False

    def _unread_messages(self) -> bool:
        from mpi4py import MPI

        if self._comm is None:
            self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Barrier()
        return bool(MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG))


def _import_watched() -> None:
    """Imports what tests may replace something in, so that it is known what was there before."""
    for name in ("horovod.torch.elastic", "torch.utils.data"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    package = sys.modules.get("hvd_adaptive")
    for module in pkgutil.walk_packages(package.__path__, "hvd_adaptive.") if package else ():
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def _values() -> Iterator[tuple[_Key, Any]]:
    """All that modules and their classes hold, by name."""
    for name, module in list(sys.modules.items()):
        if not f"{name}.".startswith(_WATCHED) or module is None:
            continue
        for key, value in list(vars(module).items()):
            yield (name, key, ""), value
            if isinstance(value, type) and value.__module__ == name:
                for attribute, inner in list(vars(value).items()):
                    yield (name, key, attribute), inner


def _replaceable() -> dict[_Key, Any]:
    # Other people's modules keep notes of their own in variables, and Python in classes.
    kinds = (types.FunctionType, types.MethodType, type, staticmethod, classmethod, property)
    return {
        key: value
        for key, value in _values()
        if isinstance(value, kinds) or (key[0].startswith("hvd_adaptive") and not key[2])
    }


def _signals() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _children() -> set[str]:
    """The processes that this one has started and that still run, with their names."""
    found = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in file.read_text().split():
                head, _, tail = (Path("/proc") / pid / "stat").read_text().rpartition(")")
                if tail.split()[0] != "Z":
                    found.add(head.replace("(", "", 1))
    return found
