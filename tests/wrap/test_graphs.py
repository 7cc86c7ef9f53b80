"""Losses that a script computes later than in its first steps, told by the graph that backward is called on."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvd_adaptive.wrap.follow import Follower
from hvd_adaptive.wrap.graphs import Heads
from hvd_adaptive.wrap.loaders import IndexStream, Loader
from hvd_adaptive.wrap.reasons import Reason

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

    heads.look(first(scores(), y), 6, learn=True)
    assert not heads.is_new
    heads.look(later(scores(), y), 6, learn=False)
    return heads.is_new


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_is_noticed(name: str) -> None:
    assert is_another(*OTHERS[name])


@pytest.mark.parametrize(
    ("learnt", "later", "is_other"),
    [
        ([[3], [3]], [[3], [3]], False),  # As of a language model, whose last place has no target.
        ([[], []], [[], []], False),
        ([[], []], [[3], [3]], True),
        ([[3], [3]], [[], []], True),
        ([[3], [3]], [[0], [2]], True),
        ([[3], [3]], [[0, 3], []], True),
        ([[3], [3]], [[0, 3], [0, 3]], True),
    ],
)
def test_losses_leave_out_as_many_targets_of_each_sample_as_those_that_were_learnt(
    learnt: list[list[int]], later: list[list[int]], is_other: bool
) -> None:
    heads = Heads()
    for places, learn in ((learnt, True), (later, False)):
        targets = torch.ones(2, 4, dtype=torch.long)
        for row, of_row in zip(targets, places, strict=True):
            row[of_row] = -100
        scores = torch.randn(2, 4, 3, requires_grad=True)
        for loss in (F.cross_entropy(scores.flatten(0, 1), targets.flatten()), F.cross_entropy(scores.transpose(1, 2), targets)):
            heads.look(loss, 2, learn=learn)
    assert heads.take_ignored() is is_other and not heads.is_new | heads.is_hidden


@pytest.mark.parametrize("name", SAME)
def test_the_same_loss_is_none(name: str) -> None:
    assert not is_another(*SAME[name])


def plain(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y)


def checkpointed(z: Tensor, y: Tensor) -> Tensor:
    return checkpoint(plain, z, y, use_reentrant=False)  # type: ignore[no-any-return]


def hard(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none").topk(2)[0].mean()


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_a_checkpointed_loss_is_not_computed_again_to_look_at_it(weight: Tensor | None) -> None:
    """Its model would move the statistics of a BatchNorm once more."""
    heads, model, y = Heads(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.arange(6) % 3
    num_forwards = 0

    def compute(x: Tensor) -> Tensor:
        nonlocal num_forwards
        num_forwards += 1
        return F.cross_entropy(model(x), y, weight=weight)

    for learn in (True, False):
        num_forwards = 0
        heads.look(checkpoint(compute, torch.randn(6, 4), use_reentrant=False), 6, learn=learn)
        assert num_forwards == 1 and not heads.is_new
    assert heads.is_hidden is (weight is None) and not heads.take_ignored()


@pytest.mark.parametrize(
    ("early", "late", "expected"),
    [
        ([plain], [plain, hard], {Reason.OTHER_LOSS}),
        ([plain, plain, plain], [plain], set()),
        # Ignored targets would not be seen there.
        ([checkpointed], [checkpointed], {Reason.HIDDEN_LOSS}),
        # It is learnt, though the batch's following ends with the optimizer's second step.
        ([plain, plain, lambda z, y: z.abs().mean()], [plain, plain, lambda z, y: z.abs().mean()], set()),
    ],
)
def test_further_losses_of_a_batch_are_compared_too(early: list[Any], late: list[Any], expected: set[Reason]) -> None:
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0)
    loader, model = DataLoader(data, batch_size=6, sampler=sampler), nn.Linear(4, 3)
    follower, known = Follower(lambda module: [], lambda text: None), Loader(loader, 1)
    stream = IndexStream(known, loader.batch_sampler, world_size=1, rank=0, upper=None)
    follower.trains(list(model.parameters()))
    follower.opened(stream)
    stream.owner = weakref.ref(loader)
    for losses in (early, early, late):
        x, y = (torch.stack(column) for column in zip(*[data[i] for i in next(stream)], strict=True))
        follower.delivered(stream, [x, y])
        for number, loss_of in enumerate(losses):
            loss = loss_of(model(x), y)
            follower.losses([loss])
            loss.backward()
            follower.backward()
            follower.take_step("generator's" if number == 2 else "discriminator's")
    follower.end()
    assert known.is_traced and known.reasons == expected
