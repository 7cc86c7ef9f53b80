"""Mutations of valid input: bytes, text, JSON values and environments, drawn from a seeded generator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

INTEGERS = (0, -1, 1, 2, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
WORDS = (
    "", " ", "0", "-1", "+1", "1e9", "1e400", "-0", "nan", "inf", "-inf", "0x10", "1_000", "9" * 25, "9" * 5000, "true", "None",
    "null", "a", "ä", "٣", "²", "\0", "\n", "..", "/", "../../etc", ",", ":", ";", "=", "(x3)",
    "1(x999999)", "%s", "{}", "[]", "\ud800",
    "[" * 20_000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, *INTEGERS, 0.5, -0.0, 1e308, float("nan"), float("inf"), *WORDS, [], {}, [[]], [None], {"a": 1},
    [1, "a", None], {"$": "tensor", "name": "x"}, {"$": "array", "name": 3}, {"$": "float", "value": "x"},
    {"$": "dict", "items": [[{}, 1]]}, {"$": 1},
)  # fmt: skip


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Changes some bytes: flips, deletes, repeats, inserts, cuts, zeroes, or writes an integer of a nasty size."""
    result = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        at = random.randrange(len(result) + 1)
        # Headers and ends are where the structure is.
        at = random.choice((at, min(at, 64), max(0, len(result) - 64)))
        end = min(len(result), at + random.choice((1, 1, 2, 8, 64, 1024)))
        match random.randrange(8):
            case 0 if at < len(result):
                result[at] ^= 1 << random.randrange(8)
            case 1:
                del result[at:end]
            case 2:
                result[at:at] = result[at:end]
            case 3:
                result[at:at] = random.randbytes(random.choice((1, 2, 8, 64)))
            case 4:
                del result[at:]
            case 5:
                result[at:end] = bytes(end - at)
            case 6:
                number = random.choice(INTEGERS) % 2**64
                result[at : at + 8] = number.to_bytes(8, random.choice(("little", "big")))
            case _:
                result[at:end] = random.choice(WORDS).encode(errors="surrogatepass")
    return bytes(result)


def mutate_text(random: Random, text: str) -> str:
    """Changes some tokens of a text: words, numbers, separators and lines."""
    lines = text.split("\n")
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(lines))
        line = lines[at]
        match random.randrange(7):
            case 0:
                del lines[at]
                lines = lines or [""]
            case 1:
                lines.insert(at, random.choice(lines))
            case 2:
                cut = random.randrange(len(line) + 1)
                lines[at] = line[:cut] + random.choice(WORDS) + line[cut:]
            case 3:
                cut = random.randrange(len(line) + 1)
                lines[at] = line[:cut] + line[cut + random.choice((1, 1, 4)) :]
            case 4:
                separator = random.choice(" ,:=.")
                words = line.split(separator)
                words[random.randrange(len(words))] = random.choice((*WORDS, str(random.choice(INTEGERS))))
                lines[at] = separator.join(words)
            case 5:
                lines[at] = line.replace(random.choice(" ,:=.") or " ", random.choice((" ", "\t", ",", ":", "\r", "")), 1)
            case _:
                other = random.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
    return "\n".join(lines)


def mutate_json(random: Random, value: Any) -> Any:
    """Changes a JSON value in one to three places: another value, a key less or more, an entry twice, a deeper nest."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_places(value, lambda new: None))
        _, put = random.choice(places) if places else (None, None)
        new = random.choice(VALUES)
        if put is None or random.random() < 0.02:
            value = new
            continue
        container, key = put
        match random.randrange(5):
            case 0:
                if isinstance(container, dict):
                    del container[key]
                else:
                    container.pop(key)
            case 1 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case 1:
                container[f"{key}_"] = new
            case 2:
                container[key] = [container[key]]
            case 3 if isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
                container[key] = random.choice((-container[key], container[key] + 1, container[key] * 1e6, str(container[key])))
            case _:
                container[key] = copy.deepcopy(new)
    return value


def mutate_environment(random: Random, env: dict[str, str]) -> dict[str, str]:
    """Changes some variables: another value, none, one of another launcher."""
    env = dict(env)
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(list(env) or ["X"])
        match random.randrange(4):
            case 0:
                env.pop(name, None)
            case 1:
                env[name] = random.choice((*WORDS, str(random.choice(INTEGERS))))
            case 2:
                env[name] = mutate_text(random, env.get(name, ""))
            case _:
                env[name] = env[random.choice(list(env))] if env else "1"
    return {name: value.replace("\0", "") for name, value in env.items()}


def _places(value: Any, put: Callable[[Any], None]) -> Any:
    """All places inside a value, as (value there, (container, key))."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield item, (value, key)
        yield from _places(item, put)
