"""A rank that has done its work leaves, also where MPI does not end."""

from __future__ import annotations

import sys
import time
from typing import Any

SCRIPT = """
import time
from mpi4py import MPI
from hvd_adaptive.comm import job_end
job_end._FINALIZE_S = 1.0
if MPI.COMM_WORLD.rank:
    time.sleep(30)
job_end.leave_process(0)
"""


def test_mpi_that_does_not_end_is_left(run_job: Any) -> None:
    start = time.monotonic()
    job = run_job([sys.executable, "-c", SCRIPT], np=2)
    assert job.returncode != 0 and time.monotonic() - start < 25
    assert "Timeout (0:00:01)!" in job.stderr and "in leave_process" in job.stderr
