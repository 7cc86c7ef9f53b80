"""A wait that lasts too long is told of once, with the ranks, their collectives and what helps."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from hvd_adaptive.comm.in_process_store import InProcessStore
from hvd_adaptive.wrap.long_waits import LongWaits, _of_forks

SCRIPTS = Path(__file__).parent / "scripts"


def test_a_long_wait_is_named_once() -> None:
    said: list[str] = []
    waits = LongWaits(0.3, said.append)
    waits.shares_differ()
    waits.start(1, 3, None)
    waits.start(1, 3, None)
    for _ in range(3):
        with waits.of("a short one"):
            time.sleep(0.01)
    time.sleep(0.5)
    assert not said
    with waits.of("allreduce 'correct' (of the script's)"):
        time.sleep(1.2)
    assert len(said) == 1 and "rank 1 in allreduce 'correct'" in said[0], said
    assert "--shares equal" in said[0]


def test_one_rank_names_where_all_wait_each_time() -> None:
    said: list[str] = []
    store, all_waits = InProcessStore(), []
    for rank in range(4):
        waits = LongWaits(0.3, said.append)
        waits.start(rank, 4, store)
        all_waits.append(waits)

    def wait(rank: int, what: str) -> threading.Thread:
        def stand() -> None:
            with all_waits[rank].of(what):
                time.sleep(1.0)

        thread = threading.Thread(target=stand)
        thread.start()
        return thread

    for places in (["x", "y", "y"], ["y", "y", "y", "x"]):
        for thread in [wait(rank, what) for rank, what in enumerate(places)]:
            thread.join()
        time.sleep(0.3)
    assert len(said) == 2 and "--shares" not in " ".join(said), said
    assert "rank 0 in x; ranks 1, 2 in y; rank 3 in no collective that is seen here" in said[0], said
    assert "ranks 0, 1, 2 in y; rank 3 in x. That can be for ever" in said[1], said


def test_a_collective_that_one_rank_alone_calls_is_named(run_job: Any) -> None:
    command = [sys.executable, "-m", "hvd_adaptive", "run", "-np", "2", "--stall-limit-s", "4"]
    job = run_job([*command, str(SCRIPTS / "failing.py"), "lonely"], timeout=200)
    assert job.returncode == 0 and not job.timed_out, job.describe()
    said = "ranks still wait for each other: rank 0 in allreduce 'lonely' (of the script's); rank 1 in allreduce "
    assert job.stderr.count(said) == 1 and "rank 1 in allreduce 'theirs' (of the script's). That can be for ever" in job.stderr


def test_a_python_whose_forks_may_wait_for_ever_is_named() -> None:
    for version in ("3.10.14", "3.11.0rc1", "3.11.7"):
        assert f"Python {version} has a fault there" in _of_forks(version)
    assert not any(map(_of_forks, ("3.10.15", "3.10.18", "3.11.10", "3.12.0", "3.13.1", "3.14.0a2")))
