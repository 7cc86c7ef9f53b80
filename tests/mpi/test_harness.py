"""The multi-rank harness itself: what fails on one rank, or does not run, must fail the test."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

TESTS = """
import os, time
import pytest

@pytest.mark.mpi(1, 2)
def test_passes(num_ranks):
    from mpi4py import MPI
    assert MPI.COMM_WORLD.size == num_ranks

@pytest.mark.mpi(2)
def test_fails_on_rank_1_only():
    from mpi4py import MPI
    assert MPI.COMM_WORLD.rank == 0, "wrong on purpose"

@pytest.mark.mpi(2)
def test_fails_while_the_other_waits():
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("raised on purpose")
    MPI.COMM_WORLD.barrier()

@pytest.mark.mpi(2)
def test_skips_on_one_rank():
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        pytest.skip("no reason")

@pytest.mark.mpi(2)
def test_ends_silently():
    os._exit(0)

@pytest.mark.mpi(2, timeout=8)
def test_hangs():
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(1000)
    MPI.COMM_WORLD.barrier()

if "HVD_TEST_REPORTS" not in os.environ:
    @pytest.mark.mpi(2)
    def test_is_not_there_for_the_ranks():
        pass
"""


@pytest.fixture
def run_pytest(run_job, tmp_path):
    def run(name, **options):
        shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
        (tmp_path / "test_inner.py").write_text(TESTS)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"test_inner.py::{name}"]
        return run_job(argv, cwd=tmp_path, timeout=90, **options)

    return run


def test_passing_ranks_pass_for_every_number(run_pytest):
    result = run_pytest("test_passes")
    assert result.returncode == 0, result.describe()
    assert "2 passed" in result.stdout
    assert "MPI: " in result.stdout
    assert "torch " in result.stdout


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("test_fails_on_rank_1_only", ["rank 1 failed in call", "wrong on purpose"]),
        ("test_fails_while_the_other_waits", ["rank 1 failed in call", "raised on purpose"]),
        ("test_skips_on_one_rank", ["rank 1 skipped"]),
        ("test_ends_silently", ["rank 0 did not run", "rank 1 did not run"]),
        ("test_is_not_there_for_the_ranks", ["rank 0 did not run", "rank 1 did not run"]),
        ("test_hangs", ["not done after 8 s", "rank 1 did not run", "in test_hangs"]),
    ],
)
def test_what_must_fail(run_pytest, name, messages):
    result = run_pytest(name)
    assert result.returncode == 1, result.describe()
    assert "1 failed" in result.stdout
    for message in messages:
        assert message in result.stdout, result.describe()
    assert not result.leftover


def test_without_mpirun_it_skips_by_name_and_fails_in_ci(run_pytest, tmp_path):
    # A Python without an mpirun beside it: a link to this one in a folder of its own.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(tmp_path / 'python')!r}\n")
    env = {"PATH": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "CI": ""}
    result = run_pytest("test_passes", env=env)
    assert result.returncode == 0, result.describe()
    assert "2 skipped" in result.stdout
    result = run_pytest("test_passes", env={**env, "CI": "true"})
    assert result.returncode == 1
    assert "CI must have an MPI" in result.stdout
