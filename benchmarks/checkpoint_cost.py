"""What checkpoints at the default interval cost: the time that training stands still, and how much slower it is beside writing.

    python benchmarks/checkpoint_cost.py --out DIR [--seconds 70] [--hidden-sizes 128 1024] [--record FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recording import header, publish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, on the disk to be measured")
    parser.add_argument("--seconds", type=float, default=70, help="training seconds of a run; checkpoints are 30 s apart or more")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--record", type=Path)
    parser.add_argument("rest", nargs="*", help="options for every run, after --")
    options = parser.parse_args()
    lines = [
        *header("Checkpoints at the default interval", f"{options.ranks} ranks, embedded data set."),
        "Standing still: seconds of copying, on the slowest rank. Beside writing: seconds of rounds in which a checkpoint was "
        "being written, over those of the others.",
        "",
        "| hidden size | MB on disk | checkpoints | standing still, ms each | of the training time | of the round before "
        "| writing, s each | a round, s | beside writing |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in options.hidden_sizes:
        path = options.out / f"hidden-{size}"
        command = [
            *(sys.executable, "-m", "hvd_adaptive", "train", "-np", str(options.ranks), "--out", str(path)),
            *("--hidden-size", str(size), "--time-limit", str(options.seconds), "--eval-rounds", "0", "--eval-samples", "100"),
            *("--no-calibration", *options.rest),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines.append(f"| {size} | {' | '.join(row(path))} |")
    publish(lines, options.record)


def row(path: Path) -> list[str]:
    """Returns the cells of a run."""
    rounds: list[dict[str, Any]] = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    copies, shares, writes, beside, alone = [], [], [], [], []
    is_writing, before_s, round_s = False, 0.0, 0.0
    for number, done in enumerate(rounds):
        copy_s, write_s = max(done["ranks"]["checkpoint_s"]), max(done["ranks"]["checkpoint_write_s"])
        if copy_s > 0:
            # It was copied when the round before was over.
            copies.append(copy_s)
            shares.append(copy_s / round_s)
            is_writing = True
        round_s = done["train_s"] - before_s - copy_s
        before_s = done["train_s"]
        # The first rounds are slower than the others.
        if number >= 3:
            (beside if is_writing else alone).append(round_s)
        if write_s > 0:
            writes.append(write_s)
            is_writing = False
    if not copies or not writes or not beside or not alone:
        raise SystemExit(f"{path}: no checkpoint was written beside the training in {len(rounds)} rounds; give --seconds more")
    newest = max((path / "checkpoints").iterdir(), key=lambda folder: folder.stat().st_mtime)
    size_mb = sum(file.stat().st_size for file in newest.iterdir()) / 1e6
    usual_s = statistics.median(alone)
    return [
        f"{size_mb:.0f}", f"{len(copies)}", f"{1e3 * statistics.mean(copies):.0f}", f"{sum(copies) / before_s:.2%}",
        f"{max(shares):.1%} at most", f"{statistics.mean(writes):.2f}", f"{usual_s:.2f}",
        f"{statistics.mean(beside) / usual_s:.2f}x ({len(beside)} rounds)",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
