"""The global batches behind the ranks' own ones, foreseen without asking the ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    random_split,
)

from hvd_adaptive.algorithm.shares import integer_shares
from hvd_adaptive.wrap import sampling
from hvd_adaptive.wrap.fingerprint import contents, fingerprint
from hvd_adaptive.wrap.loaders import Loader
from hvd_adaptive.wrap.reasons import Reason, mask, unmask
from hvd_adaptive.wrap.sampling import checksum, find_union, take_share


class Buckets:
    """A batch sampler that holds its rank itself and shuffles with a generator of its own."""

    def __init__(self, num_rows: int, num_replicas: int, rank: int, seed: int | None = 0) -> None:
        self.dataset = list(range(num_rows))
        self.num_replicas, self.rank = num_replicas, rank
        self.generator = None if seed is None else np.random.default_rng(seed)

    def __iter__(self) -> Any:
        rows = list(self.dataset)
        if self.generator is None:
            random.shuffle(rows)
        else:
            self.generator.shuffle(rows)
        mine = rows[self.rank :: self.num_replicas]
        return iter([mine[i : i + 5] for i in range(0, len(mine), 5)])


class Repeated:
    """As timm's and YOLO's, for workers that stay: one pass for all epochs."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


class Counting(DistributedSampler[Any]):
    """Counts its passes itself."""

    def __iter__(self) -> Any:
        self.epoch += 1
        return super().__iter__()


class Calling(DistributedSampler[Any]):
    """The same by a call."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


def torch_sampler(rank: int, world_size: int, num_rows: int, batch_size: int, drop_last: bool) -> BatchSampler:
    sampler = DistributedSampler(
        range(num_rows),  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        seed=3,
        drop_last=drop_last,
    )
    sampler.set_epoch(5)
    return BatchSampler(sampler, batch_size, drop_last=False)


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 5), num_rows=st.integers(5, 80), batch_size=st.integers(1, 9), drop_last=st.booleans()
)
def test_torchs_sampler_is_foreseen_on_every_rank(
    world_size: int, num_rows: int, batch_size: int, drop_last: bool
) -> None:
    samplers = [torch_sampler(rank, world_size, num_rows, batch_size, drop_last) for rank in range(world_size)]
    own = [list(sampler) for sampler in samplers]
    for rank, sampler in enumerate(samplers):
        union = find_union(sampler, world_size=world_size, rank=rank)
        assert not isinstance(union, Reason)
        for number, batches in enumerate(zip(*own, strict=True)):
            assert union.batch(number) == list(batches)
        assert list(sampler) == own[rank]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5), data=st.data())
def test_shares_partition_the_global_batch(sizes: list[int], data: st.DataObject) -> None:
    lists = [[(rank, i) for i in range(size)] for rank, size in enumerate(sizes)]
    targets = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    shares = integer_shares(targets, sum(sizes))
    parts = [take_share(lists, shares, rank) for rank in range(len(sizes))]
    assert [index for part in parts for index in part] == [index for part in lists for index in part]
    assert [take_share(lists, sizes, rank) for rank in range(len(sizes))] == lists


def test_a_sampler_of_the_scripts_own_is_foreseen_and_left_as_it_is() -> None:
    own = [list(Buckets(33, 3, rank)) for rank in range(3)]
    for rank in range(3):
        sampler = Buckets(33, 3, rank)
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        union = find_union(sampler, world_size=3, rank=rank)
        assert not isinstance(union, Reason)
        assert [union.batch(number) for number in range(3)] == [list(batch) for batch in zip(*own, strict=True)]
        assert union.batch(0) == [batches[0] for batches in own]
        assert list(sampler) == own[rank]
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert np.random.get_state()[1].tolist() == numpy_state  # type: ignore[union-attr]


class Keeping(Sampler[int]):
    """Has its order in an array of its own, or its random numbers in a generator of NumPy's old kind."""

    def __init__(self, rank: int, kind: str) -> None:
        self.num_replicas, self.rank, self.kind = 2, rank, kind
        self.array, self.tensor, self.numbers = np.arange(24), torch.arange(24), np.random.RandomState(0)

    def __iter__(self) -> Any:
        if self.kind == "array":
            np.random.RandomState(3).shuffle(self.array)
        self.tensor[:] = self.tensor.roll(5)
        order = {"array": self.array, "tensor": self.tensor}.get(self.kind)
        return iter((self.numbers.permutation(24) if order is None else order).tolist()[self.rank :: 2])


@pytest.mark.parametrize("kind", ["array", "tensor", "numbers"])
def test_what_a_sampler_changes_in_place_is_its_own(kind: str) -> None:
    alone, watched = ([BatchSampler(Keeping(rank, kind), 4, False) for rank in range(2)] for _ in range(2))
    for _ in range(3):
        unions = [find_union(sampler, world_size=2, rank=rank) for rank, sampler in enumerate(watched)]
        for number, lists in enumerate(zip(*alone, strict=True)):
            assert all(union.batch(number) == list(lists) for union in unions)  # type: ignore[union-attr]
        assert [list(sampler) for sampler in watched] == [
            [union.batch(number)[rank] for number in range(3)]  # type: ignore[union-attr]
            for rank, union in enumerate(unions)
        ]


def test_large_arrays_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Keeping(0, "numbers")
    monkeypatch.setattr(sampling, "_MOST_COPIED", 8)
    assert find_union(BatchSampler(sampler, 4, False), world_size=2, rank=0) is Reason.NOT_COPYABLE
    sampler.array.flags.writeable, sampler.tensor = False, torch.zeros(1)
    union = find_union(BatchSampler(sampler, 4, False), world_size=2, rank=0)
    assert not isinstance(union, Reason) and union.batch(0)


def test_an_endless_pass_is_foreseen_through_the_epochs_that_the_script_sets() -> None:
    samplers = [torch_sampler(rank, 2, 24, 4, False) for rank in range(2)]
    endless = [iter(Repeated(sampler)) for sampler in samplers]
    unions = [find_union(Repeated(sampler), world_size=2, rank=rank) for rank, sampler in enumerate(samplers)]
    seen = []
    for number in range(12):
        # What is set within a pass counts from the next one on.
        epoch = {1: 9, 3: 6, 6: 7, 9: 8}.get(number)
        for sampler in samplers if epoch else []:
            sampler.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for union in unions:
            union.handing_out(number)  # type: ignore[union-attr]
        seen.append([next(own) for own in endless])
        # One is asked at each batch, as for unequal shares, the other at times.
        asked = unions if number % 3 == 2 else unions[:1]
        assert all(union.batch(number) == seen[number] for union in asked)  # type: ignore[union-attr]
    assert seen[0] != seen[3] != seen[6]
    # Lists are asked for when the script has set later epochs already, as where workers read ahead.
    late = []
    for number in range(12, 20):
        for sampler in samplers:
            sampler.sampler.set_epoch(100 + number)  # type: ignore[attr-defined]
        unions[1].handing_out(number)  # type: ignore[union-attr]
        late.append([next(own) for own in endless])
    assert [unions[1].batch(number) for number in range(12, 20)] == late  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [Counting, Calling])
@pytest.mark.parametrize("repeated", [Repeated, lambda sampler: sampler])
def test_a_sampler_that_counts_its_passes_is_foreseen(repeated: Any, kind: Any) -> None:
    samplers = [repeated(BatchSampler(kind(range(24), 2, rank), 4, False)) for rank in range(2)]  # type: ignore[arg-type]
    for _ in range(3):
        unions = [find_union(sampler, world_size=2, rank=rank) for rank, sampler in enumerate(samplers)]
        endless = [iter(sampler) for sampler in samplers]
        for number in range(9 if repeated is Repeated else 3):
            batch = [next(own) for own in endless]
            assert all(union.batch(number) == batch for union in unions)  # type: ignore[union-attr]


def test_random_numbers_of_the_process_are_not_foreseen_and_not_used_up() -> None:
    sampler = Buckets(400, 2, 0, seed=None)
    union = find_union(sampler, world_size=2, rank=0)
    assert not isinstance(union, Reason)
    random.seed(1)
    first = random.random()
    random.seed(1)
    union.batch(3)
    assert random.random() == first
    assert union.batch(0)[0] != next(iter(sampler))


@pytest.mark.parametrize(
    "sampler",
    [
        BatchSampler(RandomSampler(range(10)), 2, False),  # type: ignore[arg-type]
        torch_sampler(1, 4, 20, 2, False),
        [[1, 2], [3]],
    ],
)
def test_samplers_that_do_not_split_by_these_ranks_are_refused(sampler: Any) -> None:
    assert find_union(sampler, world_size=2, rank=0) is Reason.NO_SAMPLER


def test_a_sampler_that_cannot_be_copied_is_refused() -> None:
    sampler = Buckets(10, 2, 0)
    sampler.generator = {"stream": (i for i in range(3))}  # type: ignore[assignment]
    assert find_union(sampler, world_size=2, rank=0) is Reason.NOT_COPYABLE


def test_checksums_tell_global_batches_apart() -> None:
    assert checksum([[1, 2], [3]]) == checksum([(1, 2), (3,)])
    assert len({checksum([[1, 2], [3]]), checksum([[1], [2, 3]]), checksum([[1, 2], [4]])}) == 3


def test_reasons_survive_a_float() -> None:
    assert unmask(int(float(mask(set(Reason))))) == set(Reason)
    assert all(unmask(mask({reason})) == {reason} for reason in Reason)


def test_data_sets_are_told_apart_by_what_they_hold() -> None:
    class Texts:
        def __init__(self, texts: list[str], root: str) -> None:
            self.texts, self.root, self.transform = texts, root, lambda text: text

        def __len__(self) -> int:
            return len(self.texts)

        def __getitem__(self, index: int) -> str:
            raise AssertionError("no sample is read")

    texts = [f"text {i}" for i in range(1000)]
    assert fingerprint(Texts(texts, "a")) == fingerprint(Texts(list(texts), "b"))
    assert fingerprint(Texts(texts, "a")) != fingerprint(Texts(texts[::-1], "a"))
    x = torch.arange(1000.0)
    assert fingerprint(TensorDataset(x)) == fingerprint(TensorDataset(x.clone()))
    assert fingerprint(TensorDataset(x)) != fingerprint(TensorDataset(x + 1))
    parts = [fingerprint(Subset(TensorDataset(x), indices)) for indices in (range(0, 500), range(500, 1000))]
    assert parts[0] != parts[1]
    splits = [random_split(TensorDataset(x), [900, 100])[0] for _ in range(2)]
    assert fingerprint(splits[0]) != fingerprint(splits[1])
    assert fingerprint(object()) == fingerprint(3) == 0


def test_the_checksums_of_a_loaders_data_set_do_not_cancel_each_other() -> None:
    found = set()
    for last in range(3, 9):
        loader = DataLoader(TensorDataset(torch.tensor([1.0, 2.0, float(last)])))
        found.add(Loader(loader, 1).fingerprint())
    assert len(found) == 6


def test_what_a_script_writes_into_its_data_set_changes_the_contents() -> None:
    data = TensorDataset(torch.arange(20.0), torch.zeros(20))
    part, before = Subset(data, range(10)), contents(data)
    of_part = contents(part)
    part.num_read = 3  # type: ignore[attr-defined]
    assert contents(part) == of_part and contents(object()) == 0
    data.tensors[1][7] = 1.0
    assert contents(data) != before and contents(part) != of_part
