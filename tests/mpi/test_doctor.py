"""doctor over real ranks: healthy ones, ranks on one core, a rank that cannot join."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from zygote import ZYGOTE_SOCKET

COMMAND = [sys.executable, "-m", "hvd_adaptive", "doctor", "--probe-seconds", "0.3"]


def test_doctor_starts_healthy_ranks_and_passes_them(run_job: Any, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    job = run_job([*COMMAND, "-np", "3", "--json", str(file)], env={"PYTHONUTF8": "1"}, timeout=400)
    assert job.returncode == 0 and not job.leftover, job.describe()
    assert "✓ ok" in job.stdout and "No problem" in job.stdout and max(map(len, job.stdout.splitlines())) < 120
    found = json.loads(file.read_text())
    assert len(found["ranks"]) == 3 and found["problems"] == 0
    subjects = {one["subject"]: one for one in found["findings"]}
    assert {"versions", "Horovod", "MPI library", "world", "devices", "cores", "speed", "claims", "collectives"} <= set(subjects)
    assert "3 ranks on 1 host; MPI sees 3, Horovod 3; MPI_THREAD_MULTIPLE" in subjects["world"]["text"]
    assert all(1e-6 < facts["claims"]["median_s"] < 1 for facts in found["ranks"])
    assert all(facts["speed"]["flops"] > 1e6 for facts in found["ranks"])


def test_two_ranks_on_one_core_are_a_problem(run_job: Any) -> None:
    core = min(os.sched_getaffinity(0))
    # Longer than one of the two may have the core for itself, as the other comes late.
    probe = ["--probe-seconds", "2", "--limit", "120"]
    for _ in range(2):
        job = run_job(["taskset", "-c", str(core), *COMMAND, *probe, "--json", "-"], np=2, timeout=400)
        assert job.returncode == 1 and not job.leftover, job.describe()
        found = json.loads(job.stdout)
        # Again where one of them was held up, and the other had the core for itself.
        if all(facts["speed"]["cpu_share"] < 0.75 for facts in found["ranks"]):
            break
    subjects = {one["subject"]: one for one in found["findings"] if one["status"] != "ok"}
    assert f"ranks 0, 1 on {found['ranks'][0]['machine']['host']} are bound to core {core}" in subjects["cores"]["text"]
    assert subjects["cores"]["status"] == "problem" and "--bind-to none" in subjects["cores"]["remedy"]
    # Each had at most half of that core, whatever else ran there.
    assert all(facts["speed"]["cpu_share"] < 0.75 for facts in found["ranks"])
    assert "ranks 0, 1 got" in subjects["busy cores"]["text"]


def test_a_rank_that_cannot_join_says_why_and_rank_0_does_not_wait_for_ever(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN2at4_ops')")
    broken = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    # Forks of the zygote have a Horovod already: that rank is a process of its own.
    own = f'export PYTHONPATH="{broken}:$PYTHONPATH"; unset {ZYGOTE_SOCKET}'
    rank = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && {{ {own}; }}; exec "$@"'
    # From the launcher's SIGTERM to SIGKILL, and before SIGTERM as long: a busy machine needs more than its second for a page.
    env = {"PYTHONUTF8": "1", "OMPI_MCA_odls_base_sigkill_timeout": "5"}
    job = run_job(["bash", "-c", rank, "rank", *COMMAND, "--limit", "60"], np=2, timeout=400, env=env)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 1 on" in job.stderr and "undefined symbol: _ZN2at4_ops" in job.stderr, job.describe()
    # Rank 0's page: it waited for its limit, or was ended when rank 1 had given up.
    assert "✗ FAIL  world" in job.stdout and "✓ ok    versions" in job.stdout, job.describe()


def test_ctrl_c_is_no_finding(run_job: Any) -> None:
    def interrupt(child: subprocess.Popen[bytes]) -> None:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        while child.poll() is None and not children.read_text():
            time.sleep(0.1)
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)

    job = run_job([*COMMAND[:-1], "20", "-np", "2"], during=interrupt)
    assert job.returncode == 130 and "ended by SIGINT before all checks were made" in job.stderr, job.describe()
    assert "problem" not in job.stdout and not job.leftover, job.describe()
