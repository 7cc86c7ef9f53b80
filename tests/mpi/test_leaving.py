"""A rank that has done its work leaves, also where MPI does not end; what follows in its process finds nothing of it."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from typing import Any

import pytest

from hvd_adaptive.comm import connect

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


@pytest.mark.mpi(2)
@pytest.mark.parametrize("preset", [None, "0", "1"])
def test_groups_of_one_world_are_no_cost_to_the_next(preset: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HOROVOD_DYNAMIC_PROCESS_SETS"
    monkeypatch.delenv(name, raising=False)
    if preset is not None:
        monkeypatch.setenv(name, preset)
    for groups in (True, False):
        transport = connect(stall_limit_s=60, backend="horovod", groups=groups)
        assert os.environ.get(name) == preset
        if groups:
            assert transport.split(transport.rank).world_size == 1
        transport.close()


@pytest.mark.mpi(2)
def test_nothing_holds_a_closed_world(backend: str) -> None:
    connect(stall_limit_s=60, backend=backend, groups=True).close()
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    transport.split(0)
    gone = weakref.ref(transport)
    transport.close()
    del transport
    gc.collect()
    assert gone() is None and len(os.listdir("/proc/self/fd")) <= len(before)
