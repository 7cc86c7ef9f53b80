"""Merge weights by squared-gradient mass: who alone touched a row moves it in full, equals average, weights sum to 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.gradient_mass import GradientMass
from hvd_adaptive.engine.optimizers import RowwiseAdagrad, slice_dim, slice_squares
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy

RULE = "fisher-rows"


def merged_table(transport: LocalTransport, gradients: list[dict[int, float]], **options: Any) -> Tensor:
    """One step of SGD with lr 1 on each rank's rows of a zero table, then a merge; returns the first column."""
    table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    strategy = LocalStrategy(table, optimizer, Config(outer_step="none", **options), transport)
    own = gradients[transport.rank]
    if own:
        rows = torch.tensor(list(own))
        (table(rows).sum(1) @ torch.tensor(list(own.values())).double()).mul(-1).backward()
        optimizer.step()
    strategy.end_round(RoundStats(batch_size=1, num_updates=len(own), num_samples=len(own)))
    return table.weight.detach()[:, 0].clone()


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_row_that_one_rank_touched_gets_its_whole_step(mode: str) -> None:
    gradients = [{0: 1.0, 1: 1.0}, {1: 3.0, 2: 2.0}, {}]
    for merged in LocalWorld(3).run(lambda t: merged_table(t, gradients, merge_weights=RULE, sparse_merge=mode)):
        # Row 1: masses 1 and 9 of deltas 1 and 3. Rows that nobody touched stay.
        expected = torch.tensor([1.0, 0.1 * 1 + 0.9 * 3, 2.0, 0, 0, 0]).double()
        assert torch.allclose(merged, expected, rtol=1e-6)
        assert (merged[3:] == 0).all()


def test_equal_masses_give_the_average() -> None:
    gradients = [{0: 2.0, 3: 1.0}, {0: -2.0, 3: 1.0}]
    for merged in LocalWorld(2).run(lambda t: merged_table(t, gradients, merge_weights=RULE)):
        assert torch.equal(merged, torch.tensor([0.0, 0, 0, 1.0, 0, 0]).double())


class Net(nn.Module):
    """Sparse and dense parameters of all shapes, two dtypes, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 6, mode="sum", sparse=True)
        self.wide = nn.Linear(6, 9)
        self.fine = nn.Linear(9, 4).double()
        self.scale = nn.Parameter(torch.ones(()))
        self.convolution = nn.Conv1d(1, 3, 2)
        self.tied = self.wide.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wide(self.bag(x)))
        seen = self.convolution(hidden.unsqueeze(1)).mean((1, 2))
        return (self.fine(hidden.double()).sum(1) * self.scale + seen).square().mean()


def make_net() -> Net:
    generator = torch.Generator().manual_seed(0)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def some_steps(model: nn.Module, optimizer: Any, rank: int, count: int = 3) -> None:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randint(0, 20 + 10 * rank, (8, 4), generator=generator)).backward()
        optimizer.step()


@pytest.mark.parametrize("coded", [False, True])
def test_weights_sum_to_one_in_every_row(coded: bool) -> None:
    def run(transport: LocalTransport) -> list[Tensor]:
        model = make_net()
        parameters = list(model.parameters())
        mass = GradientMass(parameters, row_parameters=[2])
        assert parameters[2] is model.bag.weight
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        optimizer.register_step_post_hook(lambda *_: mass.after_step())
        some_steps(model, optimizer, transport.rank)
        factors = mass.exchange(transport, weights=np.full(3, 1 / 3), unions={}, coded=coded)
        assert mass.message_bytes == (2 if coded else 4) * sum(f.numel() for f in factors)
        return [f.expand(p.shape) for f, p in zip(factors, parameters, strict=True)]

    results = LocalWorld(3).run(run)
    for weights in zip(*results, strict=True):
        stacked = torch.stack(weights).double()
        assert (stacked >= 0).all()
        assert torch.allclose(stacked.sum(0), torch.ones_like(stacked[0]), atol=1e-6)
    # The bag's rows from 40 on only rank 2 can have seen; rows that nobody saw have the ranks' scalar weights.
    bag = torch.stack([weights[2] for weights in results])[:, :, 0]
    seen_by_last = bag[2] == 1
    assert seen_by_last[30:].any() and (bag[:2, seen_by_last] == 0).all()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_coded_weights_are_the_exact_ones_within_their_steps(world_size: int) -> None:
    generator = np.random.default_rng(0)
    masses = np.exp(generator.normal(-8, 6, (world_size, 403))) * (generator.random((world_size, 403)) > 0.3)
    masses[:, 7] = 0
    weights = generator.random(world_size)
    if world_size == 5:
        weights[3] = 0
    weights /= weights.sum()

    def run(transport: LocalTransport, coded: bool) -> Tensor:
        parameter = nn.Parameter(torch.zeros(403))
        mass = GradientMass([parameter])
        mass._mass[0].copy_(torch.from_numpy(masses[transport.rank]))
        return mass.exchange(transport, weights=weights, unions={}, coded=coded)[0]

    exact, coded = (torch.stack(LocalWorld(world_size).run(lambda t: run(t, kind))).double() for kind in (False, True))  # noqa: B023
    assert torch.allclose(coded.sum(0), torch.ones(403).double(), atol=1e-6)
    # Codes are within an eighth of an octave, so two masses' ratio within a quarter, 19%; a unit is 1 / 255.
    assert ((coded - exact).abs() <= 0.2 * exact * (1 - exact) + 1.01 / 255).all()
    assert (coded[:, (masses > 0).sum(0) == 1].max(0).values == 1).all()
    assert (weights > 0).all() or (coded[3] == 0).all()


def test_the_mass_is_the_sum_of_squared_gradients() -> None:
    torch.manual_seed(1)
    table, dense = nn.Embedding(7, 3, sparse=True), nn.Linear(5, 4)
    parameters = [*table.parameters(), *dense.parameters()]
    rows = GradientMass(parameters, row_parameters=[0])
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    expected = [torch.zeros_like(p) for p in parameters]
    for _ in range(3):
        optimizer.zero_grad()
        # A row that comes twice in a batch has one gradient.
        (table(torch.tensor([1, 1, 4])).sum(0).square().sum() + dense(torch.randn(2, 5)).square().sum()).backward()
        for total, p in zip(expected, parameters, strict=True):
            total += p.grad.to_dense().square()
        optimizer.step()
        rows.after_step()
        rows.after_step()  # Horovod's optimizer runs the hooks twice; a step counts once.
    assert torch.allclose(rows._mass[0], expected[0].sum(1, keepdim=True), rtol=1e-5)
    # The longest dimension of (4, 5) is the second one.
    assert torch.allclose(rows._mass[1], expected[1].sum(0, keepdim=True), rtol=1e-5)
    assert torch.allclose(rows._mass[2], expected[2], rtol=1e-5)


def test_weights_are_fp32_whatever_torchs_default_type_is() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        mass = GradientMass([torch.zeros(3, 2, dtype=torch.float32)])
        (weights,) = mass.exchange(LocalTransport(), weights=np.ones(1), unions={})
    finally:
        torch.set_default_dtype(before)
    assert weights.dtype == torch.float32 and mass.message_bytes == 4 * 3


@pytest.mark.parametrize("shape", [(), (5,), (3, 700), (700, 3), (2, 90000), (60, 4, 900), (300, 300, 3)])
def test_slices_are_cut_along_the_longest_dimension(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    dim = slice_dim(values.shape)
    assert not shape or (shape[dim] == max(shape) and dim == shape.index(max(shape)))
    squares = slice_squares(values, dim)
    others = [d for d in range(len(shape)) if d != dim]
    expected = values.double().square().sum(others, keepdim=True) if others else values.double().square()
    assert squares.shape == expected.shape and torch.allclose(squares.double(), expected, rtol=1e-4)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: RowwiseAdagrad(p, lr=0.05),
])  # fmt: skip
def test_one_rank_is_the_plain_optimizer(make: Any) -> None:
    def run(transport: LocalTransport) -> dict[str, Tensor]:
        model = make_net()
        model.bag.sparse = False
        optimizer = make(model.parameters())
        strategy = LocalStrategy(model, optimizer, Config(outer_step="none", merge_weights=RULE), transport)
        for number in range(3):
            some_steps(model, optimizer, number)
            strategy.end_round(RoundStats(batch_size=8, num_updates=3, num_samples=24))
        return model.state_dict()

    merged = LocalWorld(1).run(run)[0]
    plain = make_net()
    plain.bag.sparse = False
    optimizer = make(plain.parameters())
    for number in range(3):
        some_steps(plain, optimizer, number)
    for name, value in plain.state_dict().items():
        # A merge computes w + (w' - w), which rounds.
        assert torch.allclose(merged[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("broken", ["parameter", "gradient"])
def test_a_rank_that_is_not_finite_counts_nothing(broken: str) -> None:
    def run(transport: LocalTransport) -> dict[str, Tensor]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = LocalStrategy(model, optimizer, Config(outer_step="none", merge_weights=RULE), transport)
        some_steps(model, optimizer, transport.rank)
        if transport.rank == 1:
            if broken == "gradient":
                model.wide.weight.grad.fill_(1e25)
                optimizer.step()
            with torch.no_grad():
                model.wide.weight.fill_(torch.nan)
        strategy.end_round(RoundStats(batch_size=8, num_updates=3, num_samples=24))
        return {name: value.clone() for name, value in model.state_dict().items()}

    alone, other = LocalWorld(2).run(run)
    expected = make_net()
    some_steps(expected, torch.optim.SGD(expected.parameters(), lr=0.01), 0)
    for name, value in expected.state_dict().items():
        assert torch.equal(alone[name], other[name])
        assert torch.allclose(alone[name], value, rtol=1e-5, atol=1e-6), name


def test_weight_decay_moves_rows_without_gradient_by_the_scalar_weights() -> None:
    def run(transport: LocalTransport) -> Tensor:
        table = nn.Embedding(4, 2)
        nn.init.ones_(table.weight)
        optimizer = torch.optim.AdamW(table.parameters(), lr=0.1, weight_decay=0.5)
        strategy = LocalStrategy(table, optimizer, Config(outer_step="none"), transport)
        table(torch.tensor([0])).sum().backward()
        optimizer.step()
        strategy.end_round(RoundStats(batch_size=1, num_updates=1 + transport.rank, num_samples=1))
        return table.weight.detach().clone()

    for weight in LocalWorld(2).run(run):
        assert torch.allclose(weight[1:], torch.tensor(0.95))


@pytest.mark.parametrize("options", [
    {"compression": "maxmin:8"}, {"compression": "fp16"}, {"optimizer_state": "average"},
])  # fmt: skip
def test_other_ways_of_merging_weigh_alike(options: dict[str, Any]) -> None:
    def run(transport: LocalTransport, **options: Any) -> list[Tensor]:
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        strategy = LocalStrategy(model, optimizer, Config(outer_step="none", merge_weights=RULE, **options), transport)
        some_steps(model, optimizer, transport.rank)
        strategy.end_round(RoundStats(batch_size=8, num_updates=3, num_samples=24))
        strategy.drain()
        return [p.detach().clone() for p in model.parameters()]

    plain = LocalWorld(2).run(run)[0]
    found = LocalWorld(2).run(lambda t: run(t, **options))
    for ours, others, expected in zip(*found, plain, strict=True):
        assert torch.equal(ours, others)
        assert torch.allclose(ours, expected, atol=0.01), options
