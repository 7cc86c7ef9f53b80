"""What a finding is, and how numbers read in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "problem"]
Facts = dict[str, Any]

MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the page.

    Attributes:
        subject: what was looked at, one or two words.
        status: "ok"; "warning": works, at a cost; "problem": does not work, or not as asked.
        text: what was found.
        remedy: what to do, None where there is nothing to do.
    """

    subject: str
    status: Status
    text: str
    remedy: str | None = None


def count(number: int, word: str) -> str:
    """Returns "1 rank" or "2 ranks"."""
    return f"{number} {word}{'s' * (number != 1)}"


def numbers(ranks: Sequence[int]) -> str:
    """Returns "rank 3" or "ranks 1, 2, 5", at most eight of them."""
    return f"rank{'s' * (len(ranks) > 1)} {shown(ranks)}"


def amount(num_bytes: float) -> str:
    """Returns a number of bytes as people write it, such as "64 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    raise AssertionError


def seconds(value: float) -> str:
    """Returns seconds as people write them, such as "19 us"."""
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def good(facts: Facts, stage: str) -> Facts | None:
    """Returns what a stage found; None where it was not reached or failed."""
    found = facts.get(stage)
    return found if isinstance(found, dict) and "error" not in found else None


def errors_of(ranks: Sequence[Facts], stage: str) -> dict[str, list[int]]:
    """Returns the stage's distinct errors and who has them."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, facts in enumerate(ranks):
        if isinstance(facts.get(stage), dict) and "error" in facts[stage]:
            found[facts[stage]["error"]].append(rank)
    return found


def ranks_by_host(ranks: Sequence[Facts]) -> dict[str, list[int]]:
    """Returns the ranks of each host, in order."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, facts in enumerate(ranks):
        found[facts["machine"]["host"]].append(rank)
    return found


def shown(parts: Sequence[Any], separator: str = ", ") -> str:
    """Returns the first eight parts as text."""
    return separator.join(map(str, parts[:MOST_NAMED])) + (f"{separator}..." if len(parts) > MOST_NAMED else "")


def span(values: Iterable[float]) -> str:
    """Returns "1" for equal values, else "1 to 3"."""
    low, high = min(values), max(values)
    return f"{low:.3g}" if high - low < 1e-6 else f"{low:.3g} to {high:.3g}"


def percent(values: Iterable[float]) -> str:
    """Returns values as "80%", or "80% to 100%" where they differ."""
    low, high = f"{min(values):.0%}", f"{max(values):.0%}"
    return low if low == high else f"{low} to {high}"
