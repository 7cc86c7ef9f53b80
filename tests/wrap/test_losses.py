"""Losses as people write them: which are seen to be a mean over samples, each by itself."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_adaptive.wrap import losses
from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.reasons import Reason

N = 6
X, Y = torch.randn(N, 4, generator=torch.Generator().manual_seed(4)), torch.arange(N) % 3
WEIGHTS, OPTIONS, COUNTER = torch.tensor([1.0, 2.0, 3.0]), argparse.Namespace(beta=2.5), {"n": 0}
TABLE, SETTINGS = torch.zeros(N, 2), SimpleNamespace(batch_size=N)
SEQUENCES, TAGS = torch.randn(N, 7, 4), torch.randint(0, 3, (N, 7))


class Unread:
    @property
    def rows(self) -> list[int]:
        raise RuntimeError("open() first")


UNREAD = Unread()


class WithLoss(nn.Module):
    """As transformers' models: a loss among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layer(inputs)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.layer(x)
        return h.sigmoid(), h, 0.1 * h


class Inside(nn.Module):
    """Computes its loss within its forward, by a function of the scores, the inputs and the labels."""

    def __init__(self, loss_of: Any) -> None:
        super().__init__()
        self.layer, self.table, self.loss_of = nn.Linear(4, 3), nn.Embedding(N, 3), loss_of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_of(self, self.layer(x), y)  # type: ignore[no-any-return]


def variational(model: Any, reduction: str) -> Tensor:
    found, mean, log_variance = model(X)
    terms = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp(), dim=1)
    return F.mse_loss(found, X, reduction=reduction) + (terms.mean() if reduction == "mean" else terms.sum())


def mixup(model: Any, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(x.size(0))
    scores = model(0.3 * x + 0.7 * x[order])
    return 0.3 * F.cross_entropy(scores, y) + 0.7 * F.cross_entropy(scores, y[order])


def by_name(model: Any, x: Tensor, y: Tensor) -> Tensor:
    count = len(x)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    loss /= count
    return loss


def by_another_name(model: Any, x: Tensor, y: Tensor) -> Tensor:
    count = len(x)
    if len(y) > 1:
        count = N
    return F.cross_entropy(model(x), y, reduction="sum") / count


def scaled_by_a_name(model: Any, x: Tensor, y: Tensor) -> Tensor:
    scale = len(x) / SETTINGS.batch_size
    loss = F.cross_entropy(model(x), y)
    loss *= scale
    return loss


def focal(model: Any, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def distilled(model: Any, x: Tensor, y: Tensor) -> Tensor:
    soft = F.kl_div(F.log_softmax(model(x) / 2, 1), F.softmax(model(x).detach() / 2, 1), reduction="batchmean")
    return 4 * soft + 0.5 * F.cross_entropy(model(x), y)


SELECT_INSIDE = {
    "mask": lambda m, s, y: s[y > 0].mean(),
    "bytes": lambda m, s, y: s[(y > 0).byte()].mean(),
    "indices": lambda m, s, y: s[torch.tensor([0, 2])].mean(),
    "cells": lambda m, s, y: s[torch.tensor([0, 2, 2, 5]), torch.tensor([1, 1, 0, 2])].pow(2).mean(),
    "list": lambda m, s, y: s[[0, 2, 3]].mean(),
    "index_select": lambda m, s, y: s.index_select(0, torch.tensor([0, 2])).mean(),
    "hardest": lambda m, s, y: F.cross_entropy(s, y, reduction="none").topk(3).values.mean(),
    "sorted": lambda m, s, y: F.cross_entropy(s, y, reduction="none").sort(descending=True)[0][:3].mean(),
    "hardest places": lambda m, s, y: s.pow(2).view(-1).topk(5)[0].mean(),
}
HARMLESS_INSIDE = {
    "label's score": lambda m, s, y: -s[torch.arange(len(y)), y].mean(),
    "order of lengths": lambda m, s, y: F.cross_entropy(s[y.argsort()], y[y.argsort()]),
    "rows of a table": lambda m, s, y: (s + m.table.weight[y]).pow(2).mean(),
    "some of a table": lambda m, s, y: (s * m.table.weight[torch.tensor([0, 1])].mean(0)).pow(2).mean(),
    "experts": lambda m, s, y: s.softmax(1).topk(2, dim=1)[0].sum(1).mean(),
}


def findings(model: nn.Module, batch: list[Tensor], loss_of: Any, *, weighs: bool = True) -> set[Reason]:
    for number, parameter in enumerate(model.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    tracer = Tracer(weighs=weighs)
    tracer.train(list(model.parameters()))
    tracer.begin(batch, N)
    try:
        loss_of(model, *batch).backward()
    finally:
        tracer.end()
    assert tracer.num_forwards and len(tracer.backwards.kinds) == 1
    return tracer.findings


FLAT = {
    "module": lambda m, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(m(x), y),
    "scaled": lambda m, x, y: torch.amp.GradScaler("cpu").scale(F.cross_entropy(m(x), y) / 2),
    "mixup": mixup,
    "focal": focal,
    "distilled": distilled,
    "one hot": lambda m, x, y: F.mse_loss(F.softmax(m(x), dim=1), F.one_hot(y, 3).float()),
    "own mean": lambda m, x, y: torch.mean((m(x) - 1) ** 2),
    "indexed": lambda m, x, y: -F.log_softmax(m(x), -1)[torch.arange(len(x)), y].mean(),
    "indexed by a range": lambda m, x, y: -F.log_softmax(m(x), -1)[range(len(x)), y].mean(),
    "regularized": lambda m, x, y: F.cross_entropy(m(x), y) + 1e-3 * sum(p.norm() for p in m.parameters()),
    "stacked": lambda m, x, y: torch.stack([F.cross_entropy(m(x), y), m(x).pow(2).mean()]).sum(),
    "gathered": lambda m, x, y: F.smooth_l1_loss(m(x).gather(1, y[:, None]).squeeze(1), m(x).max(1)[0].detach()),
    "made labels": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x)[:, 0], torch.full((x.size(0),), 1.0)),
    "by its length": lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").sum() / len(x),
    "by the length of targets": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum").div(len(y)),
    "by a name of its length": by_name,
    "by its size": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / x.shape[0],
    "by its size as a float": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / (x.shape[0] * 1.0),
    # Nothing of the script's is run to see what a line is about.
    "in a file with a property": lambda m, x, y: F.cross_entropy(m(x), y) * 0.5 if UNREAD is not None else len(UNREAD.rows),
    "beside what is divided by its length": lambda m, x, y: F.cross_entropy(m(x), y) * 0.5 + m(x).pow(2).sum() / len(x),
}
OF_SEQUENCES = {
    "flattened": lambda m, x, y: F.cross_entropy(m(x).view(-1, 3), y.view(-1)),
    "transposed": lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y),
    "shifted": lambda m, x, y: F.cross_entropy(m(x)[:, :-1].reshape(-1, 3), y[:, 1:].reshape(-1)),
    "batch second": lambda m, x, y: F.cross_entropy(m(x.transpose(0, 1)).reshape(-1, 3), y.t().reshape(-1)),
}
NO_MEANS = {
    "hardest": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").topk(3).values.mean(), Reason.MIXED),
    "masked, beside others": (lambda m, x, y: F.l1_loss(m(x)[y > 0], m(x)[y < 2][: (y > 0).sum()]), Reason.SELECTED),
    "masked by the loss of all": (lambda m, x, y: (lambda s: s[s > s.mean()].mean())(m(x)), Reason.SELECTED),
    "masked, in another order": (lambda m, x, y: F.l1_loss(m(x)[y > 0], m(x)[y > 0].flip(0)), Reason.SELECTED),
    "masked, each with each": (lambda m, x, y: (lambda s: (s @ s.t()).mean())(m(x)[y > 0]), Reason.SELECTED),
    "masked, along the samples": (lambda m, x, y: m(x)[y > 0].softmax(0).pow(2).mean(), Reason.SELECTED),
    "masked, by another count": (lambda m, x, y: m(x)[y > 0].sum() / (y > 1).sum(), Reason.MIXED),
    "masked, times its rows": (lambda m, x, y: (lambda s: s.pow(2).mean() * s.shape[0])(m(x)[y > 0]), Reason.SELECTED),
    "masked, times its length": (lambda m, x, y: (lambda s: s.pow(2).mean() * (len(s) / N))(m(x)[y > 0]), Reason.SELECTED),
    "masked by broadcasting": (lambda m, x, y: m(x).masked_select((y > 0)[:, None]).mean(), Reason.SELECTED),
    "divided by another count": (
        lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * (y > 0)).sum() / (y > 1).sum(), Reason.MIXED
    ),
    "each with each": (lambda m, x, y: F.cross_entropy(m(x) @ m(x).t(), torch.arange(len(x))), Reason.MIXED),
    "distances": (lambda m, x, y: torch.cdist(m(x), m(x)).mean(), Reason.MIXED),
    "pairs": (lambda m, x, y: F.mse_loss(m(x)[torch.randperm(len(x))], m(x)), Reason.SELECTED),
    "centred": (lambda m, x, y: (lambda s: (s - s.mean(0)).pow(2).mean())(m(x)), Reason.MIXED),
    "root": (lambda m, x, y: F.mse_loss(m(x), torch.ones_like(m(x))).sqrt(), Reason.MIXED),
    "along the samples": (lambda m, x, y: F.softmax(m(x), dim=0).pow(2).mean(), Reason.MIXED),
    "dice": (lambda m, x, y: (lambda s: 1 - 2 * s[:, 0].sum() / (s.sum() + 1))(m(x).sigmoid()), Reason.MIXED),
    "by a name that is a constant, too": (by_another_name, Reason.MIXED),
    "by the length of something else": (
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / len(TABLE), Reason.SUM_LOSS
    ),
    "half of it by a constant": (
        lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / len(x) + m(x).sum() / N, Reason.MIXED
    ),
    # So that a short last batch counts less.
    "scaled by its size": (lambda m, x, y: F.cross_entropy(m(x), y) * (x.size(0) / N), Reason.MIXED),
    "scaled by a root of its size": (lambda m, x, y: (x.numel() / (4 * N)) ** 0.5 * F.cross_entropy(m(x), y), Reason.MIXED),
    "scaled by a tensor of its size": (lambda m, x, y: F.cross_entropy(m(x), y) * torch.tensor(x.size(0) / N), Reason.MIXED),
    "rows scaled by its size": (
        lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * (x.size(0) / N)).mean(), Reason.MIXED
    ),
    "scaled by its length": (lambda m, x, y: F.cross_entropy(m(x), y) * (len(x) / N), Reason.MIXED),
    "scaled by its length, and then by a constant": (lambda m, x, y: F.cross_entropy(m(x), y) * len(x) / N, Reason.MIXED),
    "scaled by its length, by a method": (lambda m, x, y: F.cross_entropy(m(x), y).mul(len(x) / N), Reason.MIXED),
    "scaled by its size's square": (lambda m, x, y: F.cross_entropy(m(x), y) * x.size(0) ** 2, Reason.MIXED),
    "scaled by a name": (scaled_by_a_name, Reason.MIXED),
}  # fmt: skip


# Their gradients add up, whatever the ranks' shares are.
SUMS = {
    "plain": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
    "own": lambda m, x, y: (m(x) - 1).pow(2).sum(),
    "by numbers": lambda m, x, y: 12 * F.cross_entropy(m(x), y, reduction="sum") + -0.5 * m(x).pow(2).sum() / 100.0,
    "by constants": lambda m, x, y: OPTIONS.beta * m(x).pow(2).sum() / N,
    "by a criterion's constant": lambda m, x, y: Weighted(2.5)(m(x)),
    "by classes": lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS, ignore_index=0, reduction="sum"),
    "by a tensor of constants": lambda m, x, y: (m(x) * torch.tensor([1.0, 2.0, 3.0])).pow(2).sum() + torch.zeros(()),
    # Which takes no other numbers than chances.
    "of chances": lambda m, x, y: F.binary_cross_entropy(m(x).sigmoid(), x.sigmoid()[:, :3], reduction="sum"),
    "of log-chances": lambda m, x, y: -torch.distributions.Normal(m(x), 0.5).log_prob(x[:, :3]).sum(),
    "scaled as for 16 bits": lambda m, x, y: torch.amp.GradScaler("cpu", init_scale=1024.0).scale(m(x).pow(2).sum()),
    "of chosen samples": lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * (y > 0)).sum(),
    "that is printed": lambda m, x, y: (lambda loss: (loss, loss.item())[0])(F.cross_entropy(m(x), y, reduction="sum")),
}
# What they are scaled by, or what that is made of.
COUNTS = {
    "a root of the size": lambda x, y: math.sqrt(x.size(0)),
    "the length and one": lambda x, y: len(x) + 1,
    "the size as a whole number": lambda x, y: int(x.shape[0]) + 1,
    "the shape's number": lambda x, y: y.shape.numel(),
    "the shape in NumPy": lambda x, y: np.prod(x.shape),
    "kept targets": lambda x, y: y[y > 0].numel(),
    "kept targets as a number": lambda x, y: (y > 0).sum().item(),
    "classes": lambda x, y: len(y.unique()) + 0.5,
    "targets in NumPy": lambda x, y: float((y.numpy() > 0).sum()),
    "the length as a tensor": lambda x, y: torch.tensor(float(len(x))),
    "the length's tensors": lambda x, y: torch.full((len(y),), len(y) + 1.0)[0],
    "chance": lambda x, y: torch.rand(1),
    "an attribute that changes": lambda x, y: Weighted(2.5).changed(len(x) + 1).factor,
    "a global that changes": lambda x, y: COUNTER.update(n=len(x) + 1) or COUNTER["n"],
    "an option that is not argparse's": lambda x, y: SETTINGS.batch_size + 1,
}
NO_SUMS = {
    "of pairs": (lambda m, x, y: (lambda s: (s @ s.t()).sum())(m(x)), Reason.MIXED),
    "centred": (lambda m, x, y: (lambda s: (s - s.mean(0)).pow(2).sum())(m(x)), Reason.MIXED),
    "root": (lambda m, x, y: m(x).pow(2).sum().sqrt(), Reason.MIXED),
    "root of chances": (
        lambda m, x, y: F.binary_cross_entropy(m(x).sigmoid(), x.sigmoid()[:, :3], reduction="sum").sqrt(), Reason.MIXED
    ),
    "and a mean": (lambda m, x, y: m(x).pow(2).sum() + 0 * F.cross_entropy(m(x), y), Reason.MIXED),
    "times its size": (lambda m, x, y: m(x).pow(2).sum() * x.size(0), Reason.MIXED),
    "by a root of its size": (lambda m, x, y: m(x).pow(2).sum() / x.size(0) ** 0.5, Reason.MIXED),
    "by a fraction of its size": (lambda m, x, y: m(x).pow(2).sum() * (100 / x.size(dim=0)), Reason.MIXED),
    "by its length less one": (lambda m, x, y: m(x).pow(2).sum() / (len(x) - 1), Reason.MIXED),
    "rows by its length": (lambda m, x, y: (m(x).pow(2).sum(1) / len(x)).sum(), Reason.MIXED),
    "a number that is written and another like it": (
        lambda m, x, y: (lambda n: 6 * m(x).pow(2).sum() / n)(y.shape.numel()), Reason.SUM_LOSS
    ),
    "added times a number": (
        lambda m, x, y: torch.add(m(x).sum(), m(x).pow(2).sum(), alpha=1 / (len(x) + 1)), Reason.SUM_LOSS
    ),
    "rows by weights of its length": (lambda m, x, y: (m(x).sum(1) * torch.full((len(x),), 1 / len(x))).sum(), Reason.SUM_LOSS),
    "by itself": (lambda m, x, y: (lambda loss: loss / max(1.0, loss.item() / 5))(m(x).pow(2).sum()), Reason.SUM_LOSS),
    "of log-chances by its length": (
        lambda m, x, y: -torch.distributions.Normal(m(x), len(x) + 1.5).log_prob(x[:, :3]).sum(), Reason.SUM_LOSS
    ),
    "a function of its own": (lambda m, x, y: Halved.apply(m(x)).pow(2).sum(), Reason.SUM_LOSS),
}  # fmt: skip


class Weighted(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.last = 0

    def changed(self, last: int) -> Any:
        self.last = last
        return SimpleNamespace(factor=self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x.pow(2).sum()


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / len(gradient)


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_samples(name: str) -> None:
    assert not findings(nn.Sequential(nn.Linear(4, 3)), [X, Y], SUMS[name])


@pytest.mark.parametrize("name", NO_SUMS)
def test_sums_that_other_shares_change(name: str) -> None:
    loss_of, reason = NO_SUMS[name]
    assert findings(nn.Sequential(nn.Linear(4, 3)), [X, Y], loss_of) == {reason}


@pytest.mark.parametrize("name", COUNTS)
def test_sums_that_are_divided_by_what_may_count_samples(name: str) -> None:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        count = COUNTS[name](x, y)
        return F.cross_entropy(model(x), y, reduction="sum") / count

    assert findings(nn.Sequential(nn.Linear(4, 3)), [X, Y], loss_of) & {Reason.SUM_LOSS, Reason.MIXED, Reason.SELECTED}


@pytest.mark.parametrize(("library", "expected"), [("torch", set()), ("torchvision", {Reason.SUM_LOSS})])
def test_numbers_in_the_code_of_torch_are_constants_and_those_of_libraries_beside_it_are_not(
    library: str, expected: set[Reason]
) -> None:
    names: dict[str, Any] = {}
    path = Path(torch.__file__).parents[1] / library / "some_loss.py"
    exec(compile("def divided(loss, number):\n    return loss / number\n", str(path), "exec"), names)
    sum_of = lambda m, x, y: names["divided"](m(x).pow(2).sum(), y.shape.numel() + 1)  # noqa: E731
    assert findings(nn.Linear(4, 3), [X, Y], sum_of) == expected


def test_averaged_gradients_that_are_divided_by_the_batchs_size() -> None:
    model, tracer = nn.Linear(4, 3), Tracer()
    tracer.train(list(model.parameters()))
    divided: dict[str, Any] = {
        "size": lambda x: model.weight.grad.div_(x.size(0)),
        "length": lambda x: model.weight.grad.div_(len(x)),
        "constant": lambda x: model.weight.grad.div_(6),
        "none": lambda x: model.weight.grad.mul_(0.5),
    }
    for name, divide in divided.items():
        tracer.begin([X, Y], N)
        F.cross_entropy(model(X), Y, reduction="sum").backward()
        divide(X)
        tracer.end()
        assert tracer.findings == ({Reason.SIZE_DECIDES} if name in ("size", "length") else set()), name


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_whose_gradient_is_given(reduction: str) -> None:
    model, tracer = nn.Linear(4, 3), Tracer()
    for gradient, expected in ((None, set()), (torch.ones(()), set()), (torch.tensor(1 / N), {Reason.MIXED})):
        tracer.train(list(model.parameters()))
        tracer.begin([X, Y], N)
        F.cross_entropy(model(X), Y, reduction=reduction).backward(gradient)
        tracer.end()
        assert tracer.findings == expected


@pytest.mark.parametrize("name", FLAT)
def test_means_over_samples(name: str) -> None:
    assert not findings(nn.Sequential(nn.Linear(4, 3)), [X, Y], FLAT[name])


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_means_over_the_places_of_sequences(name: str) -> None:
    assert not findings(nn.Sequential(nn.Linear(4, 3)), [SEQUENCES, TAGS], OF_SEQUENCES[name])


@pytest.mark.parametrize("name", NO_MEANS)
def test_losses_that_are_no_means_over_samples(name: str) -> None:
    loss_of, reason = NO_MEANS[name]
    assert reason in findings(nn.Sequential(nn.Linear(4, 3)), [X, Y], loss_of)


# Means by classes, and over the targets that are not left out.
WEIGHTED = {
    "by classes": (nn.Linear(4, 3), lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 3.0]))),
    "not of all": (nn.Linear(4, 3), lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0) + m(x).pow(2).mean()),
    "not of all places": (nn.Linear(4, 3), lambda m, x, y: F.cross_entropy(m(x), torch.where(x[:, 0] > 0, y, -100))),
    "inside": (
        Inside(lambda m, s, y: F.nll_loss((s @ s.new_ones(3, 3)).log_softmax(1), y, ignore_index=0)), lambda m, x, y: m(x, y)
    ),
    "a mask": (
        nn.Linear(4, 3), lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * (y > 0)).sum() / (y > 0).sum()
    ),
    "a mask inside": (
        Inside(lambda m, s, y: (F.cross_entropy(s, y, reduction="none") * (y > 0)).sum() / (y > 0).sum()), lambda m, x, y: m(x, y)
    ),
    "chosen": (nn.Linear(4, 3), lambda m, x, y: F.cross_entropy(m(x)[y > 0], y[y > 0])),
    "chosen, not of all": (nn.Linear(4, 3), lambda m, x, y: F.cross_entropy(m(x)[y > 0], y[y > 0], ignore_index=2)),
    "chosen, by their loss": (
        nn.Linear(4, 3), lambda m, x, y: (lambda each: each[each > 1].mean())(F.cross_entropy(m(x), y, reduction="none"))
    ),
    "chosen places": (nn.Linear(4, 3), lambda m, x, y: (m(x)[x[:, :3] > 0] - 1).abs().mean()),
    "chosen places, by a function": (nn.Linear(4, 3), lambda m, x, y: torch.masked_select(m(x), x[:, :3] > 0).pow(2).mean()),
    "chosen, of both": (nn.Linear(4, 3), lambda m, x, y: F.mse_loss(m(x)[y > 0], m(2 * x)[y > 0]) + m(x).pow(2).mean()),
    "chosen, by their count": (nn.Linear(4, 3), lambda m, x, y: m(x)[y > 0].pow(2).sum(1).sum() / (y > 0).sum()),
    "chosen, smooth": (nn.Linear(4, 3), lambda m, x, y: F.smooth_l1_loss(m(x)[y > 0][:, 0], y[y > 0].float())),
    "a count": (
        nn.Linear(4, 3), lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0, reduction="sum") / (y > 0).sum().clamp(min=1)
    ),
}  # fmt: skip
# As large for some samples as for more.
OF_ANY_SIZE = ("divided by another count", "root")
NOT_EVEN_LOCAL = {
    "each with each": Reason.MIXED,
    "hardest": Reason.MIXED,
    "by the length of something else": Reason.SUM_LOSS,
    "scaled by its size": Reason.MIXED,
    "scaled by its length": Reason.MIXED,
    "scaled by its length, by a method": Reason.MIXED,
    "scaled by a name": Reason.MIXED,
    "scaled by a tensor of its size": Reason.MIXED,
    "masked, each with each": Reason.SELECTED,
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_means_over_targets(name: str) -> None:
    model, loss_of = WEIGHTED[name]
    for weighs in (True, False):
        assert not findings(model, [X, Y], loss_of, weighs=weighs)


def test_a_sum_over_chosen_rows_that_is_divided_by_their_length() -> None:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        rows = model(x)[y > 0]
        return rows.pow(2).sum() / len(rows)

    assert not findings(nn.Linear(4, 3), [X, Y], loss_of)



@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_losses_that_do_not_grow_with_the_batch_are_fine_for_a_ranks_own_steps(name: str) -> None:
    assert not findings(nn.Sequential(nn.Linear(4, 3)), [X, Y], NO_MEANS[name][0], weighs=False)


@pytest.mark.parametrize("name", NOT_EVEN_LOCAL)
def test_losses_that_a_ranks_own_steps_cannot_take_either(name: str) -> None:
    assert NOT_EVEN_LOCAL[name] in findings(nn.Sequential(nn.Linear(4, 3)), [X, Y], NO_MEANS[name][0], weighs=False)


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ([[1, 2, 3, -100], [4, 5, 6, -100]], 1),
        ([[1, -100, 2, 3], [-100, 4, 5, 6]], 1),
        ([[1, 2, 3, -100], [4, 5, -100, -100]], None),
        ([1, 2, 3, -100, 4, 5, 6, -100], 1),
        ([-100, 2, 3, -100, -100, 5, 6, -100], 2),
        ([1, 2, 3, 4, 5, 6, 7, 8], 0),
        # The second sample has no target, and each place of both comes first.
        ([1, -100, 2, -100, 3, -100, 4, -100], None),
        ([1, -100, 2, -100], None),
        ([1, 2, 3, -100, 4], None),
    ],
)
def test_targets_that_are_left_out(target: list[int], number: int | None) -> None:
    found, as_many = losses.left_out(torch.tensor(target), -100, 2)
    assert bool(as_many) is (number is not None) and (number is None or int(found) == number)


def test_losses_among_a_forwards_results() -> None:
    assert not findings(WithLoss(), [X, Y], lambda m, x, y: m(inputs=x, labels=y)["loss"] / 4)
    assert not findings(Variational(), [X], lambda m, x: variational(m, "mean"))
    assert not findings(Variational(), [X], lambda m, x: variational(m, "sum"))


@pytest.mark.parametrize("name", SELECT_INSIDE)
def test_choices_among_samples_within_a_forward(name: str) -> None:
    assert findings(Inside(SELECT_INSIDE[name]), [X, Y], lambda m, x, y: m(x, y)) == {Reason.MIXED}


@pytest.mark.parametrize("name", HARMLESS_INSIDE)
def test_what_only_looks_like_a_choice_within_a_forward(name: str) -> None:
    assert not findings(Inside(HARMLESS_INSIDE[name]), [X, Y], lambda m, x, y: m(x, y))


def test_what_fails_while_watching_is_a_finding_and_not_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "cuts", lambda *args: 1 / 0)
    assert Reason.NOT_FOLLOWED in findings(nn.Linear(4, 3), [X, Y], FLAT["own mean"])
