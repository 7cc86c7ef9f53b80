"""Record and replay of the command over real ranks, Horovod and MPI."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OPTIONS = [
    "--epochs", "0.1", "--hidden-size", "16", "--batch-size", "32", "--mega-batch", "600", "--hash-interval", "1",
    "--batch-size-rule", "paper", "--min-batch-size", "8", "--max-batch-size", "128", "--eval-rounds", "0",
    "--no-calibration", "--checkpoint-interval", "0",
]  # fmt: skip


def read(path: Path) -> tuple[str, list[str]]:
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return json.loads((path / "summary.json").read_text())["model_hash"], [r["model_hash"] for r in rounds]


def test_a_recorded_run_repeats_bit_for_bit(run_job: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvd_adaptive", "train"]
    first = tmp_path / "first"
    job = run_job([*command, *OPTIONS, "--record", "--slowdown", "1,2,3", "--out", str(first)], np=3, timeout=240)
    assert job.returncode == 0, job.describe()
    assert "HOROVOD_FUSION_THRESHOLD=0" in job.stderr, job.describe()
    expected = read(first)
    assert len(set(expected[1])) == len(expected[1]) > 3 and expected[1][-1] == expected[0]

    again = [*command, "--config", str(first / "config.json"), "--replay", str(first)]
    # The ranks' speeds are others each time; only the recording makes them claim the same.
    for name, slowdown in (("second", "1,1,1"), ("third", "3,2,1")):
        job = run_job([*again, "--slowdown", slowdown, "--out", str(tmp_path / name)], np=3, timeout=240)
        assert job.returncode == 0, job.describe()
        assert read(tmp_path / name) == expected
        lines = [(tmp_path / run / "claims.jsonl").read_text().splitlines()[1:] for run in ("first", name)]
        assert lines[0] == lines[1]

    half = [*again, "--slowdown", "2,1,1", "--checkpoint-interval", "1", "--out", str(tmp_path / "half")]
    for more in (["--epochs", "0.06"], ["--resume", "auto"]):
        job = run_job([*half, *more], np=3, timeout=240)
        assert job.returncode == 0, job.describe()
    assert read(tmp_path / "half") == expected, "a resumed replay is another run"
    lines = [(tmp_path / run / "claims.jsonl").read_text().splitlines()[1:] for run in ("first", "half")]
    assert [line for line in lines[1] if '"identity"' not in line] == lines[0]

    claims = (first / "claims.jsonl").read_text().splitlines()
    value = json.loads(claims[3])
    one, other = value["claims"][0], value["claims"][1]
    one[0], other[0] = other[0], one[0]
    claims[3] = json.dumps(value)
    (first / "claims.jsonl").write_text("\n".join(claims) + "\n")
    job = run_job([*again, "--out", str(tmp_path / "fourth")], np=3, timeout=240)
    assert job.returncode == 2 and "of round 2 is" in job.stderr, job.describe()
    job = run_job([*again, "--slowdown", "1,1", "--out", str(tmp_path / "fifth")], np=2, timeout=240)
    assert job.returncode == 2 and "this run is not the recorded one" in job.stderr, job.describe()
