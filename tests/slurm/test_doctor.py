"""doctor in an allocation: under srun it joins the ranks of two hosts, and with the wrong --mpi it says the right one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

# Other jobs start beside these: no check is to run out of time.
COMMAND = [sys.executable, "-m", "hvd_adaptive", "doctor", "--probe-seconds", "0.2", "--limit", "180", "--json", "-"]

pytestmark = [pytest.mark.root, pytest.mark.beside]


@pytest.mark.usefixtures("pmix")
def test_srun(run_in_slurm: Callable[..., Any]) -> None:
    job = run_in_slurm("srun", "-N2", "-n2", "--mpi=pmix", *COMMAND)
    found = json.loads(job.stdout)
    assert job.returncode == 0 and found["problems"] == 0, job.describe()
    assert sorted(facts["machine"]["host"] for facts in found["ranks"]) == ["alpha", "beta"]
    assert "under slurm" in found["head"] and len(found["ranks"][0]["links"]) == 2


def test_srun_with_the_wrong_mpi(run_in_slurm: Callable[..., Any]) -> None:
    job = run_in_slurm("srun", "-n2", *COMMAND)
    found = json.loads(job.stdout)
    assert job.returncode != 0 and found["problems"] == 1, job.describe()
    first = found["findings"][0]
    assert first["subject"] == "world" and "start with `srun --mpi=pmix`" in first["text"], job.describe()
