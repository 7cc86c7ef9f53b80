"""Runs tests marked ``@pytest.mark.mpi(N, ...)`` as N ranks under mpirun, and starts whole jobs for tests.

Under plain pytest such a test is not called: its node is run again by ``mpirun -np N python -m pytest NODE``,
each rank writes down what became of it, and it passes only if every rank ran exactly that test in a world of
N and it passed there. Options of the mark: ``timeout`` in seconds (120 if not given).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.metadata
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.launch.binding import read_launcher
from hvd_adaptive.launch.relaunch import find_launcher, launch_command

_REPORTS = "HVD_TEST_REPORTS"  # set in ranks: the folder for what became of the test
_WORLD = "HVD_TEST_WORLD_SIZE"
_JOB = "HVD_TEST_JOB"  # set in every process of a job, so that all of them can be found
_TIMEOUT_S = 120.0
_GRACE_S = 5.0
_REPO = Path(__file__).resolve().parents[1]


@dataclass
class JobResult:
    """What became of a job: exit code, output, seconds, whether it ran out of time, and who outlived it."""

    argv: list[str]
    returncode: int
    stdout: str
    stderr: str
    wall_s: float
    timed_out: bool
    leftover: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """The end of both outputs, for a failure message."""
        head = f"exit code {self.returncode} after {self.wall_s:.1f} s" + (
            ", OUT OF TIME" if self.timed_out else ""
        )
        output = f"-- stdout\n{self.stdout[-6000:]}\n-- stderr\n{self.stderr[-6000:]}"
        return f"{' '.join(self.argv)}\n{head}\n{output}"


def _job_processes(token: str) -> dict[int, str]:
    """The running processes of a job, found by its mark in their environment, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_JOB}={token}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found


def _kill(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def run_job(
    argv: Sequence[str],
    *,
    np: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT_S,
    cwd: Path = _REPO,
    during: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> JobResult:
    """Runs a program, as ``np`` ranks under mpirun unless that is None, and leaves no process of it behind.

    Args:
        argv: the program and its arguments.
        np: number of ranks.
        env: variables to add.
        timeout: seconds; then SIGTERM to the program, 5 s later SIGKILL to all its processes.
        cwd: where to run it.
        during: called once when the program runs, to disturb it.
    """
    token = secrets.token_hex(8)
    whole = {
        **os.environ,
        _JOB: token,
        "PYTHONPATH": os.pathsep.join([str(_REPO), os.environ.get("PYTHONPATH", "")]),
    }
    whole |= env or {}
    command = list(argv)
    if np is not None:
        cores = len(os.sched_getaffinity(0))
        launcher, root = find_launcher(whole), os.geteuid() == 0
        command, whole = launch_command(np, argv, env=whole, launcher=launcher, num_cores=cores, is_root=root)
    begin = time.monotonic()
    timed_out = False
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            command, env=whole, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd
        )
        try:
            if during is not None:
                during(child)
            child.wait(timeout - (time.monotonic() - begin))
        except subprocess.TimeoutExpired:
            timed_out = True
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
        finally:
            wall_s = time.monotonic() - begin
            # A launcher may return a moment before its ranks are gone.
            end = time.monotonic() + _GRACE_S
            while (leftover := _job_processes(token)) and not timed_out and time.monotonic() < end:
                time.sleep(0.05)
            _kill(list(leftover), signal.SIGKILL)
            child.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return JobResult(command, child.returncode, *texts, wall_s, timed_out, sorted(leftover.values()))


def require_mpirun() -> None:
    """Skips the test where there is no mpirun; in CI fails it, as nothing may be skipped there."""
    try:
        find_launcher(os.environ)
    except RuntimeError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must have an MPI: {error}")
        pytest.skip(f"no mpirun: {error}")


@pytest.fixture(name="run_job")
def run_job_fixture() -> Callable[..., JobResult]:
    """`run_job`, for tests that start jobs themselves; `np` needs an mpirun."""

    def run(argv: Sequence[str], *, np: int | None = None, **options: Any) -> JobResult:
        if np is not None:
            require_mpirun()
        return run_job(argv, np=np, **options)

    return run


@pytest.fixture
def shared_tmp_path(tmp_path: Path) -> Path:
    """A folder that all ranks of an mpi test share (`tmp_path` is each rank's own)."""
    return Path(os.environ[_REPORTS]) / "shared" if _REPORTS in os.environ else tmp_path


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "mpi(*num_ranks, timeout=120): run the test as that many ranks under mpirun"
    )
    if _REPORTS in os.environ:
        folder = Path(os.environ[_REPORTS])
        config.pluginmanager.register(_RankReporter(folder), "rank-reporter")
        config.option.basetemp = str(folder / f"tmp{read_launcher(os.environ).rank}")


def pytest_report_header() -> list[str]:
    """MPI, torch and Horovod, without importing any of them into this process."""
    try:
        launcher = find_launcher(os.environ)
        answer = subprocess.run([launcher.path, "--version"], capture_output=True, text=True, timeout=60)
        lines = [" ".join(line.split()) for line in answer.stdout.splitlines() if line.strip()]
        mpi = f"{launcher.path}: {' '.join(lines[:2] if launcher.flavour == 'hydra' else lines[:1])}"
    except RuntimeError:
        mpi = "none found"
    versions = []
    for name in ("mpi4py", "torch", "horovod"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return [f"MPI: {mpi}", f"with: {', '.join(versions)}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("mpi")
    if mark is not None:
        counts = mark.args
        if not counts or not all(isinstance(count, int) and count >= 1 for count in counts):
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: mpi() needs numbers of ranks >= 1, got {counts}"
            )
        metafunc.fixturenames.append("num_ranks")
        metafunc.parametrize("num_ranks", counts, ids=[f"np{count}" for count in counts])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("mpi")
            and _REPORTS not in os.environ
        ):
            # The fixtures belong to the ranks: here they would import MPI, or make what nobody uses.
            item.setup = lambda: None  # type: ignore[method-assign]
            item.runtest = functools.partial(_run_under_mpi, item)  # type: ignore[method-assign]


def _run_under_mpi(item: pytest.Function) -> None:
    __tracebackhide__ = True
    require_mpirun()
    mark = item.get_closest_marker("mpi")
    assert mark is not None
    num_ranks = item.callspec.params["num_ranks"]
    timeout = float(mark.kwargs.get("timeout", _TIMEOUT_S))
    with tempfile.TemporaryDirectory(prefix="hvd-test-") as folder:
        (Path(folder) / "shared").mkdir()
        node = str(item.path) + item.nodeid[item.nodeid.index("::") :]
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(item.config.rootpath)]
        if item.config.inipath is not None:
            options += ["-c", str(item.config.inipath)]
        result = run_job(
            [sys.executable, "-m", "pytest", *options, node],
            np=num_ranks,
            env={_REPORTS: folder, _WORLD: str(num_ranks)},
            timeout=timeout,
        )
        failures = [text for rank in range(num_ranks) if (text := _judge(Path(folder), rank, item.name))]
        if result.timed_out:
            failures.insert(0, f"not done after {timeout:g} s")
        if result.returncode and not failures:
            failures.append("all ranks passed, but the job did not end well")
        if result.leftover:
            failures.append(f"processes outlived the job: {result.leftover}")
        if failures:
            pytest.fail("\n".join([*failures, "-- the job", result.describe()]), pytrace=False)


def _judge(folder: Path, rank: int, name: str) -> str | None:
    """What was wrong on a rank; None if it ran the test of that name, and nothing else, and it passed."""
    path, stacks = folder / f"rank{rank}.json", folder / f"rank{rank}.stacks"
    if not path.exists():
        where = f"; when it was ended it stood at\n{stacks.read_text()}" if stacks.exists() else ""
        return f"rank {rank} did not run {name} to its end{where}"
    outcomes: list[dict[str, str]] = json.loads(path.read_text())
    bad = [outcome for outcome in outcomes if outcome["outcome"] != "passed"]
    if bad:
        return "\n".join(f"rank {rank} {o['outcome']} in {o['when']}:\n{o['text']}" for o in bad)
    calls = [outcome["name"] for outcome in outcomes if outcome["when"] == "call"]
    return None if calls == [name] else f"rank {rank} did not run {name}, but {calls}"


class _RankReporter:
    """In a rank: checks the world, writes down what became of the test, and ends the job if it failed."""

    def __init__(self, folder: Path) -> None:
        rank = read_launcher(os.environ).rank
        assert rank is not None, "started as a rank, but no launcher's variables are set"
        self._path = folder / f"rank{rank}.json"
        self._outcomes: list[dict[str, str]] = []
        stacks = (folder / f"rank{rank}.stacks").open("w")
        faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        from mpi4py import MPI

        size, expected = MPI.COMM_WORLD.Get_size(), int(os.environ[_WORLD])
        assert size == expected, (
            f"MPI's world has {size} ranks, not {expected}: mpirun and libmpi do not match"
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext + "".join(f"\n-- {head}\n{body}" for head, body in report.sections)
        name = report.nodeid.rpartition("::")[2]
        self._outcomes.append(
            {"name": name, "when": report.when or "", "outcome": report.outcome, "text": text}
        )

    def pytest_sessionfinish(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._outcomes))
        part.rename(self._path)
        if any(outcome["outcome"] == "failed" for outcome in self._outcomes):
            # The others may wait for this rank: give them a moment to fail by themselves, then end them.
            end, expected = time.monotonic() + 2.0, int(os.environ[_WORLD])
            while len(list(self._path.parent.glob("rank*.json"))) < expected and time.monotonic() < end:
                time.sleep(0.05)
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(1)
