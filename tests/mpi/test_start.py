"""A start at which not all ranks come ends by itself and says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

RANK = """
import os, time
from hvd_adaptive.comm import connect
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(1000)
connect(stall_limit_s=1.0)
"""


def test_a_rank_that_never_comes(run_job: Any) -> None:
    job = run_job([sys.executable, "-c", RANK], np=2, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 0 on" in job.stderr and "has waited 5 s for all ranks to meet" in job.stderr, job.describe()


LATE = """
import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(1000)
"""
RUN = 'from hvd_adaptive.cli.main import main\nsys.exit(main(["run", "--stall-limit-s", "1", sys.argv[1]]))'


def test_a_scripts_limit_holds_for_its_start(run_job: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import horovod.torch as hvd\nhvd.init()\n")
    job = run_job([sys.executable, "-c", LATE + RUN, str(script)], np=2, timeout=100)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "has waited 5 s for all ranks to meet" in job.stderr and "raise stall_limit_s (now 1 s)" in job.stderr, job.describe()
