"""Runs tests marked ``@pytest.mark.mpi(N, ...)`` on N ranks under mpirun, and starts whole jobs for tests.

Under plain pytest such a test is not called: ranks that mpirun has started run it, each in a pytest of its own, and it passes
only if every rank ran exactly that test in a world of N and it passed there. Ranks run one test after the other, see
support/mpi_world.py. Options of the mark: ``timeout`` in seconds (120 if not given).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import schedule
from jobs import ZYGOTE, JobResult, run_job
from mpi_world import REPORTS, SHARED, Worlds, num_ranks
from zygote import ZYGOTE_SOCKET

from hvd_adaptive.cluster.relaunch import find_launcher

_IS_RANK = REPORTS in os.environ
_worlds = pytest.StashKey[Worlds]()
_ranks: list[dict[str, Any]] = []  # what became of worlds, of each worker
_said: list[str] = []  # by the zygote


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
    return Path(os.environ[SHARED]) if _IS_RANK else tmp_path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json from this run")


def set_no_deadlines() -> None:
    """Has hypothesis judge no example by its time: a busy machine takes any. In CI hypothesis has a profile like that itself."""
    from hypothesis import settings

    if settings().deadline is not None:
        settings.register_profile("busy machine", deadline=None)
        settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "mpi(*num_ranks, timeout=120): run the test as that many ranks under mpirun"
    )
    if _IS_RANK:
        from mpi_rank import RankPlugin

        config.pluginmanager.register(RankPlugin(config), "rank")
    else:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell that starts the tests in the background has it ignored, and what the tests start would inherit that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        set_no_deadlines()
        # Torch's stores ask for the name of every address; where the name server loses answers, each would take 5 s.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        if hasattr(config, "workerinput"):
            import torch

            # Other workers have the other cores: threads would spin until the next one gets its own.
            torch.set_num_threads(1)
        if config.getoption("numprocesses", None) and "not slow" not in config.getoption("markexpr"):
            # One for all workers.
            os.environ[ZYGOTE_SOCKET] = str(ZYGOTE.start(wait=False))


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return schedule.Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _IS_RANK:
        return
    for item in items:
        if schedule.starts_ranks(item) or schedule.takes_long(item.nodeid):
            item.add_marker("slow")
    # One worker: tests for equally many ranks together, as they share their ranks.
    items.sort(key=num_ranks)
    if hasattr(config, "workerinput"):
        schedule.arrange(items)
    for item in items:
        if num_ranks(item):
            # The fixtures belong to the ranks: here they would import MPI, or make what nobody uses.
            item.setup = lambda: None  # type: ignore[method-assign]
            item.runtest = functools.partial(_run_on_ranks, item)  # type: ignore[attr-defined]


def pytest_collection_finish(session: pytest.Session) -> None:
    # What was imported stays. Else each full collection, which the product makes where memory runs out, goes through all of it.
    gc.collect()
    gc.freeze()
    if not _IS_RANK:
        items = [item for item in session.items if num_ranks(item)]
        session.config.stash[_worlds] = Worlds(session.config, items)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if not _IS_RANK:
        item.config.stash[_worlds].keep_awake(num_ranks(nextitem) if nextitem else 0)


def _run_on_ranks(item: pytest.Item) -> None:
    __tracebackhide__ = True
    require_mpirun()
    failures = item.config.stash[_worlds].run(item)
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if _IS_RANK:
        return
    if (worlds := config.stash.get(_worlds, None)) is not None:
        failures = worlds.close()
        _ranks.append({"tests": worlds.num_tests, "starts": worlds.num_started, "left": worlds.left_behind, "failures": failures})
    if hasattr(config, "workerinput"):
        config.workeroutput["ranks"] = _ranks[0]
        return
    _said.append(ZYGOTE.close())
    if any(one["failures"] for one in _ranks):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if config.getoption("store_durations"):
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        found = [report for reports in reporter.stats.values() for report in reports]
        schedule.store(report for report in found if isinstance(report, pytest.TestReport))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended."""
    if (found := getattr(node, "workeroutput", {}).get("ranks")) is not None:
        _ranks.append(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says for which tests new ranks had to be started, and what went wrong when they ended."""
    num_tests = sum(one["tests"] for one in _ranks)
    if num_tests or any(_said):
        terminalreporter.section("ranks", sep="-")
        terminalreporter.line("".join(_said).strip())
        starts = sum(one["starts"] for one in _ranks)
        if num_tests:
            terminalreporter.line(f"{num_tests} tests ran on ranks; ranks were started {starts} times.")
        for one in _ranks:
            for line in one["left"]:
                terminalreporter.line(f"left something behind, so the next test had new ranks: {line}")
            for line in one["failures"]:
                terminalreporter.line(line)
