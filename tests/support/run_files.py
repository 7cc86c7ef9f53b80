"""Run directories with made-up numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_run(
    path: Path,
    *,
    strategy: str,
    label: str | None = None,
    best: float = 0.67,
    rate: float = 0.05,
    num_rounds: int = 40,
    eval_every: int = 2,
    slowdown: Any = (4, 4, 2, 1),
    with_summary: bool = True,
) -> Path:
    path.mkdir()
    speeds = [1 / s for s in slowdown or (1, 1, 1, 1)]
    records = []
    for number in range(num_rounds):
        seconds = 1.5 * (number + 1)
        p1 = best * (1 - math.exp(-rate * seconds)) + 0.002 * math.sin(number)
        scores = {f"{name}{k}": p1 / k**0.4 for name in ("p", "psp") for k in (1, 3, 5)}
        target = [64 * 4 * speed / sum(speeds) for speed in speeds]
        progress = 1 - math.exp(-number / 6)
        sizes = [64 + (t - 64) * progress for t in target] if strategy == "local" else [64.0] * 4
        per_rank = {
            name: [1.0] * 4
            for name in ("num_updates", "samples", "lr", "weight", "busy_s", "wait_s", "claim_s", "merge_s")
        }
        records.append(
            {
                "round": number,
                "epoch": 0.1 * (number + 1),
                "train_s": seconds,
                "wall_s": 1.1 * seconds,
                "samples": 6400 * (number + 1),
                "loss": 3.0,
                "payload_bytes": 2_500_000 if strategy == "local" else 10_000_000,
                "eval": scores if number % eval_every == eval_every - 1 else None,
                "ranks": {"batch_size": sizes, **per_rank},
            }
        )
    (path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "config.json").write_text(json.dumps({"strategy": strategy, "name": label}))
    summary = {
        "strategy": strategy,
        "label": label,
        "train_s": records[-1]["train_s"],
        "final": records[-1]["eval"],
        "utilisation": 0.913 if strategy == "local" else 0.497,
        "wait_share": 0.021 if strategy == "local" else 0.473,
        "world_size": 4,
        "slowdown": list(slowdown) if slowdown else None,
    }
    if with_summary:
        (path / "summary.json").write_text(json.dumps(summary))
    return path
