"""The page for people, and its contents for machines."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from hvd_adaptive.doctor.findings import Facts, Finding, count

_WIDTH = 80
_MARKS = {"ok": ("✓", "ok"), "warning": ("!", "warn"), "problem": ("✗", "FAIL")}


def document(head: str, findings: Sequence[Finding], ranks: Sequence[Facts]) -> dict[str, Any]:
    """Returns the page as JSON values.

    Args:
        head: the page's first line.
        findings: in order.
        ranks: what they follow from.
    """
    return {
        "format": 1,
        "head": head,
        "problems": sum(finding.status == "problem" for finding in findings),
        "warnings": sum(finding.status == "warning" for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "ranks": list(ranks),
    }


def page(document: dict[str, Any], *, symbols: bool) -> str:
    """Returns the page as text of at most 80 columns, but for words that are longer.

    Args:
        document: from `document`.
        symbols: whether the output can show check marks; the words beside them say the same.
    """
    lines = [document["head"], ""]
    margin = " " * (24 if symbols else 22)
    for finding in document["findings"]:
        symbol, word = _MARKS[finding["status"]]
        mark = f"{symbol} {word:<5}" if symbols else f"{word:<5}"
        lines += _wrapped(finding["text"], f" {mark} {finding['subject']:<14} ", margin)
        if finding["remedy"]:
            lines += _wrapped(finding["remedy"], margin + ("→ " if symbols else "> "), margin + "  ")
    return "\n".join([*lines, "", document.get("verdict") or _verdict(document["problems"], document["warnings"])])


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _verdict(problems: int, warnings: int) -> str:
    if problems:
        return f"{count(problems, 'problem')}, {count(warnings, 'warning')}: training will not work as it should."
    if warnings:
        return f"No problem, {count(warnings, 'warning')}: training works; what to look at is above."
    return "No problem found: training will work here."
