"""What a run of the command has left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and the rounds of a run."""
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return json.loads((path / "summary.json").read_text()), rounds
