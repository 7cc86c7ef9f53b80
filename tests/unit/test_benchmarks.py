"""Commands that README names for its numbers, as far as they are quick: what nobody runs breaks unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_accuracy_over_a_link_runs_on_one_host(tmp_path: Path) -> None:
    options = ["--task", "digits", "--seeds", "0", "--until", "0.5", "--only", "^local maxmin:4$"]
    command = [sys.executable, str(BENCHMARKS / "accuracy.py"), "run", "--out", str(tmp_path / "found"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "digits local maxmin:4 seed 0: 0." in done.stdout, done.stdout + done.stderr
