"""torch's DataLoader, intercepted in place: where its indices come from, and where its batches go."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_adaptive.wrap.collating import TriedBatch, watched
from hvd_adaptive.wrap.loaders import IndexStream
from hvd_adaptive.wrap.reasons import Reason

if TYPE_CHECKING:
    from hvd_adaptive.wrap.wrapped_run import Engine


class _IndexSampler:
    """Stands where the loader's batch sampler stood."""

    def __init__(self, listener: Engine, loader: DataLoader[Any], original: Any) -> None:
        self._listener = listener
        # A loader whose workers stay holds its iterator, which holds this: a circle, in which workers would outlive the loader.
        # Any other one must stay while a script loops over it, as in `for batch in DataLoader(...)`.
        self._loader = weakref.ref(loader) if loader.persistent_workers else lambda: loader
        self._original = original

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader()
        stream = None if loader is None else self._listener.open_stream(loader, self._original)
        return iter(self._original) if stream is None else stream

    def __len__(self) -> int:
        return len(self._original)


def intercept_loaders(listener: Engine) -> None:
    """Replaces the methods of torch's loader classes through which every batch goes."""
    index_sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
    begin, advance = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__

    def _index_sampler(self: DataLoader[Any]) -> Any:
        return _IndexSampler(listener, self, index_sampler(self))

    @functools.wraps(begin)
    def __init__(self: Any, loader: DataLoader[Any]) -> None:
        begin(self, loader)
        # Before workers start.
        stream = self._sampler_iter
        if isinstance(stream, IndexStream) and not (stream.loader.is_collate_known or listener.config.has_equal_shares()):
            stream.loader.is_collate_known = True
            self._collate_fn = watched(self._collate_fn)

    def __next__(self: Any) -> Any:
        stream = self._sampler_iter
        if not isinstance(stream, IndexStream):
            return advance(self)
        if stream.owner() is not self:
            stream.owner = weakref.ref(self)
        listener.fetching(stream)
        # Without workers a list is asked for and read within the call below.
        stream.drop(outstanding=getattr(self, "_send_idx", 0) - getattr(self, "_rcvd_idx", 0))
        try:
            batch = advance(self)
        except StopIteration:
            listener.exhausted(stream)
            raise
        if isinstance(batch, TriedBatch):
            if batch.is_mixed:
                stream.loader.reasons.add(Reason.COLLATED)
            if batch.is_reordered is not None:
                stream.loader.may_reorder = batch.is_reordered
            batch = batch.batch
        listener.delivered(stream, batch)
        return batch

    DataLoader._index_sampler = property(_index_sampler)  # type: ignore[assignment,method-assign]
    _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__ = __init__, __next__  # type: ignore[method-assign]
