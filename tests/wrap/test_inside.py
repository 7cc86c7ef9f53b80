"""What one watched batch shows of a forward in a script's own code, and of what comes from it by another way than its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.kept_batches import FirstBatches
from hvd_adaptive.wrap.reasons import Reason

N = 6


class Own(nn.Module):
    """Computes what it is given."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.layer, self.table, self.compute = nn.Linear(4, 4), nn.Embedding(N, 4), compute
        self.beside = torch.zeros(())

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.compute(self, x, y)


def trace(compute: Any, loss_of: Any) -> Tracer:
    model, tracer = Own(compute), Tracer()
    tracer.train(list(model.parameters()))
    x, y = torch.randn(N, 4), torch.arange(N) % 3
    tracer.begin([x, y], N)
    loss_of(model(x, y), model, y).backward()
    tracer.end()
    assert tracer.num_forwards == 1
    return tracer


def recurrent(hidden: Tensor, model: Own, x: Tensor) -> Tensor:
    return torch.tanh(hidden + model.layer(x))


def by_shape(model: Own, x: Tensor, y: Tensor) -> Tensor:
    batch, width = x.shape
    return recurrent(torch.zeros(1, batch, width)[0], model, x).reshape(batch, -1)


def square(model: Own, x: Tensor, y: Tensor) -> Tensor:
    """As many steps as samples, by chance."""
    steps = model.layer(x)[:, None].expand(-1, N, -1)
    return torch.matmul(torch.zeros(steps.size(1), steps.size(1)), steps).mean(1)


def beside(model: Own, x: Tensor, y: Tensor) -> Tensor:
    out = model.layer(x)
    model.beside = out.softmax(1).mean(1).pow(2).sum()
    return out


def of_results(out: Any, model: Own, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def as_it_is(out: Any, model: Own, y: Tensor) -> Tensor:
    return out  # type: ignore[no-any-return]


def each(model: Own, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.layer(x), y, reduction="none")


HARMLESS = {
    "sizes that are asked for": by_shape,
    "as many steps as samples": square,
    "by the length": lambda m, x, y: recurrent(torch.zeros(len(x), 4), m, x).view(len(y), -1),
    "of its own along rows": lambda m, x, y: F.normalize(m.layer(x) - m.layer(x).mean(1, keepdim=True), dim=1),
    "statistics of weights": lambda m, x, y: m.layer(x) * m.table.weight.std(0),
    "statistics without gradients": lambda m, x, y: (m.layer(x), m.layer(x).detach().norm())[0],
}
EQUAL = {
    "a view of so many": (lambda m, x, y: m.layer(x).view(N, -1), Reason.FIXED_SIZE),
    "a reshape of so many": (lambda m, x, y: m.layer(x).reshape((N, 4)), Reason.FIXED_SIZE),
    "an expansion": (lambda m, x, y: m.layer(x) + m.table.weight[:1].expand(N, 4), Reason.FIXED_SIZE),
    "a hidden state": (lambda m, x, y: recurrent(torch.zeros(N, 4), m, x), Reason.FIXED_SIZE),
    "that of layers": (lambda m, x, y: recurrent(torch.zeros((1, N, 4))[0], m, x), Reason.FIXED_SIZE),
    "one of its kind": (lambda m, x, y: recurrent(x.new_zeros(N, 4), m, x), Reason.FIXED_SIZE),
    "a comparison": (lambda m, x, y: m.layer(x) if x.shape[0] == N else x, Reason.SIZE_DECIDES),
    "centred": (lambda m, x, y: m.layer(x) - m.layer(x).mean(0), Reason.MIXED),
    "scaled": (lambda m, x, y: m.layer(x) / m.layer(x).std(dim=0, keepdim=True), Reason.MIXED),
    "scaled by the largest": (lambda m, x, y: m.layer(x) / m.layer(x).max(), Reason.MIXED),
    "softmax over samples": (lambda m, x, y: F.softmax(m.layer(x), dim=0), Reason.MIXED),
}
MEANS_INSIDE = {
    "mean": lambda m, x, y: F.cross_entropy(m.layer(x), y),
    "mean of each": lambda m, x, y: (2 * each(m, x, y)).mean(),
    "several": lambda m, x, y: torch.stack([each(m, x, y).mean(), m.layer(x).pow(2).mean()]).sum(),
    "regularized": lambda m, x, y: each(m, x, y).mean() + 1e-3 * m.layer.weight.pow(2).sum(),
    "by the size": lambda m, x, y: each(m, x, y).sum() / x.size(0),
    "by the length": lambda m, x, y: each(m, x, y).sum() / len(x),
    "summed along rows": lambda m, x, y: m.layer(x).pow(2).sum(1).mean(),
}
SUMS_INSIDE = {
    "masked, by another count": lambda m, x, y: (each(m, x, y) * (y > 0)).sum() / (y > 1).sum(),
    "by a constant": lambda m, x, y: each(m, x, y).sum() / 6.0,
    "not divided": lambda m, x, y: m.layer(x).pow(2).sum(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_forwards_that_treat_each_sample_by_itself(name: str) -> None:
    assert not trace(HARMLESS[name], of_results).findings


@pytest.mark.parametrize("name", EQUAL)
def test_forwards_for_batches_of_one_size_or_of_the_whole_batch(name: str) -> None:
    compute, reason = EQUAL[name]
    assert trace(compute, of_results).findings == {reason}


@pytest.mark.parametrize("name", MEANS_INSIDE)
def test_losses_within_a_forward_that_are_means(name: str) -> None:
    assert not trace(MEANS_INSIDE[name], as_it_is).findings


@pytest.mark.parametrize("name", SUMS_INSIDE)
def test_losses_within_a_forward_that_are_sums(name: str) -> None:
    assert Reason.MIXED in trace(SUMS_INSIDE[name], as_it_is).findings


def test_rows_of_an_embedding_that_are_scaled_by_their_count_in_the_batch() -> None:
    def by_count(model: Own, x: Tensor, y: Tensor) -> Tensor:
        model.table.scale_grad_by_freq = True
        return model.layer(x) + model.table(y)

    def frozen(model: Own, x: Tensor, y: Tensor) -> Tensor:
        model.table.requires_grad_(False)
        return by_count(model, x, y)

    assert trace(by_count, of_results).findings == {Reason.FREQUENCY}
    assert not trace(frozen, of_results).findings


def test_what_a_forward_leaves_beside_its_result() -> None:
    tracer = trace(beside, lambda out, model, y: F.cross_entropy(out, y) + 0.1 * model.beside)
    assert tracer.findings == {Reason.MIXED}
    penalized = trace(HARMLESS["by the length"], lambda out, model, y: F.cross_entropy(out, y) + model.layer.weight.norm())
    assert not penalized.findings


def test_samples_that_a_forward_takes_by_their_number_are_there() -> None:
    def some(model: Own, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.layer(x)
        model.beside = hidden[3].detach()
        return hidden

    tracer = trace(some, of_results)
    assert not tracer.findings and tracer.least_samples == 4


class Batch:
    """One of a script's own kind."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors


@pytest.mark.parametrize("kind", [dict, Batch])
def test_batches_that_are_kept_and_shapes_that_vary(kind: Any) -> None:
    looks, kept = FirstBatches(DataLoader([0])), []  # type: ignore[arg-type]
    for length in (3, 3, 4, 3):
        batch = kind(x=torch.zeros(N, length), y=torch.zeros(N))
        kept.append(batch)
        looks.delivered(batch)
        assert looks.has_other_shapes is (len(kept) > 2) and looks.reasons() == ({Reason.SHAPES} if len(kept) > 2 else set())
    assert looks.are_kept()
    del kept[0], batch
    assert not looks.are_kept()


def test_a_tensor_for_each_sample_is_no_other_shape() -> None:
    looks = FirstBatches(DataLoader([0], collate_fn=list))  # type: ignore[arg-type]
    for num_samples in (4, 7, 8, 20):
        looks.delivered({"x": [torch.zeros(3, 5)] * num_samples, "y": torch.zeros(num_samples)})
    assert not looks.has_other_shapes
    looks.delivered({"x": [torch.zeros(3, 6)] * 20, "y": torch.zeros(20)})
    # A collate_fn of the script's own may join them.
    assert looks.has_other_shapes and not looks.reasons()


@pytest.mark.parametrize("kind", [lambda n: ["de", "fr"][n] * 8, lambda n: [["de", "fr"][n]] * 8, lambda n: torch.full((8,), n)])
def test_batches_of_one_kind_each(kind: Any) -> None:
    own: Any = [list(range(8))]
    for loader, expected in (
        (DataLoader(range(8), batch_sampler=own), {Reason.KINDS}),  # type: ignore[arg-type]
        (DataLoader(range(8), batch_size=8), set()),  # type: ignore[arg-type]
    ):
        looks = FirstBatches(loader)
        for number, found in ((0, set()), (0, set()), (1, expected), (0, expected)):
            looks.delivered({"x": torch.zeros(8, 3), "of": {"kind": kind(number)}, "y": torch.arange(8)})
            assert looks.reasons() == found
        looks.delivered({"x": torch.zeros(8, 3), "of": {"kind": torch.arange(8)}, "y": torch.arange(8)})
        assert not looks.reasons()
