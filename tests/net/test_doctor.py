"""doctor over two hosts: it measures the link, in both directions."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from two_hosts import ENVIRONMENT, TwoHosts

COMMAND = [sys.executable, "-m", "hvd_adaptive", "doctor", "--probe-seconds", "0.2", "--json", "-"]


@pytest.mark.root
def test_the_link_between_hosts_is_measured(run_job: Any, hosts: TwoHosts) -> None:
    job = run_job(hosts.mpirun(1, COMMAND), env=ENVIRONMENT, timeout=400)
    found = json.loads(job.stdout)
    assert [facts["machine"]["host"] for facts in found["ranks"]] == ["alpha", "beta"], job.describe()
    assert not [one for one in found["findings"] if one["status"] == "problem"] and job.returncode == 0, job.describe()
    links = found["ranks"][0]["links"]
    assert [(one["from"], one["to"]) for one in links] == [("alpha", "beta"), ("beta", "alpha")]
    for one in links:
        # 1 Gbit/s is 125 MB/s with the frames' headers. A busy machine is slower, or it held up the small message from which the
        # large one's seconds count; past the link it would be GB/s.
        assert 4e6 < one["bytes_per_s"] < 400e6
        assert 1e-5 < one["small_s"] < 1
