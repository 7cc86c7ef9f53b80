"""Dual averaging: against a plain reference, whole steps of rows that one rank learned, and what does not go with it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.optimizer_state import with_defaults
from hvd_adaptive.engine.optimizers import RowwiseAdagrad, slice_dim
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy

OPTIMIZERS = [RowwiseAdagrad, torch.optim.Adagrad]
DUAL = Config(merge_weights="dual-averaging")


class Net(nn.Module):
    """Sparse and dense parameters of several shapes, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.bag = nn.EmbeddingBag(50, 6, mode="sum", sparse=True)
        self.wide = nn.Linear(6, 9)
        self.fine = nn.Linear(9, 4).double()
        self.scale = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fine(torch.relu(self.wide(self.bag(x))).double()).sum(1) * self.scale).square().mean()


def steps(model: nn.Module, optimizer: Any, rank: int, round_: int) -> int:
    """Takes rank + 1 steps on rows of which the higher ones are of the higher ranks alone; returns their number."""
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    for _ in range(rank + 1):
        optimizer.zero_grad()
        model(torch.randint(0, 20 + 10 * rank, (8, 4), generator=generator)).backward()
        optimizer.step()
    return rank + 1


def end(strategy: LocalStrategy, count: int) -> None:
    strategy.end_round(RoundStats(batch_size=1, num_updates=count, num_samples=count))


def rows_of(tensor: Tensor, dim: int) -> Tensor:
    """Sums over all dimensions but one."""
    others = [d for d in range(tensor.dim()) if d != dim]
    return tensor.sum(others, keepdim=True) if others else tensor


def reference(make: Any, world_size: int, num_rounds: int) -> tuple[list[Tensor], list[Tensor]]:
    """The rule written down plainly, in one process; parameters and accumulators after the rounds."""
    models = [Net() for _ in range(world_size)]
    optimizers = [make(m.parameters(), lr=0.1) for m in models]
    merged = [p.detach().clone() for p in models[0].parameters()]
    sums = [torch.zeros(()) for _ in merged]
    for round_ in range(num_rounds):
        for rank in range(world_size):
            steps(models[rank], optimizers[rank], rank, round_)
        parameters = [list(m.parameters()) for m in models]
        for i, start in enumerate(merged):
            own = [o.state[p[i]]["sum"] for o, p in zip(optimizers, parameters, strict=True)]
            total = sums[i] + sum(a - sums[i] for a in own)
            dim = 0 if i == 1 else slice_dim(start.shape)  # the bag is the second one, the scale the first
            gains = [rows_of(a - sums[i], dim) for a in own]
            learners = torch.where(sum(gains) > 0, sum(gains) ** 2 / sum(g**2 for g in gains), 1)
            duals = [a.sqrt() * (p[i].detach() - start) for a, p in zip(own, parameters, strict=True)]
            delta = torch.where(total > 0, sum(duals) / total.sqrt(), 0) / learners.sqrt()
            merged[i] = start + delta
            sums[i] = total.clone()
            for optimizer, p in zip(optimizers, parameters, strict=True):
                p[i].data.copy_(merged[i])
                optimizer.state[p[i]]["sum"].copy_(total)
    return merged, sums


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["always", "never"])
def test_it_is_the_rule_as_written(make: Any, mode: str) -> None:
    def run(transport: LocalTransport) -> tuple[list[Tensor], list[Tensor]]:
        model = Net()
        optimizer = make(model.parameters(), lr=0.1)
        strategy = LocalStrategy(model, optimizer, Config(merge_weights="dual-averaging", sparse_merge=mode), transport)
        for round_ in range(3):
            end(strategy, steps(model, optimizer, transport.rank, round_))
        return [p.detach() for p in model.parameters()], [optimizer.state[p]["sum"] for p in model.parameters()]

    merged, sums = reference(make, 3, 3)
    results = LocalWorld(3).run(run)
    assert [name for name, _ in Net().named_parameters()][:2] == ["scale", "bag.weight"]
    for values, accumulators in results:
        for own, other, expected in zip(values, results[0][0], merged, strict=True):
            assert torch.equal(own, other)
            assert torch.allclose(own, expected, rtol=1e-4, atol=1e-6)
        for own, other, expected in zip(accumulators, results[0][1], sums, strict=True):
            assert torch.equal(own, other)
            assert torch.allclose(own, expected.to(own.dtype), rtol=1e-4, atol=1e-9)


def merged_table(transport: LocalTransport, gradients: list[dict[int, float]], make: Any, **options: Any) -> Tensor:
    """A step with lr 1 on each rank's rows of a zero table, then a merge; returns the first column."""
    table = nn.Embedding(6, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = make(table.parameters(), lr=1.0)
    strategy = LocalStrategy(table, optimizer, Config(merge_weights="dual-averaging", **options), transport)
    own = gradients[transport.rank]
    if own:
        rows = torch.tensor(list(own))
        (table(rows).sum(1) @ torch.tensor(list(own.values()))).mul(-1).backward()
        optimizer.step()
    end(strategy, len(own))
    return table.weight.detach()[:, 0].clone()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_row_of_one_rank_gets_its_whole_step_and_equal_steps_their_average(make: Any, mode: str) -> None:
    # Row 0: rank 0 alone. Row 1: the same twice. Row 2: opposite. Row 3: rank 1 alone, downwards. Rank 2 has no batch.
    gradients = [{0: 5.0, 1: 2.0, 2: 3.0}, {1: 2.0, 2: -3.0, 3: -0.1}, {}]
    for merged in LocalWorld(3).run(lambda t: merged_table(t, gradients, make, sparse_merge=mode)):
        assert torch.allclose(merged, torch.tensor([1.0, 1.0, 0.0, -1.0, 0.0, 0.0]), atol=1e-6)
        assert (merged[4:] == 0).all()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_one_rank_equals_the_plain_optimizer(make: Any) -> None:
    def run(transport: LocalTransport) -> list[Tensor]:
        model = Net()
        optimizer = make(model.parameters(), lr=0.1)
        strategy = LocalStrategy(model, optimizer, DUAL, transport)
        for round_ in range(4):
            end(strategy, steps(model, optimizer, 0, round_))
        return [p.detach() for p in model.parameters()]

    plain = Net()
    optimizer = make(plain.parameters(), lr=0.1)
    for round_ in range(4):
        steps(plain, optimizer, 0, round_)
    for own, expected in zip(LocalWorld(1).run(run)[0], plain.parameters(), strict=True):
        assert torch.allclose(own, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_rank_with_nan_contributes_nothing_and_gets_the_others_accumulators(make: Any) -> None:
    def run(transport: LocalTransport, broken: bool) -> list[Tensor]:
        model = Net()
        optimizer = make(model.parameters(), lr=0.1)
        strategy = LocalStrategy(model, optimizer, DUAL, transport)
        end(strategy, steps(model, optimizer, transport.rank, 0))
        count = steps(model, optimizer, transport.rank, 1) if transport.rank < 2 or broken else 0
        if transport.rank == 2 and broken:
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(torch.nan)
                    optimizer.state[p]["sum"].fill_(torch.nan)
        end(strategy, count)
        return [t.clone() for p in model.parameters() for t in (p.detach(), optimizer.state[p]["sum"])]

    broken, left_out = (LocalWorld(3).run(functools.partial(run, broken=kind)) for kind in (True, False))
    for one, other in zip(broken, left_out, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("anew", [True, False])
def test_it_goes_on_from_a_saved_state(anew: bool) -> None:
    """Into a new strategy, or into one that has made steps since its last merge."""

    def run(transport: LocalTransport, saved: bool) -> list[Tensor]:
        model = Net()
        optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
        strategy = LocalStrategy(model, optimizer, DUAL, transport)
        end(strategy, steps(model, optimizer, transport.rank, 0))
        if saved:
            state = copy.deepcopy(strategy.state_dict())
            if anew:
                model = Net()
                optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
                strategy = LocalStrategy(model, optimizer, DUAL, transport)
            else:
                end(strategy, steps(model, optimizer, transport.rank, 5))
                steps(model, optimizer, transport.rank, 6)
            strategy.load_state_dict(state["shared"], lambda _: state["own"], world_size=transport.world_size)
        end(strategy, steps(model, optimizer, transport.rank, 1))
        return [p.detach() for p in model.parameters()]

    through, resumed = (LocalWorld(2).run(functools.partial(run, saved=kind)) for kind in (False, True))
    for a, b in zip(through[0], resumed[1], strict=True):
        assert torch.equal(a, b)


def test_compressed_deltas_come_near_the_exact_ones() -> None:
    def run(transport: LocalTransport, compression: str) -> Tensor:
        model = nn.Linear(300, 40)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = RowwiseAdagrad(model.parameters(), lr=0.1)
        strategy = LocalStrategy(model, optimizer, Config(merge_weights="dual-averaging", compression=compression), transport)
        generator = torch.Generator().manual_seed(transport.rank)
        (model(torch.randn(8, 300, generator=generator)) - 1).square().mean().backward()
        optimizer.step()
        end(strategy, 1)
        return model.weight.detach()

    exact, coded = (LocalWorld(2).run(functools.partial(run, compression=kind))[1] for kind in ("none", "maxmin:8"))
    assert not torch.equal(exact, coded)
    assert torch.linalg.norm(exact - coded) < 0.02 * torch.linalg.norm(exact)


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (RowwiseAdagrad, {}, "dual-averaging"),
        (RowwiseAdagrad, {"compression": "maxmin:4"}, "dual-averaging"),
        (torch.optim.Adagrad, {}, "dual-averaging"),
        (torch.optim.Adagrad, {"compression": "maxmin:4"}, "fisher-rows"),
        (torch.optim.SGD, {}, "fisher-rows"),
        (torch.optim.Adam, {}, "fisher-rows"),
        (RowwiseAdagrad, {"optimizer_state": "keep"}, "fisher-rows"),
        (RowwiseAdagrad, {"merge_weights": "fisher-rows"}, "fisher-rows"),
    ],
)
def test_auto_takes_it_for_rare_labels_where_it_fits(make: Any, options: dict[str, Any], expected: str) -> None:
    parameters = list(nn.Linear(3, 2).parameters())
    optimizer = make(parameters, lr=0.1)
    assert with_defaults(Config(**options), optimizer, parameters, rare_labels=True).weight_rule == expected
    assert with_defaults(Config(**options), optimizer, parameters).weight_rule == options.get("merge_weights", "updates")


def test_what_does_not_go_with_it_is_named() -> None:
    parameters = list(nn.Linear(3, 2).parameters())
    config = Config(merge_weights="dual-averaging")
    with pytest.raises(AgreedError, match=r"dual-averaging.*got SGD.*or other merge_weights"):
        with_defaults(config, torch.optim.SGD(parameters, lr=0.1), parameters)
    with pytest.raises(AgreedError, match="a part of the parameters"):
        with_defaults(config, torch.optim.Adagrad(parameters[:1], lr=0.1), parameters)
    for name, value in {"optimizer_state": "average", "logical_ranks": 2}.items():
        with pytest.raises(ValueError, match=rf"dual-averaging.*{name}"):
            Config(merge_weights="dual-averaging", **{name: value})
