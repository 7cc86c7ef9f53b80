"""Islands: ranks that compute each batch together and are one rank to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.validation import parse_island

# Statistics of which each rank of an island has a part. Of the others it has all: an island is as slow as its slowest rank.
_ADD_UP = ("num_samples", "num_updates", "handed_samples", "loss_sum", "loss_samples", "payload_bytes")


@dataclass(frozen=True, slots=True)
class Islands:
    """Which ranks make up which island.

    Attributes:
        of_rank: the island of each rank, int64, shape (world_size,); islands are numbered by their first ranks.
    """

    of_rank: NDArray[np.int64]

    @classmethod
    def of(cls, option: str, hosts: Sequence[str]) -> Islands:
        """Returns the islands that ``Config.island`` means.

        Args:
            option: as there.
            hosts: of the ranks.

        Raises:
            ValueError: if the ranks cannot be divided so.
        """
        sizes, world_size = parse_island(option), len(hosts)
        if not sizes:
            names = list(dict.fromkeys(hosts))
            return cls(np.array([names.index(host) for host in hosts], dtype=np.int64))
        if len(sizes) == 1:
            if world_size % sizes[0]:
                divisors = [str(n) for n in range(2, world_size + 1) if world_size % n == 0]
                raise ValueError(
                    f"island must divide the number of ranks, got {sizes[0]} and {world_size} ranks: choose "
                    f"{' or '.join(divisors) or 'no island'}, or name the size of each island, as in 1,3"
                )
            sizes *= world_size // sizes[0]
        if sum(sizes) != world_size:
            raise ValueError(
                f"island must name the size of every island, got {option}, which are {sum(sizes)} of {world_size} ranks: "
                f"choose sizes that add up to {world_size}, or one number that divides it"
            )
        return cls(np.repeat(np.arange(len(sizes)), sizes))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Ranks of each island, shape (num_islands,)."""
        return np.bincount(self.of_rank)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each island."""
        return [int(rank) for rank in np.unique(self.of_rank, return_index=True)[1]]

    @property
    def members(self) -> list[list[int]]:
        """The ranks of each island, ascending."""
        return [np.flatnonzero(self.of_rank == island).tolist() for island in range(len(self.sizes))]

    def check_shards(self) -> None:
        """Raises ValueError unless each shard of a model can be merged by itself: by the ranks that have it in each island, in
        the order of the islands."""
        if len(set(self.sizes.tolist())) > 1:
            raise ValueError(
                f"islands of a sharded model must have equally many ranks, got {self.sizes.tolist()}: else their shards differ. "
                "Choose one number for island, or leave fully_shard out"
            )
        if any(list(ranks) != sorted(ranks) for ranks in zip(*self.members, strict=True)):
            raise ValueError(
                f"islands of a sharded model must have their ranks in the same order, got {self.members}: start the ranks "
                "host by host"
            )

    def combine(self, gathered: Gathered) -> dict[str, Array]:
        """Returns the islands' statistics, shape (num_islands,), from those of their ranks, shape (world_size,)."""
        return {name: self._combine(name, values) for name, values in gathered.items()}

    def _combine(self, name: str, values: Array) -> Array:
        parts = [values[self.of_rank == island] for island in range(len(self.sizes))]
        if name in _ADD_UP:
            return np.array([part.sum() for part in parts])
        if name == "base":
            # Of an island whose ranks have changed different parameters it is none.
            return np.array([part[0] if (part == part[0]).all() else -1.0 for part in parts])
        return np.array([part.min() if name == "finite" else part.max() for part in parts])


def own_part(num_samples: int, *, member: int, size: int, unit: int, smallest: int) -> tuple[int, int]:
    """Returns which samples of an island's batch one of its ranks computes: from the first number up to the second.

    Args:
        num_samples: of the batch, >= 1.
        member: this rank, in [0, size).
        size: ranks of the island.
        unit: samples of a micro-batch, of which parts are whole numbers but for the last one; 1: they have any size. Of fewer
            samples than that the last rank has all.
        smallest: samples of the smallest part, where ``unit`` is 1. Ranks beyond the last such part have none, but the first has
            one.
    """
    if num_samples < unit:
        # They take several micro-batches, and the first rank must have no more than others (below).
        return (0 if member == size - 1 else num_samples), num_samples
    num_units = -(-num_samples // unit)
    num_parts = max(1, min(size, num_units if unit > 1 else num_samples // smallest))
    if member >= num_parts:
        return num_samples, num_samples
    # Samples are rounded to the nearest, so that what is over goes to no rank more often than to others. Of micro-batches the
    # first rank must have no more than others: it claims ahead for all, as far as its own reads go. Who has fewer would wait for
    # a claim that the first one makes only after this step, for which it waits.
    half = num_parts if unit == 1 else 0
    edges = ((2 * num_units * edge + half) // (2 * num_parts) for edge in (member, member + 1))
    start, stop = (min(num_samples, edge * unit) for edge in edges)
    return start, stop
