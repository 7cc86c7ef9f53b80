"""What becomes x and y of a batch: only a tuple of two is a pair, whatever a batch's length."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from hvd_adaptive.engine.batches import Batch, BatchSource


class Samples:
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def load(dataset: Any, size: int, **options: Any) -> Batch:
    return BatchSource(dataset, torch.device("cpu"), **options).load(np.arange(size), size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_strings_are_no_pairs(size: int) -> None:
    batch = load(Samples(["ab", "cd", "ef"]), size)
    assert batch.x == ["ab", "cd", "ef"][:size] and batch.y is None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_list_of_samples_is_no_pair(size: int) -> None:
    samples = [(torch.full((2,), i), i) for i in range(3)]
    batch = load(Samples(samples), size, collate=lambda samples: samples)
    assert [y for _, y in batch.x] == list(range(size)) and batch.y is None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sample_that_is_a_list_of_two_is_no_pair(size: int) -> None:
    batch = load(Samples([[torch.ones(2), torch.zeros(2)]] * 3), size)
    assert len(batch.x) == 2 and batch.y is None


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3)),
        Samples([(torch.tensor([2.0 * i, 2.0 * i + 1]), i) for i in range(3)]),
        Samples([Pair(torch.tensor([2.0 * i, 2.0 * i + 1]), i) for i in range(3)]),
    ],
)
def test_samples_that_are_tuples_of_two_are_pairs(dataset: Any, size: int) -> None:
    batch = load(dataset, size)
    assert torch.equal(batch.x, torch.arange(2.0 * size).reshape(size, 2))
    assert batch.y.tolist() == list(range(size))


def test_a_collate_of_ones_own_says_by_a_tuple_what_is_a_pair() -> None:
    data = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    batch = load(data, 3, collate=lambda samples: tuple(default_collate(samples)))
    assert batch.y.tolist() == [0, 1, 2]
    batch = load(data, 3, collate=lambda samples: (default_collate(samples), None))
    assert len(batch.x) == 2 and batch.y is None
    with pytest.raises(TypeError, match=r"must return a tuple \(x, y\).*a list of 2 for 3 samples"):
        load(data, 3, collate=lambda samples: default_collate(samples))


def test_triples_are_one_input() -> None:
    batch = load(TensorDataset(torch.zeros(3, 2), torch.ones(3), torch.ones(3)), 2)
    assert len(batch.x) == 3 and batch.y is None


def test_get_batch_returns_a_pair_or_an_input() -> None:
    class Direct:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __len__(self) -> int:
            return 4

        def get_batch(self, rows: Any) -> Any:
            return self.answer

    assert load(Direct((1, 2)), 2).y == 2
    assert load(Direct([1, 2]), 2).x == [1, 2]


def test_rows_of_a_tensor_dataset_are_what_collating_its_samples_gives() -> None:
    class Other(TensorDataset):
        pass

    tensors = torch.randn(9, 3, 2), torch.arange(9, dtype=torch.int32), torch.rand(9) > 0.5
    turned = torch.randn(9, 3, 2).transpose(1, 2), *tensors[1:]
    for used in (tensors[:1], tensors[:2], tensors, turned[:1], turned[:2], turned):
        data = TensorDataset(*used)
        # By rows only where that surely gives the same.
        assert BatchSource(data, torch.device("cpu"))._takes_rows == (used[0] is tensors[0])
        ours, theirs = (load(dataset, 5) for dataset in (data, Other(*used)))
        assert type(ours.x) is type(theirs.x) and type(ours.y) is type(theirs.y)
        parts = list(zip(ours.x, theirs.x, strict=True)) if isinstance(ours.x, list) else [(ours.x, theirs.x)]
        parts += [(ours.y, theirs.y)] if ours.y is not None else []
        assert len(parts) == len(used)
        for a, b in parts:
            assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


def test_rows_of_a_tensor_dataset_go_through_what_a_script_has_told_torch_to_collate_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda samples, **_: torch.stack(samples) + 1)
    assert torch.equal(load(TensorDataset(torch.zeros(9)), 5).x[0], torch.ones(5))


def test_a_batch_is_not_unpacked() -> None:
    with pytest.raises(TypeError, match=r"use batch\.x and batch\.y"):
        _x, _y = Batch(1, 2, np.arange(1), 1)
