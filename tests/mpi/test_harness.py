"""The multi-rank harness itself: what fails on one rank, or does not run, fails the test; tests that share ranks do not meet."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pairs import BACKENDS, half

TESTS_FOLDER = Path(__file__).parents[1]

TESTS = """
import os, signal, sys, threading, time
import jobs
import pytest

jobs.OUTLIVE_S = 6.0

FOLDER, PIDS = os.getcwd(), []

def world():
    from mpi4py import MPI
    return MPI.COMM_WORLD

@pytest.mark.mpi(1, 2)
def test_passes(num_ranks):
    assert world().size == num_ranks

@pytest.mark.mpi(2)
def test_changes_what_can_be_put_back(shared_tmp_path, tmp_path):
    from torch.utils.data import DataLoader
    PIDS.append(os.getpid())
    assert [int(value) for value in DataLoader([7], num_workers=1)] == [7]
    assert signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL
    os.environ["LEFT"], sys.argv[:], sys.path[:0] = "behind", ["x"], ["/left"]
    sys.excepthook = print
    os.chdir(tmp_path)
    (shared_tmp_path / f"file{world().rank}").write_text("")
    world().barrier()
    assert len(list(shared_tmp_path.iterdir())) == 2

@pytest.mark.mpi(2)
def test_finds_all_as_it_was(shared_tmp_path):
    assert PIDS == [os.getpid()]
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    assert "LEFT" not in os.environ and sys.argv != ["x"] and sys.path[0] != "/left" and sys.excepthook is not print
    assert os.getcwd() == FOLDER and not list(shared_tmp_path.iterdir())

def leave_thread():
    threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="forgotten").start()

def leave_message():
    world().isend("hello", dest=1 - world().rank)

@pytest.mark.mpi(2)
@pytest.mark.parametrize("leave", [leave_thread, leave_message])
def test_leaves_something_behind(leave):
    assert bool(PIDS) == (leave is leave_thread), "ranks with something left behind were used again"
    if leave is not leave_thread or world().rank == 1:
        leave()

@pytest.mark.mpi(2)
def test_fails_on_rank_1_only():
    assert not PIDS
    assert world().rank == 0, "wrong on purpose"

@pytest.mark.mpi(2)
def test_fails_while_the_other_waits():
    if world().rank == 1:
        raise ValueError("raised on purpose")
    world().barrier()

@pytest.mark.mpi(2)
def test_skips_on_one_rank():
    if world().rank == 1:
        pytest.skip("no reason")

@pytest.mark.mpi(2)
def test_ends_silently():
    os._exit(0)

@pytest.mark.mpi(2, timeout=6)
def test_hangs():
    if world().rank == 1:
        time.sleep(1000)
    world().barrier()

@pytest.mark.mpi(2)
def test_passes_after_all_that():
    assert world().allreduce(1) == 2

if "HVD_TEST_REPORTS" not in os.environ:
    @pytest.mark.mpi(2)
    def test_is_not_there_for_the_ranks():
        pass

@pytest.mark.mpi(2)
def test_leaves_a_process_that_outlives_it():
    if world().rank == 0:
        import subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""


@pytest.fixture
def run_pytest(run_job: Any, tmp_path: Path) -> Any:
    def run(*arguments: str, **options: Any) -> Any:
        folder = tmp_path / "inner"
        folder.mkdir(exist_ok=True)
        (folder / "conftest.py").write_text((TESTS_FOLDER / "conftest.py").read_text())
        (folder / "test_inner.py").write_text(TESTS)
        (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS_FOLDER / 'support'}\n")
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments]
        return run_job(argv, cwd=folder, **{"timeout": 600, **options})

    return run


MUST_FAIL = {
    "test_fails_on_rank_1_only": ["rank 1 failed in call", "wrong on purpose"],
    "test_fails_while_the_other_waits": ["rank 1 failed in call", "raised on purpose"],
    "test_skips_on_one_rank": ["rank 1 skipped"],
    "test_ends_silently": ["rank 0 did not run", "rank 1 did not run"],
    "test_is_not_there_for_the_ranks": ["rank 0 did not run", "rank 1 did not run"],
    "test_hangs": ["not done after 6 s", "rank 1 did not run", "in test_hangs"],
    "test_leaves_a_process_that_outlives_it": ["processes outlived the job: ['sleep 1000 ']"],
}
LEFT_BEHIND = {
    "leave_thread": "rank 1: threads run: ['forgotten']",
    "leave_message": "rank 0: a message that nobody has received",
}


def test_what_ranks_do_becomes_the_tests_result(run_pytest: Any) -> None:
    result = run_pytest()
    text = result.stdout
    assert result.returncode == 1 and not result.leftover, result.describe()
    assert "MPI: " in text and "torch " in text, result.describe()
    passed, failed = (set(re.findall(rf"^{word} test_inner.py::(\w+)", text, re.MULTILINE)) for word in ("PASSED", "FAILED"))
    assert failed == set(MUST_FAIL), result.describe()
    assert passed == set(re.findall(r"def (test_\w+)", TESTS)) - failed, result.describe()
    sections = dict(re.findall(r"^_+ (\w+)\[np2\] _+$(.*?)(?=^_+ \w+\[np2\] _+$|^=+ )", text, re.MULTILINE | re.DOTALL))
    for name, messages in MUST_FAIL.items():
        assert all(message in sections[name] for message in messages), (name, sections[name])
    for name, message in LEFT_BEHIND.items():
        assert re.search(rf"^left .*test_leaves_something_behind\[np2-{name}\]: .*{re.escape(message)}", text, re.MULTILINE), name
    # One for one rank; for two: the first, one after each of those that failed or left something, but for the last test.
    tests, starts = map(int, re.findall(r"(\d+) tests ran on ranks; ranks were started (\d+) times", text)[0])
    assert starts == 2 + len(LEFT_BEHIND) + len(MUST_FAIL) - 1 and tests == len(passed) + len(failed) + 1 + len(LEFT_BEHIND) - 1


def test_without_mpirun_it_skips_by_name_and_fails_in_ci(run_pytest: Any, tmp_path: Path) -> None:
    # A Python without an mpirun beside it: a link to this one in a folder of its own.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(tmp_path / 'python')!r}\n")
    path = os.pathsep.join([str(tmp_path), str(TESTS_FOLDER.parent)])
    env = {"PATH": str(tmp_path), "PYTHONPATH": path, "CI": ""}
    result = run_pytest("-k", "test_passes", env=env)
    assert result.returncode == 0, result.describe()
    assert "3 skipped" in result.stdout
    result = run_pytest("-k", "test_passes", env={**env, "CI": "true"})
    assert result.returncode == 1
    assert "CI must have an MPI" in result.stdout


def test_each_case_meets_each_number_of_ranks_and_each_backend() -> None:
    cases, counts = "abcde", (1, 2, 3, 4)
    runs = {where: half(cases, *where) for where in itertools.product(counts, BACKENDS)}
    met = {(case, value) for where, taken in runs.items() for case in taken for value in where}
    assert met == set(itertools.product(cases, [*counts, *BACKENDS]))
    assert all(2 <= len(taken) <= 3 for taken in runs.values())


@pytest.mark.parametrize(("trap", "number"), [("", signal.SIGTERM), ("trap '' TERM; ", signal.SIGKILL)])
def test_a_job_that_hangs_while_a_test_waits_to_disturb_it_is_ended(run_job: Any, trap: str, number: signal.Signals) -> None:
    def disturb(child: subprocess.Popen[bytes]) -> None:
        while child.poll() is None:
            assert time.monotonic() < begin + 60
            time.sleep(0.05)

    begin = time.monotonic()
    job = run_job(["sh", "-c", f"{trap}exec sleep 1000"], timeout=1, during=disturb, forked=False)
    assert job.timed_out and job.returncode == -number, job.describe()
