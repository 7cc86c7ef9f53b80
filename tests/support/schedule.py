"""Workers take tests from one queue, what takes longest first: `scripts/test.sh` does so by pytest-xdist.

Tests that share what is costly to make stay together, on one worker: those of a file for equally many ranks, and those of a file
outside the folders whose tests start jobs. Seconds of each group, and of each test that is alone, are in
durations.json; what is not there is taken to be quick. `--store-durations` writes them from a run.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from mpi_world import num_ranks
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).resolve().parents[1]
DURATIONS = TESTS / "durations.json"
_WORTH_KEEPING_S = 0.5
# Tests of these share nothing but ranks.
_ALONE = ("mpi", "wrap", "net", "docs", "examples")
_LONG_S = 8.0  # a group that takes as long is not for --quick


def starts_ranks(item: pytest.Item) -> bool:
    """Whether a test starts jobs, or runs on ranks."""
    return bool(num_ranks(item)) or "run_job" in getattr(item, "fixturenames", ())


def group(nodeid: str) -> str:
    """The group of a test; of one that is alone, its own name."""
    path, _, name = nodeid.removeprefix("tests/").partition("::")
    folder = path.partition("/")[0]
    if folder == "slurm":
        # One site at a time: it is two hosts, whose ranks want the machine's cores for themselves.
        return folder
    if ranks := re.search(r"[\[-]np(\d+)\b", name):
        # One world for all, but for those of two ranks, which are most.
        return f"{path} on 2" if ranks[1] == "2" else f"on {ranks[1]}"
    return nodeid if folder in _ALONE else path


class Groups(LoadScopeScheduling):
    """Gives a worker one group after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


@functools.cache
def _known() -> dict[str, float]:
    """Seconds by group, as a run has stored them."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def takes_long(nodeid: str) -> bool:
    """Whether a test's group takes too long for people who wait for it."""
    return _known().get(group(nodeid), 0.0) >= _LONG_S


def arrange(items: list[pytest.Item]) -> None:
    """Puts the groups that take longest first."""
    known = _known()
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[group(item.nodeid)].append(item)
    ordered = sorted(groups, key=lambda name: -known.get(name, 0.0))
    items[:] = [item for name in ordered for item in groups[name]]


def store(reports: Iterable[pytest.TestReport]) -> None:
    """Writes durations.json from the reports of a run."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[group(report.nodeid)] += report.duration
    kept = {name: round(value, 1) for name, value in sorted(seconds.items()) if value >= _WORTH_KEEPING_S}
    DURATIONS.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")
