"""A start at which not all ranks come ends by itself and says so."""

from __future__ import annotations

import sys
from typing import Any

RANK = """
import os, time
from hvd_adaptive.transport import connect
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(1000)
connect(stall_limit_s=1.0)
"""


def test_a_rank_that_never_comes(run_job: Any) -> None:
    job = run_job([sys.executable, "-c", RANK], np=2, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 0 on" in job.stderr and "has waited 5 s for all ranks to meet" in job.stderr, job.describe()
