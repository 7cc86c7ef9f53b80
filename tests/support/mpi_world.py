"""Worlds of MPI ranks that run tests in turn: starting ranks takes longer than most tests.

Each rank is a pytest of its own (see mpi_rank) that waits for the name of the next test. A world ends with the session, with a
test that fails or hangs, and with one that leaves something behind: the next test has a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest
from jobs import TIMEOUT_S, Job

REPORTS = "HVD_TEST_REPORTS"  # set in ranks: the world's folder
SHARED = "HVD_TEST_SHARED"  # set in ranks: the test's folder of all ranks
WORLD = "HVD_TEST_WORLD_SIZE"
SOCKET = "socket"
_START_S = 180.0  # importing torch on every rank of a busy machine
_END_S = 60.0
_GRACE_S = 2.0
_STACKS_S = 30.0
_POLL_S = 0.2


def node_name(item: pytest.Item) -> str:
    """A test's name that does not depend on from where it was collected."""
    return str(item.path) + item.nodeid[item.nodeid.index("::") :]


def num_ranks(item: pytest.Item) -> int:
    """How many ranks a test is for; 0 if it is none for ranks."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("mpi"):
        return int(item.callspec.params["num_ranks"])
    return 0


class _World:
    """N waiting ranks. Construction starts them and returns at once."""

    def __init__(self, size: int, paths: Sequence[Path], config: pytest.Config) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="hvd-test-"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._folder / SOCKET))
        self._server.listen(size)
        self._ranks: dict[int, tuple[socket.socket, TextIO]] = {}
        self._pids: list[int] = []
        self._is_paused = False
        self._selector = selectors.DefaultSelector()
        self._num_tests = 0
        self._before = (0, 0)
        options = ["-q", "--no-header", "--no-summary", "--color=no", "-p", "no:cacheprovider", "--rootdir", str(config.rootpath)]
        if config.inipath is not None:
            options += ["-c", str(config.inipath)]
        self._job = Job(
            [sys.executable, "-m", "pytest", *options, *map(str, paths)],
            np=size,
            env={
                REPORTS: str(self._folder),
                WORLD: str(size),
                # Hypothesis's imports all of hypothesis at a rank's end, for 2 s of CPU.
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                # Other tests run beside these: threads of one rank would spin until the next one gets a core.
                "OMP_NUM_THREADS": "1",
                # As the product has it (hvd_adaptive/comm): closing it takes a second.
                "OMPI_MCA_btl": "^ofi",
            },
        )

    def run(self, item: pytest.Item, timeout: float) -> list[str]:
        """Runs one test on all ranks; returns what was wrong. The ranks may be used again if nothing was."""
        if not self._ranks and (text := self._connect()):
            return [text]
        name = node_name(item)
        self._before = self._job.output_bytes()
        shared = self._folder / f"shared{self._num_tests}"
        shared.mkdir()
        self._num_tests += 1
        answers, in_time = self._ask({"run": name, "shared": str(shared)}, timeout)
        failures = [] if in_time else [f"not done after {timeout:g} s"]
        silent = sorted(set(range(self.size)) - set(answers))
        stacks = self._kill() if silent else {}
        for rank in range(self.size):
            if rank in answers:
                failures += [f"rank {rank} {text}" for text in _judge(answers[rank], item.name)]
            else:
                where = f"; when it was ended it stood at\n{stacks[rank]}" if stacks.get(rank) else ""
                failures.append(f"rank {rank} did not run {item.name} to its end{where}")
        return failures

    def leaks(self) -> list[str]:
        """What the last test has left behind in the ranks. Only after one that passed."""
        answers, _ = self._ask({"check": True}, _END_S)
        leaks = [f"rank {rank}: {text}" for rank, answer in sorted(answers.items()) for text in answer["leaks"]]
        return leaks + [f"rank {rank} does not answer" for rank in range(self.size) if rank not in answers]

    def pause(self, is_paused: bool) -> None:
        """Stops the ranks, or lets them go on: threads of libraries kept four idle ranks at a twentieth of a core each."""
        if is_paused != self._is_paused:
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if is_paused else signal.SIGCONT)
            self._is_paused = is_paused

    def end(self) -> list[str]:
        """Lets the ranks end by themselves; returns what was wrong with that."""
        failures = []
        self.pause(False)
        self._hang_up()
        deadline = time.monotonic() + _END_S
        while self._job.child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        result = self._job.end(timed_out=self._job.child.poll() is None, since=self._before)
        if result.timed_out:
            failures.append(f"all ranks passed, but the job did not end within {_END_S:g} s")
        elif result.returncode:
            failures.append("all ranks passed, but the job did not end well")
        if result.leftover and not result.timed_out:
            failures.append(f"processes outlived the job: {result.leftover}")
        self._close()
        return [*failures, "-- the job", result.describe()] if failures else []

    def kill(self) -> str:
        """Ends the ranks whatever they do; returns the job's output since the last test began."""
        self._hang_up()
        result = self._job.end(timed_out=True, since=self._before)
        result.timed_out = False  # it was one test that was, if any
        self._close()
        return result.describe()

    def _hang_up(self) -> None:
        self._server.close()
        for connection, stream in self._ranks.values():
            stream.close()
            connection.close()

    def _close(self) -> None:
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> dict[int, str]:
        """Sends SIGTERM; returns where each rank stood then."""
        if self._job.child.poll() is None:
            self._job.child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._job.child.wait(_STACKS_S)
        files = {rank: self._folder / f"rank{rank}.stacks" for rank in range(self.size)}
        return {rank: file.read_text() for rank, file in files.items() if file.exists()}

    def _connect(self) -> str | None:
        self._server.settimeout(_POLL_S)
        deadline = time.monotonic() + _START_S
        while len(self._ranks) < self.size:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                if self._job.child.poll() is not None:
                    return "the ranks ended before they were ready"
                if time.monotonic() > deadline:
                    return f"only {len(self._ranks)} of {self.size} ranks were ready after {_START_S:g} s"
                continue
            connection.settimeout(_END_S)
            stream = connection.makefile("r", encoding="utf-8")
            hello = json.loads(stream.readline())
            rank = int(hello["rank"])
            self._ranks[rank] = connection, stream
            self._pids.append(hello["pid"])
            self._selector.register(connection, selectors.EVENT_READ, rank)
        return None

    def _ask(self, message: dict[str, Any], timeout: float) -> tuple[dict[int, Any], bool]:
        """Sends all ranks a message; returns the answers of those that gave one, and whether there was time for all."""
        for connection, _ in self._ranks.values():
            with contextlib.suppress(OSError):  # it has ended, as is seen below
                connection.sendall(json.dumps(message).encode() + b"\n")
        answers: dict[int, Any] = {}
        gone: set[int] = set()
        deadline = end = time.monotonic() + timeout
        while len(answers) + len(gone) < self.size and time.monotonic() < end:
            for key, _ in self._selector.select(_POLL_S):
                rank = key.data
                try:
                    line = self._ranks[rank][1].readline()
                except OSError:
                    line = ""
                if line.endswith("\n"):
                    answers[rank] = json.loads(line)
                else:
                    self._selector.unregister(key.fileobj)
                    gone.add(rank)
            failed = any(_is_bad(outcome) for answer in answers.values() for outcome in answer.get("outcomes", []))
            if failed or gone or self._job.child.poll() is not None:
                # The others may wait for this rank: a moment to fail by themselves.
                end = min(end, time.monotonic() + _GRACE_S)
        complete = len(answers) == self.size
        return answers, complete or time.monotonic() < deadline


def _is_bad(outcome: dict[str, str]) -> bool:
    return outcome["outcome"] != "passed"


def _judge(answer: dict[str, Any], name: str) -> list[str]:
    """What was wrong on a rank; nothing if it ran the test of that name, and it passed."""
    outcomes = answer["outcomes"]
    bad = [outcome for outcome in outcomes if _is_bad(outcome)]
    if bad:
        return [f"{o['outcome']} in {o['when']}:\n{o['text']}" for o in bad]
    calls = [outcome["name"] for outcome in outcomes if outcome["when"] == "call"]
    return [] if calls == [name] else [f"did not run {name}, but {calls}{answer['errors']}"]


class Worlds:
    """The worlds of a test session, at most one at a time for each number of ranks.

    Args:
        config: pytest's.
        items: all tests of the session that are for ranks.
    """

    def __init__(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        self._config = config
        self._paths: dict[int, list[Path]] = {}
        for item in items:
            paths = self._paths.setdefault(num_ranks(item), [])
            if item.path not in paths:
                paths.append(item.path)
        self._open: dict[int, _World] = {}
        self.num_started = 0
        self.num_tests = 0
        self.left_behind: list[str] = []

    def run(self, item: pytest.Item) -> list[str]:
        """Runs a test; returns what was wrong."""
        size = num_ranks(item)
        mark = item.get_closest_marker("mpi")
        assert mark is not None
        world = self._open.pop(size, None)
        if world is None:
            world = _World(size, self._paths[size], self._config)
            self.num_started += 1
        world.pause(False)
        self.num_tests += 1
        try:
            failures = world.run(item, float(mark.kwargs.get("timeout", TIMEOUT_S)))
        except BaseException:
            world.kill()
            raise
        if failures:
            return [*failures, "-- the job", world.kill()]
        leaks = world.leaks()
        if leaks:
            self.left_behind.append(f"{item.nodeid}: {'; '.join(leaks)}")
            return world.end()
        self._open[size] = world
        return []

    def keep_awake(self, size: int) -> None:
        """Stops all worlds but the next test's, which is for `size` ranks, 0: for none."""
        for other, world in self._open.items():
            world.pause(other != size)

    def close(self) -> list[str]:
        """Lets the ranks that are left end; returns what was wrong with that."""
        failures = [text for world in self._open.values() for text in world.end()]
        self._open.clear()
        return failures
