"""calibrate over real ranks: the file holds what was measured, and train and simulate accept it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hvd_adaptive.calibrate.file import LOCAL_ONLY, read_table
from hvd_adaptive.cli.option_sources import read_config_file

COMMAND = [sys.executable, "-m", "hvd_adaptive"]


def test_what_is_recommended_runs(run_job: Any, data: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "calibration.toml", tmp_path / "run"
    options = ["--data", str(data), "--cache-dir", str(tmp_path / "cache"), "--batch-size", "32", "--slowdown", "1,2"]
    options += ["--seconds", "0.1"]
    job = run_job([*COMMAND, "calibrate", "-np", "2", "--out", str(file), *options], timeout=400)
    assert job.returncode == 0 and not job.leftover, job.describe()
    assert "recommended: strategy" in job.stdout and " batch_size 32" in job.stdout and "predicted:" in job.stdout
    found = read_table(read_config_file(str(file), measurements=True)["calibration"], str(file))
    assert len(found.ranks) == 2 and found.num_samples == 2000 and found.predicted.samples_per_s > 0
    ways = [(choice.strategy, choice.compression) for choice in found.choices]
    assert {("local", "none"), ("sync", "none"), ("horovod", "none")} <= set(ways) and found.predicted in found.choices
    # The model has two layers; only what was tried is taken.
    assert ("local", 2) in {(choice.strategy, choice.merge_fragments) for choice in found.choices}
    assert found.predicted.source == "measured"
    assert found.ranks[0].batch_size == [4, 8, 16, 32, 64, 128, 256]
    # No time is tested: the machine may be busy.
    for rank in found.ranks:
        assert min(rank.step_s) > 0 and rank.together > 0
    assert found.model_bytes == 4 * (300 * 128 + 128 * 40)  # no bias
    # Beside the deltas two numbers a row, and the marks of rows.
    assert all(size <= found.model_bytes * 1.03 for size in found.merge.payload_bytes)

    # The run takes the file's data and options, the slowdown too.
    job = run_job([*COMMAND, "train", "-np", "2", "--config", str(file), "--out", str(run), "--epochs", "1"], timeout=400)
    assert job.returncode == 0, job.describe()
    config = json.loads((run / "config.json").read_text())
    options_in_file = read_config_file(str(file))
    assert config["mega_batch"] == options_in_file["mega_batch"]
    # Whatever was chosen: by hand people may train with the other strategy.
    assert {"min_batch_size", "max_batch_size"} <= options_in_file.keys()
    assert config["slowdown"] == "1,2" and config["batch_size"] == 32
    assert (config["strategy"], config["compression"]) == (found.predicted.strategy, found.predicted.compression)
    assert f"samples/s; predicted {found.predicted.samples_per_s:,.0f})" in job.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["predicted_samples_per_s"] == found.predicted.samples_per_s
    job = run_job([*COMMAND, "simulate", "--calibration", str(file), "--strategies", "local", "--rounds", "4", "--settle", "1"])
    assert job.returncode == 0 and "local" in job.stdout, job.describe()


def test_micro_batches_are_measured_and_kept(run_job: Any, data: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "calibration.toml", tmp_path / "run"
    options = ["--data", str(data), "--cache-dir", str(tmp_path / "cache"), "--batch-size", "32", "--micro-batch-size", "8"]
    job = run_job([*COMMAND, "calibrate", "-np", "2", "--out", str(file), *options, "--seconds", "0.1"], timeout=400)
    assert job.returncode == 0 and not job.leftover, job.describe()
    found = read_table(read_config_file(str(file), measurements=True)["calibration"], str(file))
    assert found.ranks[0].batch_size == [8, 16, 32, 64, 128, 256] and found.ranks[0].largest_batch is None
    assert {choice.micro_batch_size for choice in found.choices if choice.strategy != "horovod"} == {8}
    kept = read_config_file(str(file))
    assert kept["micro_batch_size"] == 8 and kept["batch_size"] == 32 and all(kept.get(name, 32) == 32 for name in LOCAL_ONLY)
    # What it wrote goes with both strategies.
    for strategy in ("local", "sync"):
        command = ["train", "-np", "2", "--config", str(file), "--strategy", strategy, "--out", str(run / strategy)]
        job = run_job([*COMMAND, *command, "--epochs", "0.5"], timeout=400)
        assert job.returncode == 0, job.describe()
