"""Samples that are taken by their number, and loops that are as long as the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.reasons import Reason

BATCH = 6


def first_by_number(x: Tensor) -> None:
    for number in range(4):
        x[number].mean()


def all_by_number(x: Tensor) -> None:
    for number in range(BATCH):
        x[number].mean()


def all_by_length(x: Tensor) -> None:
    for number in range(len(x)):
        x[number].mean()


def all_by_shape(x: Tensor) -> None:
    count, _ = x.shape
    [x[number].mean() for number in range(count)]


def all_counted(x: Tensor) -> None:
    for number, row in enumerate(x):
        x[number].add(row)


def all_side_by_side(x: Tensor) -> None:
    rows, left = list(x), list(range(100))
    for _, _ in zip(rows, range(100), strict=False):
        x[left.pop(0)].mean()


def all_of_a_list(x: Tensor) -> None:
    for number, _ in enumerate(["a"] * BATCH):
        x[number].mean()


def trace(look: Any) -> Tracer:
    model, tracer = nn.Linear(4, 3), Tracer()
    tracer.train(list(model.parameters()))
    x, y = torch.randn(BATCH, 4), torch.arange(BATCH) % 3
    tracer.begin([x, y], BATCH)
    look(x)
    F.cross_entropy(model(x), y).backward()
    tracer.end()
    return tracer


@pytest.mark.parametrize(
    ("look", "least"),
    [
        (first_by_number, 4),
        (lambda x: x[3, 1], 4),
        (lambda x: x[-2], 2),
        (lambda x: x.select(0, 4), 5),
        (lambda x: x[:, 3], 1),
        (lambda x: x[:4], 1),
        (all_by_length, 1),
        (all_by_shape, 1),
        (all_counted, 1),
        (all_side_by_side, 1),
        (lambda x: [row.mean() for row in x], 1),
    ],
)
def test_a_batch_has_the_samples_that_are_taken(look: Any, least: int) -> None:
    tracer = trace(look)
    assert tracer.least_samples == least and not tracer.findings


@pytest.mark.parametrize("look", [all_by_number, all_of_a_list, lambda x: x[BATCH - 1], lambda x: x[-BATCH]])
def test_the_last_sample_by_its_number_needs_equal_shares(look: Any) -> None:
    assert trace(look).findings == {Reason.NUMBERED}
