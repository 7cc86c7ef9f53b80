"""What a script's collate_fn does with the order of its samples."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from hvd_adaptive.wrap.collating import may_reorder, reorders


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def by_length(samples: list[Tensor]) -> Tensor:
    return padded(sorted(samples, key=len))


def in_place(samples: list[Tensor]) -> Tensor:
    samples.sort(key=len)
    return padded(samples)


def by_topk(samples: list[Tensor]) -> Tensor:
    return padded(samples)[torch.tensor([len(sample) for sample in samples]).topk(len(samples)).indices]


def with_sorted_keys(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {key: default_collate([sample[key] for sample in samples]) for key in sorted(samples[0].keys())}


def sorted_within(samples: list[Tensor]) -> Tensor:
    return padded([sample.sort().values for sample in samples])


def shuffled(samples: list[Tensor]) -> Tensor:
    random.shuffle(samples)
    return padded(samples)


class Words:
    def __init__(self) -> None:
        self.vocabulary = {"a": 1}

    def collate(self, samples: list[Tensor]) -> Tensor:
        return self._join(samples)

    def _join(self, samples: list[Tensor]) -> Tensor:
        return padded(samples)[torch.tensor([len(sample) for sample in samples]).argsort()]

    def plain(self, samples: list[Tensor]) -> Tensor:
        return padded(samples)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return by_length(samples)


class Held:
    def __init__(self, join: Any) -> None:
        self.join, self.vocabulary = join, {"a": 1}

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return self.join(samples)


class Strange:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, samples: Any) -> Any:
        return samples


WORDS = [torch.arange(1.0, length) + 10 * length for length in (4, 9, 3, 7)]


@pytest.mark.parametrize(
    ("collate", "by_names", "tried"),
    [
        (default_collate, False, None),
        (padded, False, False),
        (by_length, True, True),
        (in_place, True, True),
        (by_topk, False, True),
        (functools.partial(in_place), True, True),
        (with_sorted_keys, False, None),
        (sorted_within, True, False),
        (shuffled, True, None),
        (lambda samples: by_length(samples), True, True),
        (Words().collate, True, True),
        (Words().plain, False, False),
        (Words(), True, True),
        (Held(Words()), True, True),
        (Held(padded), False, False),
        (Strange(), False, None),
    ],
)
def test_samples_in_another_order_are_found(collate: Any, by_names: bool, tried: bool | None) -> None:
    """By the names that are used, and by trying it, which counts where it says something."""
    assert may_reorder(collate) is by_names
    assert reorders(collate, list(WORDS)) is tried


def test_samples_of_one_shape_do_not_show_that_others_keep_their_order() -> None:
    alike = [torch.rand(5) for _ in range(4)]
    assert reorders(padded, alike) is None and reorders(by_length, alike) is None


def test_large_samples_are_not_tried() -> None:
    calls: list[int] = []

    def collate(samples: list[Tensor]) -> Tensor:
        calls.append(len(samples))
        return torch.stack(samples)

    assert reorders(collate, [torch.zeros(1 << 22)] * 8) is None and not calls
