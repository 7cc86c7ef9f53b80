"""Amounts as people write them: 50us, 10gbit, 2..4096."""

from __future__ import annotations

import re

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES_PER_S = {
    **{unit: 10.0**power / 8 for unit, power in (("kbit", 3), ("mbit", 6), ("gbit", 9))},
    **{unit: 10.0**power for unit, power in (("kB/s", 3), ("MB/s", 6), ("GB/s", 9))},
}


def parse_seconds(name: str, text: str) -> float:
    """Returns the seconds that a text such as 50us means.

    Raises:
        ValueError: naming the option, if it means none >= 0.
    """
    return _parse(name, text, _SECONDS)


def parse_rate(name: str, text: str) -> float:
    """Returns the bytes a second, > 0, that a text such as 10gbit or 1.2GB/s means.

    Raises:
        ValueError: naming the option, if it means none, or may mean bits or bytes.
    """
    if (unclear := re.fullmatch(r"\s*(\S*?)\s*([kKmMgG])b/s\s*", text)) is not None:
        number, prefix = unclear.groups()
        in_bytes = f"{number}{'k' if prefix in 'kK' else prefix.upper()}B/s"
        raise ValueError(f"{name} must say bits or bytes, got {text!r}: write {number}{prefix.lower()}bit or {in_bytes}")
    rate = _parse(name, text, _BYTES_PER_S)
    if rate <= 0:
        raise ValueError(f"{name} must be > 0, got {text!r}")
    return rate


def parse_ranks(text: str) -> list[int]:
    """Returns numbers of ranks: 2,4,12 as it stands; 2..4096 doubles from the first to the last.

    Raises:
        ValueError: if the text is neither, or a number is not in [1, 65536].
    """
    first, dots, last = text.partition("..")
    try:
        numbers = [int(first), int(last)] if dots else [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"ranks must be numbers such as 2,4,8 or a range such as 2..4096, got {text!r}") from None
    if min(numbers) < 1 or max(numbers) > 65536 or (dots and numbers[0] > numbers[1]):
        raise ValueError(f"ranks must lie in [1, 65536] and a range must rise, got {text!r}")
    if not dots:
        return numbers
    doubled = [numbers[0]]
    while 2 * doubled[-1] < numbers[1]:
        doubled.append(2 * doubled[-1])
    return doubled + [numbers[1]] * (numbers[1] > doubled[-1])


def parse_speeds(text: str) -> list[float]:
    """Returns the numbers > 0, separated by commas, behind ``speeds``.

    Raises:
        ValueError: if they are no such numbers.
    """
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise ValueError(f"speeds must be numbers > 0 separated by commas, as in 1,1,2,4, got {text!r}")
    return values


def _parse(name: str, text: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z/]+)\s*", text.lower())
    by_name = {unit.lower(): factor for unit, factor in units.items()}
    try:
        return float(match.group(1)) * by_name[match.group(2)]  # type: ignore[union-attr]
    except (AttributeError, KeyError, ValueError):
        raise ValueError(
            f"{name} must be a number and one of {', '.join(units)}, as in 5{next(iter(units))}, got {text!r}"
        ) from None
