"""Codecs by name, such as ``maxmin:4,bucket=1024,nearest``; `KNOWN` lists the forms."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from hvd_adaptive.compress.codec import Cast, Codec
from hvd_adaptive.compress.low_rank import PowerSgd
from hvd_adaptive.compress.quantize import MaxMin, Normal
from hvd_adaptive.compress.sparsify import TopK

KNOWN = {
    "none": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "maxmin": "maxmin:BITS[,bucket=N][,nearest|stochastic]",
    "normal": "normal:BITS[,bucket=N]",
    "topk": "topk:FRACTION[,exact|sampled]",
    "powersgd": "powersgd:RANK",
}


def parse_codec(text: str) -> Codec:
    """Returns the codec that a text names.

    Raises:
        ValueError: for an unknown name or option, or a value out of range; the message lists what is known.
    """
    kind, _, rest = text.strip().partition(":")
    words = [word.strip() for word in rest.split(",")] if rest else []
    if kind not in KNOWN:
        close = difflib.get_close_matches(kind, KNOWN, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown codec {text!r}: {hint}known are {', '.join(KNOWN.values())}")
    if kind in ("none", "fp16", "bf16"):
        if words:
            raise ValueError(f"codec {kind!r} takes no options, got {text!r}")
        return Cast(kind)
    try:
        return _BUILDERS[kind](words)
    except ValueError as error:
        raise ValueError(f"codec {text!r}: {error}; the form is {KNOWN[kind]}") from None


def _maxmin(words: list[str]) -> Codec:
    if not words:
        raise ValueError("the number of bits is missing")
    options: dict[str, Any] = {"bits": _integer("bits", words[0])}
    for word in words[1:]:
        name, value = ("rounding", word) if word in ("nearest", "stochastic") else ("bucket", _bucket(word))
        if name in options:
            raise ValueError(f"{name} must be given once, got {word!r} as well")
        options[name] = value
    return MaxMin(**options)


def _normal(words: list[str]) -> Codec:
    if not words:
        raise ValueError("the number of bits is missing")
    if len(words) > 2:
        raise ValueError(f"unknown option {words[2]!r}")
    return Normal(_integer("bits", words[0]), *map(_bucket, words[1:]))


def _topk(words: list[str]) -> Codec:
    if not words:
        raise ValueError("the fraction is missing")
    try:
        fraction = float(words[0])
    except ValueError:
        raise ValueError(f"fraction must be a number, got {words[0]!r}") from None
    unknown = [word for word in words[1:] if word not in ("exact", "sampled")]
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}")
    if len(words) > 2:
        raise ValueError(f"it takes one of exact and sampled, got {', '.join(words[1:])}")
    return TopK(fraction, sampled="sampled" in words[1:])


def _powersgd(words: list[str]) -> Codec:
    if len(words) != 1:
        raise ValueError(f"it takes one option, the rank, got {words}")
    return PowerSgd(_integer("rank", words[0]))


_BUILDERS: dict[str, Callable[[list[str]], Codec]] = {
    "maxmin": _maxmin, "normal": _normal, "topk": _topk, "powersgd": _powersgd
}  # fmt: skip


def _bucket(word: str) -> int:
    name, equals, value = word.partition("=")
    if name != "bucket" or not equals:
        raise ValueError(f"unknown option {word!r}")
    return _integer("bucket", value)


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
