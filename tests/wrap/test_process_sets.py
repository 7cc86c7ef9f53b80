"""Optimizers that only some of the ranks have: nobody waits for the others, and the script runs as under plain Horovod."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from wrapped_scripts import run_both

from hvd_adaptive.wrap.reasons import Reason

SCRIPT = Path(__file__).parent / "scripts" / "process_sets.py"
OPTIONS = [{}, {"strategy": "local", "shares": None}, {"compression": "maxmin:4"}]


@pytest.mark.mpi(3, timeout=300)
@pytest.mark.parametrize("options", OPTIONS, ids=["sync", "local", "encoded"])
def test_an_optimizer_of_some_ranks(options: dict[str, Any], num_ranks: int) -> None:
    # With a sum, the first local step's gradients would be multiplied by the number of ranks, and then summed.
    modes = ("first", "second", "only", "first sum")
    results, engine = run_both([f"process_sets.py {mode}" for mode in modes], num_ranks, **options)
    for trained, fractions in results:
        assert not any(fractions) and all(Reason.PROCESS_SET in loader.reasons for loader in trained[:1])
    lines = engine.report.lines()
    assert any(Reason.PROCESS_SET.value in line for line in lines) and not any("merges" in line for line in lines), lines


@pytest.mark.parametrize("mode", ["first", "only"])
def test_a_dry_run_ends_on_all_ranks(mode: str, run_job: Any) -> None:
    command = [sys.executable, "-m", "hvd_adaptive", "run", "-np", "3", "--dry-run", str(SCRIPT), mode]
    job = run_job(command, timeout=200)
    assert job.returncode == 0 and Reason.PROCESS_SET.value in job.stderr, job.describe()
