"""Ranks under a CPU quota use little of it while they wait in MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

WAIT_S = 3.0
SCRIPT = f"""
import time
import horovod.torch as hvd
from mpi4py import MPI
hvd.init()
MPI.COMM_WORLD.Barrier()
begin = time.process_time()
if hvd.rank() == 0:
    time.sleep({WAIT_S})
MPI.COMM_WORLD.Barrier()
if hvd.rank() == 1:
    print("cpu", time.process_time() - begin)
"""


def test_ranks_under_a_quota_sleep(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # Control groups are the host's; what they say is read in one place.
    quota = "from hvd_adaptive.cluster import host\nhost.cpu_quota = lambda groups=None: 1.0\n"
    (tmp_path / "sitecustomize.py").write_text(quota)
    command = [sys.executable, "-m", "hvd_adaptive", "run", "-np", "2", str(tmp_path / "script.py")]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {"LD_PRELOAD": "", "OMPI_MCA_mpi_yield_when_idle": "", "PYTHONPATH": path}
    result = run_job(command, env=environment)
    assert result.returncode == 0, result.describe()
    [line] = [line for line in result.stdout.splitlines() if line.startswith("cpu")]
    # Busy, it is 0.6 and more. Negotiating every millisecond, Horovod takes 0.1.
    assert float(line.split()[1]) < 0.3 * WAIT_S
