"""Changes the ranks' emulated speeds in the middle of a run and shows what every round does.

python benchmarks/speed_change.py --out DIR [--data PREFIX] [--record FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from recording import header, publish

SLOWDOWN = "0:8,8,4,2;25:2,4,8,8"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    command = [
        *(
            sys.executable,
            "-m",
            "hvd_adaptive",
            "train",
            "-np",
            "4",
            "--slowdown",
            SLOWDOWN,
            "--time-limit",
            "50",
        ),
        *("--mega-batch", "12800", "--eval-rounds", "0", "--eval-samples", "2000", "--out", str(options.out)),
        *(("--data", options.data) if options.data else ()),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [
        *header(
            f"Speeds that change at 25 s: {Path(options.data).name if options.data else 'embedded'}, 4 ranks",
            f"Emulated: --slowdown '{SLOWDOWN}'.",
        ),
        "| round | until s | utilisation | waiting | samples of each rank |",
        "| --- | --- | --- | --- | --- |",
    ]
    before = 0.0
    for text in (options.out / "rounds.jsonl").read_text().splitlines():
        r = json.loads(text)
        wait = sum(r["ranks"]["wait_s"]) / len(r["ranks"]["wait_s"]) / (r["train_s"] - before)
        before = r["train_s"]
        samples = ", ".join(f"{n:.0f}" for n in r["ranks"]["samples"])
        lines.append(
            f"| {r['round'] + 1} | {r['train_s']:.1f} | {r['utilisation']:.2f} | {wait:.1%} | {samples} |"
        )
    publish(lines, options.record)


if __name__ == "__main__":
    main()
