"""Statistics over a batch's data, without gradients: seen where the loss or a forward takes what they were put into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.reasons import Reason

# As many features as samples, twice as many, and a number that does not fit.
SIZES = [(6, 6), (6, 12), (6, 5)]


class Model(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_features, 4)

    def forward(self, x: Tensor, more: Tensor | float = 0.0) -> Any:
        return self.layer(x + more)


def each(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def in_place(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    r = r.clone()
    r -= r.mean()
    r /= r.std()
    return F.mse_loss(model(x)[:, 0], r)


def written(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = x[:, 0] / x[:, 0].max()
    return F.cross_entropy(model(x), y)


def std_and_mean(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    std, mean = torch.std_mean(x, 0)
    return F.cross_entropy(model((x - mean) / std), y)


def counted_weights(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=4).clamp(min=1).double()
    return ((1 / counts)[y] * each(model, x, y)).mean()


def hard(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    losses = each(model, x, y)
    return (losses * (losses.detach() > losses.detach().mean())).mean()


def backwards(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    order = torch.arange(x.size(0) - 1, -1, -1)
    return F.cross_entropy(model(0.6 * x + 0.4 * x[order]), y)


def half(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    x = x.clone()
    x[:, :2] = x.flip(0)[:, :2]
    return F.cross_entropy(model(x), y)


def written_over(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    x = x.clone()
    x[:3] = x[3:6].clone()
    return F.cross_entropy(model(x), y)


OF_OTHERS = {
    "mixed up in a fixed order": lambda m, x, y, r: F.mse_loss(m(0.7 * x + 0.3 * x.flip(0))[:, 0], 0.7 * r + 0.3 * r.flip(0)),
    "labels": lambda m, x, y, r: 0.7 * F.cross_entropy(m(x), y) + 0.3 * F.cross_entropy(m(x), y.flip(0)),
    "triplets": lambda m, x, y, r: F.triplet_margin_loss(m(x), m(x + 0.1), m(torch.roll(x, 1, 0))),
    "by name": lambda m, x, y, r: F.mse_loss(m(x), m(torch.roll(x, shifts=1, dims=0)).detach()),
    "words": lambda m, x, y, r: F.mse_loss(m(x), m(x.mul(9).long().flip(0).float())),
    "places": lambda m, x, y, r: m((x > 0).long().flip(0), 0.1 * x).mean(),
    "backwards": backwards,
    "turned around": lambda m, x, y, r: F.cross_entropy(m(x + x.index_select(0, (torch.arange(len(x)) + 3) % len(x))), y),
    "swapped": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], r.gather(0, torch.arange(len(x)) ^ 1)),
    "a list": lambda m, x, y, r: F.cross_entropy(m(x + x[[*range(1, len(x)), 0]]), y),
    "half": half,
    "written over": written_over,
}
OVER_BATCH = {
    "advantages": lambda m, x, y, r: ((r - r.mean()) / (r.std() + 1e-8) * each(m, x, y)).mean(),
    "baseline": lambda m, x, y, r: -((r - r.mean()) * each(m, x, y)).mean(),
    "by a factor": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], (r - r.mean()) * torch.rsqrt(r.var() + 1e-8)),
    "relative weights": lambda m, x, y, r: (r / r.mean() * each(m, x, y)).mean(),
    "scaled targets": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], r / r.abs().max()),
    "from 0 to 1": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], (r - r.min()) / (r.max() - r.min())),
    "whole numbers": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], y / y.max()),
    "cut off": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], torch.minimum(r, r.quantile(0.9))),
    "normal inputs": lambda m, x, y, r: F.cross_entropy(m((x - x.mean(0)) / x.std(0)), y),
    "in turns": lambda m, x, y, r: F.cross_entropy(m(x.clone().sub_(x.mean(0, keepdim=True))), y),
    "softmax": lambda m, x, y, r: (r.softmax(0) * len(r) * each(m, x, y)).mean(),
    "softmax of inputs": lambda m, x, y, r: F.cross_entropy(m(x.softmax(0)), y),
    "ranks": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], r.argsort().argsort() / (len(r) - 1)),
    "in place": in_place,
    "written": written,
    "std and mean": std_and_mean,
    "counted weights": counted_weights,
    "hard": hard,
}


def by_length(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """As before a recurrent layer."""
    lengths, order = (y + 1).sort(0, descending=True)
    mask = torch.arange(lengths.max())[None] < lengths[:, None]  # type: ignore[arg-type,call-overload]
    return (F.cross_entropy(model(x[order]), y[order], reduction="none") * mask[:, 0]).mean()


def implied(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    with torch.no_grad():
        soft = F.softmax(x[:, :4])  # type: ignore[call-arg,unused-ignore]
    return F.kl_div(F.log_softmax(model(x), dim=1), soft, reduction="batchmean")


def adversarial(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    return F.cross_entropy(model(x.detach() + 0.01 * gradient.sign()), y)


def mixed_up(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """In a random order, which is a random augmentation."""
    order = torch.randperm(x.size(0))
    return F.mse_loss(model(0.7 * x + 0.3 * x[order])[:, 0], 0.7 * r + 0.3 * r[order])


def each_written(model: Any, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    x = x.clone()
    x[:] = x * 2
    for number in range(x.size(0)):
        x[number] = x[number] / 2
    return F.cross_entropy(model(x), y)


EACH_BY_ITSELF = {
    "a row's own mean": lambda m, x, y, r: F.cross_entropy(m((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)), y),
    "a row's own softmax": lambda m, x, y, r: F.cross_entropy(m(x.softmax(1)), x[:, :4].argmax(1)),
    "a row's own order": lambda m, x, y, r: F.mse_loss(m(x)[:, :2], x.topk(2, dim=1)[0] + x.argsort(1)[:, :2]),
    "fixed statistics": lambda m, x, y, r: F.cross_entropy(m((x - 0.1307) / torch.tensor(0.3081)), y),
    "fixed weights": lambda m, x, y, r: (torch.tensor([1.0, 2.0, 3.0, 4.0])[y] * each(m, x, y)).mean(),
    "fixed pos_weight": lambda m, x, y, r: F.binary_cross_entropy_with_logits(
        m(x)[:, 0], (y > 1).float(), pos_weight=torch.tensor(3.0)
    ),
    "weights of samples": lambda m, x, y, r: (r * each(m, x, y)).mean(),
    "clamped": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], r.clamp(0.2, 0.8).log()),
    "larger of two": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], torch.max(r, x[:, 0])),
    "mixed up": mixed_up,
    "mirrored": lambda m, x, y, r: F.cross_entropy(m(x.flip(1) + x.roll(1, dims=1) + torch.flip(x, dims=[-1])), y),
    "each written": each_written,
    "a table backwards": lambda m, x, y, r: F.mse_loss(m(x)[:, 0], torch.arange(4.0).flip(0)[y]),
    "logged": lambda m, x, y, r: ((r - r.mean()) / r.std(), each(m, x, y).mean())[1],
    "by length": by_length,
    "implied": implied,
    "adversarial": adversarial,
}  # fmt: skip


def findings(loss_of: Any, num_samples: int, num_features: int) -> set[Reason]:
    torch.manual_seed(0)
    model, tracer = Model(num_features), Tracer()
    tracer.train(list(model.parameters()))
    x, y, r = torch.randn(num_samples, num_features), torch.arange(num_samples) % 4, torch.rand(num_samples) + 0.1
    tracer.begin([x, y, r], num_samples)
    try:
        loss_of(model, x, y, r).backward()
    finally:
        tracer.end()
    return tracer.findings


@pytest.mark.parametrize(("num_samples", "num_features"), SIZES)
@pytest.mark.parametrize("name", OVER_BATCH)
def test_data_that_depends_on_the_whole_batch(name: str, num_samples: int, num_features: int) -> None:
    assert findings(OVER_BATCH[name], num_samples, num_features) == {Reason.MIXED}


@pytest.mark.parametrize(("num_samples", "num_features"), [*SIZES, (12, 5)])
@pytest.mark.parametrize("name", OF_OTHERS)
def test_rows_of_other_samples_in_a_fixed_order(name: str, num_samples: int, num_features: int) -> None:
    # An order of few samples by an index may be a random one until it comes again.
    found = [findings(OF_OTHERS[name], num_samples, num_features) for _ in range(2)]
    assert found[1] and found[1] <= {Reason.MIXED, Reason.SUB_BATCHES}


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize(("num_samples", "num_features"), SIZES)
@pytest.mark.parametrize("name", EACH_BY_ITSELF)
def test_data_of_each_sample_by_itself(name: str, num_samples: int, num_features: int) -> None:
    assert not findings(EACH_BY_ITSELF[name], num_samples, num_features)


def test_data_of_another_length_is_no_statistic() -> None:
    """As the nodes of a batch of graphs, of which some are looked up."""
    model, tracer = nn.Linear(4, 3), Tracer()
    tracer.train(list(model.parameters()))
    nodes, roots, y = torch.randn(17, 4), torch.tensor([0, 3, 7, 9, 12, 15]), torch.arange(6) % 3
    tracer.begin([nodes, roots, y], 6)
    F.cross_entropy(model((2 * nodes.double().float())[roots]), y).backward()
    tracer.end()
    assert not tracer.findings
