"""What a DataLoader's passes hand out: index lists that change size; loader_calls.py has the interception.

All that a loader does with a batch (workers, prefetching, pinning, collating) follows from the list of indices that its batch
sampler hands out. So only that list is replaced, in this process; workers see nothing of it. A list is fixed when it is
handed out, which with workers is some batches before its batch is delivered.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hvd_adaptive.algorithm.shares import integer_shares
from hvd_adaptive.wrap.collating import may_reorder
from hvd_adaptive.wrap.decisions import leaves_out_samples
from hvd_adaptive.wrap.fingerprint import contents, fingerprint
from hvd_adaptive.wrap.graphs import Heads
from hvd_adaptive.wrap.index_lists import Handed, as_list, like
from hvd_adaptive.wrap.kept_batches import FirstBatches
from hvd_adaptive.wrap.losses import Kind
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.sampling import OneOrder, Union, checksum, find_union, take_share
from hvd_adaptive.wrap.share_rules import Controller
from hvd_adaptive.wrap.target_means import Targets

# Batches of a loader that are followed all of their way from loader to backward.
_ENOUGH_TRACES = 2

# Steps before a pass that begins with a batch that is followed once more, as the script may have changed: twice as many each
# time, up to the most. Its shares are equal, and to follow it takes time: together some steps' worth.
_FOLLOWED_AFTER, _MOST_FOLLOWED_AFTER = 20, 320

# Batches of which a pass is asked at once how long they are on the ranks; it remembers some more.
_MOST_LOOKED_AT = 1000


class Loader:
    """What is known of one DataLoader; alive while it is.

    Attributes:
        kind: its data set, sampler and batch size, for the report.
        name: how the report names it.
        label: the same, with its kind.
        reasons: why its shares stay equal; empty: nothing known against it.
        fractions: each rank's part of its global batches from the next pass on; None: as the script has it.
        split: fractions, and the ranks' samples of the largest global batch that was split by them last.
        smallest: fewest samples of a rank's share.
        smallest_seen: what this rank has seen to be needed since the ranks agreed on that.
        num_steps: optimizer steps that its batches led to.
        num_shared: those of them with unequal shares.
        num_repeated: batches that the script left out and that came once more.
        num_losses: losses that its batches led to.
        heads: the losses of its batches.
        loss_kinds: what those were that were followed.
        adds_up: all ranks know that they are sums over samples; changes in exchanges only.
        targets: what is known of those that are means over targets.
        is_successor: it was made in place of another one like it, which was gone.
        is_traced: the way of a batch from loader to backward was seen.
        num_traces: batches that were followed for that.
        num_followed: those of them that were seen all the way.
        followed_from: steps after which a later pass is to begin with a followed batch, as this rank counts them.
        begins_followed: the next passes begin with one; changes in exchanges only, as `fractions` does.
        controller: what proposes its shares.
        looks: what its first batches show.
        is_collate_known: its collate_fn was tried.
        may_reorder: the rows of a batch may be in another order than its samples.
        ends_together: its passes are known to have as many batches on all ranks.
        beside: the last pass that another thread has read than the one that trains. Nobody else may keep it that long.
    """

    def __init__(self, loader: DataLoader[Any], number: int) -> None:
        sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        size = f"batch_size={loader.batch_size}" if loader.batch_size is not None else "own batches"
        self.kind = f"({type(loader.dataset).__name__}, {type(sampler).__name__}, {size})"
        self.name = f"DataLoader {number}"
        self.label = f"{self.name} {self.kind}"
        self.reasons: set[Reason] = set()
        self._loader = weakref.ref(loader)
        # The loader may be gone within its last pass. What has no weak references, as a list, has no fingerprint either.
        self._dataset: Callable[[], Any] = lambda: None
        with contextlib.suppress(TypeError):
            self._dataset = weakref.ref(loader.dataset)
        self._fingerprint: int | None = None
        self._contents: int | None = None
        self.fractions: tuple[float, ...] | None = None
        self.split: tuple[tuple[float, ...] | None, list[int]] = (None, [])
        self.smallest = self.smallest_seen = 1
        self.num_steps = self.num_shared = self.num_repeated = self.num_losses = 0
        self.heads = Heads()
        self.loss_kinds: set[Kind | None] = set()
        self.adds_up = False
        self.targets = Targets()
        self.is_successor = False
        self.is_traced = False
        self.num_traces = self.num_followed = 0
        self.followed_from = self._followed_after = _FOLLOWED_AFTER
        self.begins_followed = False
        self.controller: Controller | None = None
        self.looks = FirstBatches(loader)
        self.ends_together = self.is_collate_known = False
        self.beside: IndexStream | None = None
        if isinstance(loader.dataset, IterableDataset):
            self.reasons.add(Reason.ITERABLE)
        elif loader.batch_sampler is None:
            self.reasons.add(Reason.NO_BATCHING)
        if loader.num_workers > 0 and not getattr(loader, "in_order", True):
            self.reasons.add(Reason.OUT_OF_ORDER)
        self.may_reorder = may_reorder(loader.collate_fn)
        if leaves_out_samples(loader.collate_fn):
            self.reasons.add(Reason.DROPPED)

    @property
    def is_gone(self) -> bool:
        """Whether the script has let go of the loader."""
        return self._loader() is None

    def was_followed(self) -> None:
        """Takes note that a later pass has begun with a followed batch. Short passes may do so several times in an interval."""
        self._contents = None
        if self.num_steps >= self.followed_from:
            self._followed_after = min(2 * self._followed_after, _MOST_FOLLOWED_AFTER)
        self.followed_from = max(self.followed_from, self.num_steps) + self._followed_after

    def looked_at(self, findings: set[Reason], kinds: list[Kind | None], least_samples: int) -> None:
        """Takes note of what a followed batch has shown.

        Args:
            findings: why shares must be equal.
            kinds: what its losses are, one for each.
            least_samples: fewest samples of a batch that the script can take.
        """
        if not self.is_traced:
            self.num_followed += 1
            self.is_traced = self.num_followed >= _ENOUGH_TRACES
        self.reasons |= findings
        self.smallest_seen = max(self.smallest_seen, least_samples)
        self.loss_kinds.update(kinds)
        if not kinds:
            self.reasons.add(Reason.UNKNOWN_LOSS)
        if {Kind.SUM, Kind.MEAN} <= self.loss_kinds:
            self.reasons.add(Reason.SUM_LOSS)

    def fingerprint(self) -> int:
        """Returns a checksum of what its data set held when this was first asked for, and holds since a pass was followed."""
        dataset = self._dataset()
        if self._fingerprint is None:
            self._fingerprint = fingerprint(dataset)
        if self._contents is None:
            self._contents = contents(dataset)
        # Of their digits: two checksums of the same bytes differ alike between ranks, and XOR would cancel that.
        return zlib.crc32(f"{self._fingerprint} {self._contents}".encode())


class KnownLoaders:
    """The loaders that the script has taken batches from; it may make one anew in each epoch.

    Args:
        told: all of them, in order, for the report.
    """

    def __init__(self, told: list[Loader]) -> None:
        self._told = told
        self._known: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()

    def of(self, loader: DataLoader[Any]) -> Loader:
        """Returns what is known of a loader. Of one in place of another the speeds are, its use is looked at again."""
        known = self._known.get(loader)
        if known is None:
            known = self._known[loader] = Loader(loader, len(self._told) + 1)
            gone = [other for other in self._told if other.is_gone and other.kind == known.kind]
            before = [other for other in gone if other.num_steps]
            known.controller = before[-1].controller if before else None
            known.is_successor = bool(gone)
            self._told.append(known)
        return known


class IndexStream:
    """One pass: hands out this rank's lists of indices, and remembers them until their batches are delivered.

    Attributes:
        loader: whose pass it is.
        num_handed: lists handed out.
        num_delivered: batches that the script has got.
        owner: the loader's iterator, once it has asked for a batch.
        num_unused: batches delivered since the last backward of one.
        current: the last delivered batch.
        indices: its samples; None if that cannot be known.
        delivered_at: when that was, in events counted by the follower.
        is_evaluated: the last delivered batch went through a model in evaluation mode, without gradients.
        is_over: the pass has come to its end.
        num_unrelated: batches that were followed by one of another loader before backward.
        num_batches: batches of the whole pass; 0: not known.
        begins_followed: its first batch is to be followed, and has the script's own size for that; alike on all ranks.
        num_shared: batches with unequal shares that led to a backward.
        num_target_sums: what the ranks still add up before their next step, of its batches' targets.
        world_size: number of ranks.
    """

    def __init__(
        self, loader: Loader, index_sampler: Any, *, world_size: int, rank: int, upper: int | None, unit: int = 1
    ) -> None:
        self.loader = loader
        self.num_handed = 0
        self.num_delivered = 0
        self.owner: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self.num_unused = 0
        self.current = Handed(0, 0, 1.0)
        self.indices: list[Any] | None = None
        self.delivered_at = 0
        self.is_evaluated = False
        self.is_over = False
        # The other thread that reads it.
        self.reader: threading.Thread | None = None
        self.num_unrelated = 0
        self.num_batches = 0
        self.num_shared = self.num_target_sums = 0
        self.begins_followed = False
        if not loader.reasons & {Reason.ITERABLE, Reason.NO_BATCHING}:
            # Of any kind: torch itself does not ask here.
            with contextlib.suppress(Exception):
                self.num_batches = len(index_sampler)
        self._index_sampler = index_sampler
        self._own = iter(index_sampler)
        self.world_size = world_size
        self._rank = rank
        self._upper = upper
        # Shares are whole numbers of so many samples, where the script's batches are.
        self._unit = unit
        self._union: Union | None = None
        self._fractions: tuple[float, ...] | None = None
        self._smallest = 1
        self._longest = 0
        # From which list on there are other fractions, and another smallest share.
        self._changes: deque[tuple[int, tuple[float, ...] | None, int]] = deque()
        self._queue: deque[tuple[Handed, Any, list[Any] | None]] = deque()
        self._last_own: Any = None
        self._again: deque[Any] = deque()
        self._looked_at = 0

    @property
    def is_beside(self) -> bool:
        """Whether another thread reads it than the one that trains, which is at an earlier batch."""
        return self.loader.beside is self

    @property
    def is_open(self) -> bool:
        """Whether the script may still ask for batches; a loop that was left early has freed its iterator."""
        # What another thread has read to the end may still be trained on.
        return not self.is_over and (self.is_beside or self.owner() is not None)

    @property
    def weight(self) -> float:
        """The factor on the gradients of the last delivered batch: those of sums over samples add up as they are."""
        return 1.0 if self.loader.adds_up else self.current.weight

    @property
    def weight_differs(self) -> bool:
        """Whether the last delivered batch has not the script's own size."""
        return self.current.weight != 1.0

    def ranks_of_samples(self) -> list[int]:
        """Returns whose samples those of the last delivered batch are with equal shares."""
        own_size = self.current.global_samples // self.world_size
        return [(self.current.first + place) // own_size for place in range(self.current.num_samples)]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.num_handed == 0:
            # Not by this rank's own counts: it alone may evaluate, or leave out a backward.
            self.begins_followed, self._smallest = self.loader.begins_followed, self.loader.smallest
        # A reason that this rank has found since the shares were agreed on counts from the next exchange on, as for the others.
        if self.num_handed == 0 and (not self.loader.reasons or self.loader.fractions is not None):
            found = find_union(self._index_sampler, world_size=self.world_size, rank=self._rank)
            if isinstance(found, Reason):
                self.loader.reasons.add(found)
            else:
                self._union = found
                # Any other sampler than torch's must first show in this pass that its batches were foreseen.
                self._fractions = self.loader.fractions if isinstance(found, OneOrder) else None
        if self._union is not None:
            self._union.handing_out(self.num_handed)
        own = self._again.popleft() if self._again else next(self._own)
        while self._changes and self.num_handed >= self._changes[0][0]:
            _, self._fractions, self._smallest = self._changes.popleft()
        indices = as_list(own)
        if indices is None and not self.loader.reasons:
            self.loader.reasons.add(Reason.NO_LISTS)
        size = len(indices or ())
        handed, share = Handed(size, size * self.world_size, 1.0), own
        is_own = self.begins_followed and self.num_handed == 0
        if self._fractions is not None and indices is not None and self._union is not None and not is_own:
            indices, handed = self._share(indices, handed)
            share = like(own, indices)
        self._queue.append((handed, own, indices))
        self.num_handed += 1
        return share

    def deliver(self) -> None:
        """Takes note that the next batch has come to the script."""
        self.num_delivered += 1
        self.num_unused += 1
        self.is_evaluated = False
        self.current, self._last_own, self.indices = self._queue.popleft()

    def drop(self, *, outstanding: int) -> None:
        """Counts as delivered what was handed out but never comes: it could not be read, or the script asked for lists only.

        Args:
            outstanding: lists that the workers still have to bring.
        """
        while len(self._queue) > outstanding:
            self._queue.popleft()
            self.num_delivered += 1

    def change_fractions(self, fractions: tuple[float, ...] | None, *, first: int) -> None:
        """Changes the shares from a batch on, the same one on all ranks, that no rank has handed out yet; and with them, to the
        loader's of now, the smallest share."""
        self._changes.append((first, fractions, self.loader.smallest))

    def look_at_unused(self, *, is_evaluated: bool) -> None:
        """Ends unequal shares where the script leaves out their batches, at the same batch on all ranks that leave it out.

        Args:
            is_evaluated: the script only evaluates on them, as for the accuracy on training data: they end for this pass.
        """
        # Not by this rank's own size: all ranks must change at the same batch.
        if self.current.is_unequal and self.num_unused and not self.num_shared:
            self.change_fractions(None, first=self.num_handed)
            if not is_evaluated:
                # Later passes change with the next exchange: this rank alone may have looked at some batches.
                self.loader.reasons.add(Reason.SKIPPED)
                # The first batches of a pass are skipped by their number, as where training goes on in the middle of an epoch.
                if self.num_unused < self.num_delivered:
                    self.hand_out_again()

    def release(self) -> None:
        """Lets go of the sampler, and with it of the data set: all lists are handed out."""
        self._index_sampler, self._own, self._union = None, iter(()), None

    def hand_out_again(self) -> None:
        """Has the last delivered batch come once more, as the script has it: none of its samples was trained on."""
        self._again.append(self._last_own)
        self.loader.num_repeated += 1

    def last_checksum(self) -> int | None:
        """Returns a checksum of the last delivered global batch; None if this rank's own part of it is not as expected."""
        if self._union is None:
            return None
        lists = self._union.batch(self.num_delivered - 1)
        return checksum(lists) if lists[self._rank] == as_list(self._last_own) else None

    def is_uneven(self) -> bool:
        """Whether the ranks' own batches were not equally long, in those that came since this was last asked.

        The last batch of a pass may be so, as of a sampler that does not fill up what is left: its shares are equal.
        """
        first, self._looked_at = max(self._looked_at, self.num_delivered - _MOST_LOOKED_AT), max(self.num_delivered - 1, 0)
        if self._union is None:
            return False
        return any(len({len(part) for part in self._union.batch(n)}) > 1 for n in range(first, self._looked_at))

    def _share(self, own: list[Any], handed: Handed) -> tuple[list[Any], Handed]:
        assert self._union is not None and self._fractions is not None
        lists = self._union.batch(self.num_handed)
        if lists[self._rank] != own:
            raise RuntimeError(
                f"{self.loader.label}: {Reason.UNION.value}. This was not so at first, so some batches have been pooled already; "
                "make its sampler repeatable, change batch_size between passes only, or run with --shares equal"
            )
        if {len(part) for part in lists} != {len(own)}:
            # All ranks see these lists and leave this batch alone.
            return own, handed
        total = handed.global_samples
        unit = self._unit if len(own) % self._unit == 0 else 1
        # Of one sample squeeze() takes the batch's dimension away, which plain Horovod's ranks never see.
        self._longest = max(self._longest, len(own))
        smallest = min(max(self._smallest, min(2, self._longest // 2)), len(own))
        shares = integer_shares(
            self._fractions,
            total // unit,
            lower=-(-smallest // unit),
            upper=None if self._upper is None else [max(self._upper, len(own)) // unit] * self.world_size,
        )
        sizes = [unit * share for share in shares]
        # The last batch of a pass may be smaller, and its parts coarser.
        if self._fractions != self.loader.split[0] or total >= sum(self.loader.split[1]):
            self.loader.split = self._fractions, sizes
        own_size, first = sizes[self._rank], sum(sizes[: self._rank])
        handed = Handed(own_size, total, self.world_size * own_size / total, len(set(sizes)) > 1, first)
        return take_share(lists, sizes, self._rank), handed
