"""Losses that a script computes later than in its first steps, told by the graph that backward is called on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_adaptive.wrap.graphs import Heads

WEIGHT = torch.tensor([0.5, 1.0, 2.0])
# The loss of the first steps, and one that comes later.
OTHERS: dict[str, tuple[Any, Any]] = {
    "class weights": (lambda z, y: F.cross_entropy(z, y), lambda z, y: F.cross_entropy(z, y, weight=WEIGHT)),
    "class weights of pixels": (
        lambda z, y: F.cross_entropy(z[..., None, None], y[:, None, None]),
        lambda z, y: F.cross_entropy(z[..., None, None], y[:, None, None], weight=WEIGHT),
    ),
    "a sum": (lambda z, y: F.cross_entropy(z, y), lambda z, y: F.cross_entropy(z, y, reduction="sum")),
    "a sum of squares": (lambda z, y: F.mse_loss(z, z * 0), lambda z, y: F.mse_loss(z, z * 0, reduction="sum")),
    "hard ones": (
        lambda z, y: F.cross_entropy(z, y, reduction="none").mean(),
        lambda z, y: F.cross_entropy(z, y, reduction="none").topk(2)[0].mean(),
    ),
}
SAME: dict[str, tuple[Any, Any]] = {
    "itself": (lambda z, y: F.cross_entropy(z, y), lambda z, y: F.cross_entropy(z, y)),
    "other weights": (
        lambda z, y: F.cross_entropy(z, y, weight=WEIGHT), lambda z, y: F.cross_entropy(z, y, weight=2 * WEIGHT)
    ),
}  # fmt: skip


def is_another(first: Any, later: Any) -> bool:
    heads, model, y = Heads(), nn.Linear(4, 3), torch.arange(6) % 3

    def scores() -> Tensor:
        return model(torch.randn(6, 4))  # type: ignore[no-any-return]

    heads.look(first(scores(), y), learn=True)
    assert not heads.is_new
    heads.look(later(scores(), y), learn=False)
    return heads.is_new


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_is_noticed(name: str) -> None:
    assert is_another(*OTHERS[name])


@pytest.mark.parametrize("name", SAME)
def test_the_same_loss_is_none(name: str) -> None:
    assert not is_another(*SAME[name])
