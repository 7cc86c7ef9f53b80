"""torch's loaders, intercepted in one process: whose weight a delivered batch gets."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hvd_adaptive.wrap.loader_calls import intercept_loaders
from hvd_adaptive.wrap.loaders import IndexStream, Loader
from hvd_adaptive.wrap.run_options import RunConfig

BATCHES = 8
# Rank 0's part of two ranks' batches of 6: another one for each, so that a shift shows.
SIZES = [6, 2, 3, 4, 5, 7, 8, 9]


class Data(Dataset[torch.Tensor]):
    """Reads some samples only at the second try."""

    def __init__(self, unread: set[int]) -> None:
        self.unread = unread
        self.num_samples = 12 * BATCHES

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.unread:
            raise OSError("unreadable")
        return torch.tensor(index)


class Listener:
    """As much of the engine as a loader needs, on rank 0 of two."""

    stream: IndexStream
    config = RunConfig()

    def open_stream(self, loader: DataLoader[Any], index_sampler: Any) -> IndexStream:
        self.stream = IndexStream(Loader(loader, 1), index_sampler, world_size=2, rank=0, upper=None)
        for number, size in enumerate(SIZES):
            self.stream.change_fractions((size / 12, 1 - size / 12), first=number)
        self.stream.loader.fractions = (0.5, 0.5)
        return self.stream

    def fetching(self, stream: IndexStream) -> None: ...

    def exhausted(self, stream: IndexStream) -> None: ...

    def delivered(self, stream: IndexStream, batch: torch.Tensor) -> None:
        stream.deliver()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    listener = Listener()
    # What is set here is put back afterwards.
    monkeypatch.setattr(DataLoader, "_index_sampler", DataLoader._index_sampler)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    intercept_loaders(listener)  # type: ignore[arg-type]
    return listener


def make_loader(num_workers: int, unread: set[int] | None = None, **options: Any) -> DataLoader[Any]:
    data = Data(unread or set())
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    return DataLoader(data, batch_size=6, sampler=sampler, num_workers=num_workers, **options)


def check(listener: Listener, batch: torch.Tensor, number: int) -> None:
    stream = listener.stream
    assert stream.num_delivered == number + 1
    assert len(batch) == stream.current.num_samples == SIZES[number]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_could_not_be_read_leaves_the_later_ones_their_weights(listener: Listener, num_workers: int) -> None:
    iterator, numbers = iter(make_loader(num_workers, unread={24})), []
    for number in range(BATCHES):
        try:
            batch = next(iterator)
        except OSError:
            continue
        check(listener, batch, number)
        numbers.append(number)
    assert numbers == [0, 1, 3, 4, 5, 6, 7]
    with pytest.raises(StopIteration):
        next(iterator)


def test_batches_that_are_skipped_in_the_sampler_leave_the_later_ones_their_weights(listener: Listener) -> None:
    """As where a script goes on in the middle of an epoch without reading what came before."""
    iterator: Any = iter(make_loader(0))
    for _ in range(3):
        next(iterator._sampler_iter)
    for number, batch in enumerate(iterator, 3):
        check(listener, batch, number)
    assert listener.stream.num_delivered == BATCHES


@pytest.mark.parametrize("stay", [True, False])
def test_a_loader_goes_with_its_workers_when_the_script_lets_go_of_it(listener: Listener, stay: bool) -> None:
    loader = make_loader(1, persistent_workers=stay)
    gc.disable()
    try:
        for _ in range(2 if stay else 1):
            batches = list(loader)
            assert [len(batch) for batch in batches] == SIZES
        worker, alive = multiprocessing.active_children()[0] if stay else None, weakref.ref(loader)
        del loader
        assert alive() is None and (worker is None or not worker.is_alive())
    finally:
        gc.enable()


@pytest.mark.parametrize("stay", [True, False])
def test_the_data_set_of_a_loader_that_only_a_loop_holds_is_known(listener: Listener, stay: bool) -> None:
    kept = make_loader(0)
    expected = Loader(kept, 1).fingerprint()
    for _ in make_loader(1, persistent_workers=stay):
        assert listener.stream.loader.fingerprint() == expected


@pytest.mark.parametrize("error", [TypeError, NotImplementedError, OverflowError])
def test_a_batch_sampler_need_not_know_its_length(error: type[Exception]) -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([[0, 1]])

        def __len__(self) -> int:
            raise error

    sampler: Any = Endless()
    loader = DataLoader(Data(set()), batch_sampler=sampler)
    assert IndexStream(Loader(loader, 1), sampler, world_size=2, rank=0, upper=None).num_batches == 0
