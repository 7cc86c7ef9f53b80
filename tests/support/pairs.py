"""Which cases a test takes where it runs for several ranks and backends: each case meets each of these, but not all at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

_Case = TypeVar("_Case")
BACKENDS = ("horovod", "torch")


def half(cases: Iterable[_Case], *where: int | str) -> list[_Case]:
    """Every second case: the first, third, ... or the others.

    Args:
        cases: in the same order for every run of the test.
        where: this run's number of ranks or other number, and its backend. One step in one of them gives the other half.
    """
    first = sum(BACKENDS.index(one) if isinstance(one, str) else one for one in where) % 2
    return list(cases)[first::2]
