"""Runs over real ranks, each struck by a fault in some phase: none hangs, and nothing is lost or counted twice."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from campaign import PHASES, Campaign, cases, site

SEED = 6
LONG_CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "faults.py"


def test_campaign(run_job: Any, data: Path, tmp_path: Path) -> None:
    with site(tmp_path) as (hosts, faults):
        campaign = Campaign(tmp_path, data, run_job, hosts=hosts)
        # The long campaign's first cases, but for kills in a phase in which another fault ends the job.
        drawn = list(itertools.islice(cases(SEED, faults), len(PHASES) + len(faults)))
        others = {case.phase for case in drawn if case.ends_the_job and case.fault != "kill"}
        chosen = list(dict.fromkeys(case for case in drawn if case.fault != "kill" or case.phase not in others))
        assert {case.phase for case in chosen if case.ends_the_job} == set(PHASES)
        assert {case.fault for case in chosen} == set(faults)
        for case in chosen:
            print(campaign.run(case))
        campaign.finish()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_long_campaign_that_is_ended_leaves_nothing_behind(run_job: Any, tmp_path: Path, number: signal.Signals) -> None:
    def processes(word: str) -> list[str]:
        found = subprocess.run(["pgrep", "-af", word], capture_output=True, text=True).stdout.splitlines()
        return [line for line in found if "hvd_adaptive train" in line and "mpirun" not in line]

    def end(child: subprocess.Popen[bytes]) -> None:
        limit_s = time.monotonic() + 180
        while len(running := processes(str(tmp_path))) < 3:
            assert child.poll() is None and time.monotonic() < limit_s, f"of 3 ranks run: {running}"
            time.sleep(0.05)
        child.send_signal(number)
        # As `timeout` and a terminal do, who reach more than one process; it must not disturb what is being removed.
        time.sleep(0.1)
        child.send_signal(number)
        names.append(f"hva-{child.pid}-")

    names: list[str] = []
    job = run_job([sys.executable, str(LONG_CAMPAIGN), "--folder", str(tmp_path)], timeout=300, during=end)
    assert job.returncode == 128 + number and not job.timed_out and not job.leftover, job.describe()
    assert not processes(str(tmp_path)), processes(str(tmp_path))
    assert not (tmp_path / "disk").is_mount()
    assert not [*Path("/run/netns").glob(f"{names[0]}*"), *Path("/etc/netns").glob(f"{names[0]}*")]
