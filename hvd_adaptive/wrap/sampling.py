"""Which samples the other ranks would draw: the global batches behind the ranks' equal ones, and a rank's share of them."""

from __future__ import annotations

import copy
import dis
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from hvd_adaptive.wrap.index_lists import as_list
from hvd_adaptive.wrap.random_numbers import GENERATORS, random_numbers_kept
from hvd_adaptive.wrap.reasons import Reason

_MAX_DEPTH = 4
# Bytes of a sampler's array: of a larger one no copies are made for every rank.
_MOST_COPIED = 64 * 2**20


class Union(Protocol):
    """The ranks' batches of one pass of a loader."""

    def batch(self, number: int) -> list[list[Any]]:
        """Returns the ranks' own lists of indices of a batch, in rank order; numbers may not go back far."""

    def handing_out(self, number: int) -> None:
        """Takes note that the sampler is about to be asked for the list of that number, if that matters."""


def find_union(index_sampler: Any, *, world_size: int, rank: int) -> Union | Reason:
    """Prepares to tell the ranks' batches of the pass that is about to begin, or says why that cannot be.

    Call it before the sampler's iterator is asked for its first batch, as samplers depend on their epoch. Draws no random
    numbers and leaves the sampler as it is.

    Args:
        index_sampler: the loader's batch sampler.
        world_size: number of ranks.
        rank: this rank.
    """
    sampler = getattr(index_sampler, "sampler", None)
    if (
        type(index_sampler) is BatchSampler
        and isinstance(sampler, DistributedSampler)
        and type(sampler).__iter__ is DistributedSampler.__iter__
    ):
        if (sampler.num_replicas, sampler.rank) != (world_size, rank):
            return Reason.NO_SAMPLER
        return OneOrder(sampler, index_sampler.batch_size, world_size)
    try:
        now = _as_rank(index_sampler, rank, world_size=world_size, rank=rank)
    except Exception:
        # A user's sampler may hold anything, and copying it may fail in any way.
        return Reason.NOT_COPYABLE
    return Reason.NO_SAMPLER if now is None else _Replicas(now, index_sampler, world_size, rank)


def take_share(lists: Sequence[Sequence[Any]], sizes: Sequence[int], rank: int) -> list[Any]:
    """Returns a rank's contiguous part of the global batch, which is the ranks' lists one after the other.

    With sizes equal to the lists' lengths every rank gets its own list in its own order.

    Args:
        lists: the ranks' own lists.
        sizes: samples of each rank's share; their sum is that of the lists' lengths.
        rank: whose share.
    """
    start = sum(sizes[:rank])
    whole = [index for part in lists for index in part]
    return whole[start : start + sizes[rank]]


def checksum(lists: Sequence[Sequence[Any]]) -> int:
    """Returns a number that tells global batches apart, equal on all ranks for equal lists, below 2**32."""
    return zlib.crc32(repr([list(part) for part in lists]).encode())


class OneOrder(Union):
    """DistributedSampler's: one shuffled, padded order of the data set, of which every N-th belongs to a rank."""

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, world_size: int) -> None:
        self._sampler = copy.copy(sampler)
        self._batch_size = batch_size
        self._world_size = world_size
        self._order: list[int] | None = None

    def batch(self, number: int) -> list[list[Any]]:
        """See :class:`Union`."""
        if self._order is None:
            # As if there were one rank: the whole order, padded or cut for all of them.
            whole = self._sampler
            whole.rank, whole.num_replicas, whole.num_samples = 0, 1, whole.total_size
            self._order = list(DistributedSampler.__iter__(whole))
        size = self._world_size * self._batch_size
        start, stop = number * size, min((number + 1) * size, len(self._order))
        return [self._order[start + rank : stop : self._world_size] for rank in range(self._world_size)]

    def handing_out(self, number: int) -> None:
        """See :class:`Union`; the order is of one epoch."""


class _Replicas(Union):
    """Any sampler that holds its rank: copies of it, one with each rank, run side by side.

    Args:
        sampler: a copy of the sampler as it was before the pass; the others are only made for loaders that are trained from.
        original: that sampler itself, whose epoch the script may set within an endless pass.
        world_size: number of ranks.
        rank: the rank that it holds.
    """

    _KEPT = 4096

    def __init__(self, sampler: Any, original: Any, world_size: int, rank: int) -> None:
        self._sampler = sampler
        self._of_epochs = _of_epochs(original)
        self._world_size = world_size
        self._rank = rank
        self._iterators: list[Iterator[Any]] | None = None
        self._copied_of_epochs: list[list[Any]] = []
        self._batches: dict[int, list[list[Any]]] = {}
        self._next = 0
        # From which list on the parts had which epochs.
        self._epochs: deque[tuple[int, list[Any]]] = deque()

    def handing_out(self, number: int) -> None:
        now = [part.epoch for part in self._of_epochs]
        if now and (not self._epochs or self._epochs[-1][1] != now):
            self._epochs.append((number, now))

    def batch(self, number: int) -> list[list[Any]]:
        with random_numbers_kept():
            if self._iterators is None:
                copies = [
                    _as_rank(self._sampler, other, world_size=self._world_size, rank=self._rank)
                    for other in range(self._world_size)
                ]
                self._iterators = [iter(sampler) for sampler in copies]
                self._copied_of_epochs = [_of_epochs(sampler) for sampler in copies]
            while self._next <= number:
                while len(self._epochs) > 1 and self._epochs[1][0] <= self._next:
                    self._epochs.popleft()
                # The first has the epoch of before the pass.
                for copied in self._copied_of_epochs if self._next and self._epochs else []:
                    for part, epoch in zip(copied, self._epochs[0][1], strict=False):
                        part.epoch = epoch
                self._batches[self._next] = [as_list(next(iterator, [])) or [] for iterator in self._iterators]
                self._batches.pop(self._next - self._KEPT, None)
                self._next += 1
        return self._batches[number]


def _as_rank(sampler: Any, other: int, *, world_size: int, rank: int) -> Any:
    """Returns a copy in which every part that holds this rank and the world's size holds another rank; None if none does."""
    parts = list(_parts(sampler, 0))
    kept = {id(value): value for part in parts for name, value in vars(part).items() if not _is_own_state(value)}
    held = [part for part in parts if _holds_rank(part, world_size, rank)]
    if not held:
        return None
    memo: dict[int, Any] = dict(kept)
    clone = copy.deepcopy(sampler, memo)
    for part in held:
        memo[id(part)].rank = other
    return clone


def _parts(sampler: Any, depth: int) -> Iterator[Any]:
    if hasattr(sampler, "__dict__") and depth < _MAX_DEPTH:
        yield sampler
        for value in vars(sampler).values():
            if isinstance(value, Sampler) or hasattr(value, "num_replicas"):
                yield from _parts(value, depth + 1)


def _holds_rank(part: Any, world_size: int, rank: int) -> bool:
    return getattr(part, "num_replicas", None) == world_size and getattr(part, "rank", None) == rank


def _of_epochs(sampler: Any) -> list[Any]:
    """The parts of a sampler whose epoch a script sets; none where it counts its passes itself, as its copies do so, too."""
    parts = list(_parts(sampler, 0))
    if any(map(_counts, parts)):
        return []
    return [part for part in parts if hasattr(part, "set_epoch") and "epoch" in vars(part)]


def _counts(part: Any) -> bool:
    code = getattr(getattr(type(part), "__iter__", None), "__code__", None)
    if code is None:
        return False
    stores = any(i.opname == "STORE_ATTR" and i.argval == "epoch" for i in dis.get_instructions(code))
    return stores or "set_epoch" in code.co_names


def _is_own_state(value: Any) -> bool:
    """Whether a sampler may change this while it runs; a data set is shared, not copied.

    Raises:
        ValueError: for what is too large to be copied.
    """
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return False
    if isinstance(value, (np.ndarray, torch.Tensor)) and value.nbytes > _MOST_COPIED:
        raise ValueError("a large array")
    simple = (int, float, str, bool, type(None), list, dict, set, deque, array, bytearray, np.ndarray, torch.Tensor)
    return isinstance(value, (*simple, *GENERATORS, Sampler)) or hasattr(value, "num_replicas")
