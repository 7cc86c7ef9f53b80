"""Compares the throughput of `sync` with plain Horovod's, on equal ranks and at emulated speeds 1:1:2:4, in turns.

python benchmarks/sync_throughput.py --out DIR [--repeats 3] [--record FILE] [-- OPTIONS OF hvd-adaptive train]

Equal ranks: no adaptivity can win, so the ratio shows what weights and checks cost. Both methods have the same global batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

# Slowdown factors of ranks whose speeds are as 1:1:2:4; the sum of speeds allows 2 x what the slowest sets.
SPEEDS = {"equal": None, "1:1:2:4": "8,8,4,2"}
METHODS = {
    "horovod": ["--strategy", "horovod"],
    "sync": ["--strategy", "sync"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method at each speeds")
    parser.add_argument("--equal-ranks", type=int, default=2, help="ranks of the comparison on equal ranks")
    parser.add_argument("--seconds", type=float, default=30, help="training seconds of a run")
    parser.add_argument("--record", type=Path)
    parser.add_argument("rest", nargs="*", help="options for every run, after --")
    options = parser.parse_args()
    lines = [
        f"# Throughput of sync against plain Horovod, {options.seconds:g} s a run",
        "",
        f"Date: {datetime.date.today()}. Command: `{shlex.join(['python', *sys.argv])}`. {os.cpu_count()} cores "
        f"({platform.processor() or platform.machine()}), Python {platform.python_version()}. Methods took turns; samples a "
        "second of training (evaluation excluded), from the rounds of the second half of each run, when shares have settled.",
        "",
        "| speeds | ranks | run | horovod | sync | ratio | ratio of whole runs | last shares |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for speeds, slowdown in SPEEDS.items():
        num_ranks = options.equal_ranks if slowdown is None else 4
        ratios = []
        for repeat in range(options.repeats):
            runs = {}
            # Whoever goes second goes first the next time.
            for method in list(METHODS)[:: 1 if repeat % 2 == 0 else -1]:
                path = options.out / f"{speeds.replace(':', '')}-{method}-{repeat}"
                extra = ["--slowdown", slowdown] if slowdown else []
                runs[method] = run(path, num_ranks, [*METHODS[method], *extra, *options.rest], options.seconds)
            ratio, whole = (runs["sync"][kind] / runs["horovod"][kind] for kind in ("settled", "whole"))
            ratios.append(ratio)
            lines.append(
                f"| {speeds} | {num_ranks} | {repeat + 1} | {runs['horovod']['settled']:.0f} | {runs['sync']['settled']:.0f} "
                f"| {ratio:.3f} | {whole:.3f} | {', '.join(f'{size:.0f}' for size in runs['sync']['shares'])} |"
            )
        lines.append(f"| {speeds} | {num_ranks} | median | | | **{statistics.median(ratios):.3f}** | | |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.record:
        options.record.write_text(text)


def run(path: Path, num_ranks: int, options: list[str], seconds: float) -> dict[str, object]:
    """Trains once; returns samples a second of the whole run and of its second half, and the last shares."""
    command = [
        *(sys.executable, "-m", "hvd_adaptive", "train", "-np", str(num_ranks), "--out", str(path)),
        *("--time-limit", str(seconds), "--eval-rounds", "0", "--eval-samples", "100", "--no-calibration"),
        *("--mega-batch", "3200", *options),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    if len(rounds) < 4:
        raise SystemExit(f"{path}: only {len(rounds)} rounds; give --seconds more, or -- --mega-batch less")
    last = rounds[-1]
    first = next((r for r in rounds[:-1] if r["train_s"] >= last["train_s"] / 2), rounds[-2])
    return {
        "whole": last["samples"] / last["train_s"],
        "settled": (last["samples"] - first["samples"]) / (last["train_s"] - first["train_s"]),
        "shares": last["ranks"]["batch_size"],
    }


if __name__ == "__main__":
    main()
