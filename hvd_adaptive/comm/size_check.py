"""Whether the parts of a collective have the sizes that the ranks expect, told by one number of each rank.

Tables of all sizes would take a rank's bandwidth as the square of the number of ranks; they are gathered only where something
is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class MismatchError(RuntimeError):
    """The ranks' collectives do not fit together; raised on every rank."""


def fingerprint(sizes: Sequence[int]) -> int:
    """Returns a number, int64, that differs for lists that differ, but for one in 2^64."""
    return _sum(np.arange(len(sizes)), sizes)


def balance(rank: int, *, sent: Sequence[int], expected: Sequence[int]) -> int:
    """Returns a number, int64, of which the sum over ranks is 0 modulo 2^64 where each rank expects what the others send it, and
    otherwise is not, but for one case in 2^64.

    Args:
        rank: this rank.
        sent: bytes to each rank.
        expected: bytes from each rank.
    """
    ranks = np.arange(len(sent))
    difference = _sum(rank * len(sent) + ranks, sent) - _sum(ranks * len(sent) + rank, expected)
    return _signed(difference)


def is_balanced(balances: Tensor) -> bool:
    """Returns whether the ranks' balances, int64, sum to 0."""
    return _signed(sum(balances.tolist())) == 0


def check_sizes(name: str, sent: Tensor, expected: Tensor, rank: int) -> None:
    """Raises on every rank if the parts for any rank are not of the sizes that it expects.

    Args:
        name: of the collective.
        sent: bytes to each rank from each, shape (world_size, world_size).
        expected: bytes that each rank expects from each; -1: not known.
        rank: this rank.

    Raises:
        MismatchError: naming the sizes.
    """
    wrong = ((sent != expected) & (expected >= 0)).any(1)
    if wrong.any():
        receiver = rank if wrong[rank] else int(wrong.int().argmax())
        where = "" if receiver == rank else f" on rank {receiver}"
        raise MismatchError(
            f"{name}: the ranks sent {sent[receiver].tolist()} bytes, but {expected[receiver].tolist()} were expected{where}"
        )


def _sum(places: NDArray[np.int64], values: Sequence[int]) -> int:
    weights = _mixed(places.astype(np.uint64))
    return _signed(int((weights * np.asarray(values, dtype=np.int64).astype(np.uint64)).sum(dtype=np.uint64)))


def _mixed(places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, by place (splitmix64)."""
    mixed = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value
