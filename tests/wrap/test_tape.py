"""Losses that are computed again on parts of a batch: which are a mean over samples, each by itself, shows by their numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.reasons import Reason

N = 8
_generator = torch.Generator().manual_seed(3)
X, Y = torch.randn(N, 6, generator=_generator), torch.arange(N) % 3
T = torch.rand(N, generator=_generator)


class Model(nn.Module):
    """Returns scores, or what a function makes of them within the forward."""

    def __init__(self, within: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
        self.within = within

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        scores = self.layers(x)
        return scores if self.within is None else self.within(scores, *others)  # type: ignore[no-any-return]


def findings_of(model: nn.Module, loss_of: Any, x: Tensor = X, y: Tensor = Y, t: Tensor = T) -> set[Reason]:
    tracer = Tracer()
    tracer.train(list(model.parameters()))
    batch = [x.clone(), y.clone(), t.clone()]
    tracer.begin(batch, len(x))
    try:
        loss_of(model, *batch).backward()
    finally:
        tracer.end()
    return tracer.findings


def distances(scores: Tensor) -> Tensor:
    return (scores.unsqueeze(1) - scores.unsqueeze(0)).pow(2).sum(2)


def batch_hard(model: Any, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    scores = F.normalize(model(x), dim=1)
    apart, same = distances(scores), (y.unsqueeze(1) == y.unsqueeze(0)).float()
    return F.relu((apart * same).max(1)[0] - (apart + 10 * same).min(1)[0] + 0.3).mean()


def info_nce(model: Any, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    scores = model(x)
    alike = F.cosine_similarity(scores[:, None], scores[None].roll(1, 2), -1)
    return F.cross_entropy(alike, torch.arange(x.size(0)))


def pair_sum(model: Any, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    scores = model(x)
    n = scores.size(0)
    return distances(scores).sum() / (n * (n - 1))


PAIRS = [
    batch_hard,
    info_nce,
    pair_sum,
    lambda m, x, y, t: F.binary_cross_entropy_with_logits(m(x)[:, :1] - m(x)[:, 0], (t[:, None] > t[None]).float()),
    lambda m, x, y, t: F.relu(1 - (m(x)[:, :1] - m(x)[:, 0])).mean(),
    lambda m, x, y, t: (lambda z: F.linear(z, z).logsumexp(1).mean())(m(x)),
    lambda m, x, y, t: F.pairwise_distance(m(x)[:, None], m(x)[None]).mean(),
    # The well-known one: (N, 1) beside (N,).
    lambda m, x, y, t: F.mse_loss(m(x)[:, :1], t),
]
SCALED = [
    lambda m, x, y, t: F.cross_entropy(m(x), y) / x.size(0),
    lambda m, x, y, t: F.cross_entropy(m(x), y) * len(x),
    lambda m, x, y, t: F.cross_entropy(m(x), y) + (m(x).sum(1) / x.shape[0]).mean(),
]
WITHIN = [
    lambda z, y, t: 1 - (2 * (z.sigmoid()[:, 0] * t).sum() + 1) / (z.sigmoid()[:, 0].sum() + t.sum() + 1),
    lambda z, y, t: torch.sqrt(F.mse_loss(z[:, 0], t)),
    lambda z, y, t: (F.cross_entropy(z, y, reduction="none") * (t > 0.5)).mean() / (t > 0.5).float().mean(),
    lambda z, y, t: F.cross_entropy(z, y, reduction="none").dot(t) / t.sum(),
    lambda z, y, t: F.cross_entropy(torch.einsum("nc,mc->nm", z, z), y),
    lambda z, y, t: F.mse_loss(z.T @ z / z.size(0), torch.eye(5)),
    lambda z, y, t: (lambda h: (h - h.mean(0)).pow(2).mean())(z.view(-1, 1)),
]
MEANS = [
    lambda m, x, y, t: F.cross_entropy(m(x), y),
    lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum") / x.size(0),
    lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum") / len(x),
    lambda m, x, y, t: F.cross_entropy(m(x), y) + 0.01 * sum(p.pow(2).sum() for p in m.parameters()),
    lambda m, x, y, t: ((1 - (-F.cross_entropy(m(x), y, reduction="none")).exp()) ** 2).mean(),
    lambda m, x, y, t: F.kl_div(F.log_softmax(m(x), 1), F.softmax(m(x).detach() * 2, 1), reduction="batchmean"),
    lambda m, x, y, t: F.mse_loss(m(x + 0.1 * torch.randn_like(x)), torch.randn(x.size(0), 5)),
    # Random numbers take the place of what was there.
    lambda m, x, y, t: F.mse_loss(m(x), torch.arange(5.0 * x.size(0)).view(x.size(0), 5).normal_()),
    lambda m, x, y, t: F.mse_loss(torch.distributions.Normal(m(x), 0.5).rsample(), x[:, :5]),
    lambda m, x, y, t: F.mse_loss(F.dropout(m(x), 0.5), x[:, :5]),
    lambda m, x, y, t: (m(x).view(x.size(0) * 5, 1) ** 2).mean(),
    lambda m, x, y, t: m(x).mul_(2).add_(1).clamp_(min=0).mean(),
    lambda m, x, y, t: F.mse_loss(m(x)[:, 0], t.clone().mul_(3)),
]


@pytest.mark.parametrize("loss_of", PAIRS)
def test_losses_of_pairs_are_no_mean_over_samples(loss_of: Any) -> None:
    assert findings_of(Model(), loss_of)


@pytest.mark.parametrize("loss_of", SCALED)
def test_a_mean_that_is_scaled_by_the_batchs_size_once_more(loss_of: Any) -> None:
    assert findings_of(Model(), loss_of)


@pytest.mark.parametrize("within", WITHIN)
def test_losses_of_the_whole_batch_within_a_forward(within: Any) -> None:
    assert findings_of(Model(within), lambda m, x, y, t: m(x, y, t))


@pytest.mark.parametrize("loss_of", MEANS)
def test_means_over_samples_keep_their_shares(loss_of: Any) -> None:
    assert findings_of(Model(), loss_of) == set()


@pytest.mark.parametrize(
    "layers",
    [
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5)),
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.LSTM(3, 5, 2, batch_first=True, dropout=0.5)),
        nn.Sequential(nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, 1), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(12, 5)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)),
    ],
    ids=["batch norm", "lstm", "transformer", "instance norm", "spectral norm"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_layers_of_torch_are_computed_again(layers: nn.Module) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        found = model(x)
        return F.cross_entropy(found[0][:, -1] if isinstance(found, tuple) else found, y)

    assert findings_of(layers, loss_of) == set()


def test_a_transformer_that_gets_batches_along_the_wrong_dimension_is_found() -> None:
    layer = nn.TransformerEncoderLayer(6, 1, 4, dropout=0.0)
    assert findings_of(layer, lambda m, x, y, t: F.mse_loss(m(x.unsqueeze(1))[:, 0, 0], t))


def test_nothing_of_the_scripts_own_is_changed() -> None:
    model = Model(lambda z, y, t: (z.mul_(2) - t[:, None]).pow(2).mean())
    table = torch.zeros(N, 5)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        x.mul_(2)
        kept = table.clone()
        kept[: x.size(0)] = x[:, :5]
        assert torch.equal(kept, 2 * X[:, :5])
        loss = model(x, y, t)
        random.append(torch.get_rng_state())
        before.append([value.clone() for value in (x, t, kept, *model.parameters())])
        seen.append([x, t, kept, *model.parameters()])
        return loss

    random: list[Tensor] = []
    before: list[list[Tensor]] = []
    seen: list[list[Tensor]] = []
    findings_of(model, loss_of)
    assert torch.equal(torch.get_rng_state(), random[0])
    assert all(torch.equal(old, new) for old, new in zip(before[0], seen[0], strict=True))


def test_buffers_stay_as_they_are() -> None:
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    layers = nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 5)).double()
    alone = copy.deepcopy(layers)
    assert findings_of(layers, lambda m, x, y, t: F.cross_entropy(m(x), y), x=X.double()) == set()
    alone(X.double())
    assert all(torch.equal(one, other) for one, other in zip(layers.buffers(), alone.buffers(), strict=True))


def test_large_results_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a usual loss is taken for what it is, and pairs show by their shape."""
    monkeypatch.setattr("hvd_adaptive.wrap.tape._MOST_MADE", 100)
    assert findings_of(Model(), lambda model, x, y, t: F.cross_entropy(model(x), y)) == set()
    assert findings_of(Model(), PAIRS[0]) == {Reason.MIXED}
