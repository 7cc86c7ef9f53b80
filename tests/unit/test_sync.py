"""Strategy ``sync`` in one process: the optimizer's face, what breaks equality, and the warning about it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.config import Config
from hvd_adaptive.core.dispatch import epoch_order, round_size
from hvd_adaptive.train.exactness import what_breaks_equality
from hvd_adaptive.train.records import FIELDS, GatheredStats
from hvd_adaptive.train.session import Session
from hvd_adaptive.train.sync_optimizer import SyncOptimizer, all_finite
from hvd_adaptive.transport.base import AgreedError
from hvd_adaptive.transport.local import LocalTransport, LocalWorld

_generator = torch.Generator().manual_seed(0)
X = torch.randn(130, 6, dtype=torch.float64, generator=_generator)
Y = (X.sum(dim=1) > 0).long()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def make_session(model: nn.Module, optimizer: Any, **options: Any) -> Session:
    config = Config(strategy="sync", **{"batch_size": 20, "mega_batch": 60, **options})
    return Session(model, optimizer, config, transport=LocalTransport())


@pytest.mark.parametrize("steps", [1, 3])
def test_one_rank_without_mpi_is_plain_training(steps: int) -> None:
    """With a scheduler and clipping, in the loop that also runs over many ranks."""
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = make_session(model, optimizer, accumulation_steps=steps)
    scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, step_size=5, gamma=0.5)
    for batch in session.batches(TensorDataset(X, Y), num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            due = session.synchronize()
            if due:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            session.optimizer.step()
            if due:
                scheduler.step()
    session.close()

    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=5, gamma=0.5)
    for epoch in range(2):
        order = epoch_order(len(X), seed=0, epoch=epoch)
        for first in range(0, len(X), 20):
            rows = order[first : first + 20]
            sgd.zero_grad()
            nn.functional.cross_entropy(plain(X[rows]), Y[rows]).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            sgd.step()
            scheduler.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_rounds_are_whole_numbers_of_global_batches() -> None:
    for unit in (1, 7, 64, 1000):
        for mega_batch in (1, 100, 640, 5000):
            cursor, sizes = 0, []
            while cursor < 2345:
                sizes.append(round_size(cursor, dataset_size=2345, mega_batch=mega_batch, unit=unit))
                cursor += sizes[-1]
            assert cursor == 2345 and all(size % unit == 0 for size in sizes[:-1])
            assert max(sizes) - min(sizes[:-1] or sizes) <= max(unit, mega_batch)


def test_hooks_are_off_the_model_after_the_session() -> None:
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=4)
    for batch in session.batches(TensorDataset(X, Y)):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    other = copy.deepcopy(model)
    for m in (model, other):
        m.zero_grad()
        nn.functional.cross_entropy(m(X), Y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_window_begins_and_ends_on_its_borders_only() -> None:
    p = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([p], lr=1.0)
    optimizer = SyncOptimizer(inner)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(p.detach().clone()))
    for position in range(3):
        optimizer.begin(opens_window=position == 0, step_due=position == 2)
        optimizer.zero_grad()
        (p.sum() * (position + 1)).backward()
        optimizer.step()
    assert len(calls) == 1 and p.tolist() == [-5.0, -5.0]
    optimizer.begin(opens_window=True, step_due=True)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is not None and p.grad.tolist() == [0.0, 0.0]
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="must come before the Session"):
        optimizer.add_param_group({"params": []})


def test_state_goes_through_the_optimizer() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = SyncOptimizer(torch.optim.Adam([p], lr=0.1))
    p.sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    fresh = SyncOptimizer(torch.optim.Adam([p], lr=0.1))
    fresh.load_state_dict(state)
    assert torch.equal(fresh.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    # Its sum overflows in half precision, and it is finite.
    large = torch.full((4000,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(iter([large, torch.zeros(0)]))
    broken = large.clone()
    broken[1234] = value
    assert not all_finite(iter([large, broken]))
    sparse = torch.sparse_coo_tensor([[0, 3, 3]], [1.0, value, -value], (5,), dtype=dtype, check_invariants=False)
    assert not all_finite(iter([large, sparse]))


def test_a_step_with_nan_changes_nothing_and_a_round_of_them_stops_the_run() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    with pytest.raises(AgreedError, match="all 4 steps of a round held NaN or Inf"):  # noqa: PT012
        for batch in session.batches(TensorDataset(X, Y)):
            with session.step(batch):
                session.optimizer.zero_grad()
                (nn.functional.cross_entropy(model(batch.x), batch.y) * float("nan")).backward()
                session.optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_some_steps_with_nan_are_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    records: list[Any] = []
    session.records.append(records.append)
    for number, batch in enumerate(session.batches(TensorDataset(X, Y))):
        with session.step(batch):
            session.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            (loss * (float("inf") if number == 1 else 1.0)).backward()
            session.optimizer.step()
    assert [record.stats["skipped_steps"].tolist() for record in records] == [[1.0], [0.0]]
    assert records[0].to_json()["ranks"]["skipped_steps"] == [1.0]
    assert caplog.text.count("1 of 4 steps were left out") == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_layers_that_break_equality_are_named() -> None:
    class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
        """Stands for Horovod's, which this room may not import."""

    model = nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(3),
            "norms": nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(4))),
            "drop": nn.Dropout(0.5),
            "off": nn.Dropout2d(0.0),
            "rnn": nn.LSTM(3, 3, num_layers=2, dropout=0.1),
            "attention": nn.MultiheadAttention(4, 2, dropout=0.2),
            "layer": nn.LayerNorm(3),
            "sync": SyncBatchNorm(3),
        }
    )
    batch_norm, dropout, mixed = what_breaks_equality(model, loss_reduction="mean")
    assert "BatchNorm" in batch_norm and "(norm, norms.0, norms.1 and 2 more)" in batch_norm
    assert "dropout" in dropout and "(drop, rnn, attention)" in dropout
    assert "SyncBatchNorm" in mixed
    assert len(what_breaks_equality(model, loss_reduction="sum")) == 2
    assert what_breaks_equality(make_model(), loss_reduction="mean") == []


def test_the_session_says_what_breaks_equality_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2)).double()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert caplog.text.count("is not equal to one rank at the same global batch") == 1
    assert len(session.inexact) == 2
    caplog.clear()
    plain = make_model()
    assert make_session(plain, torch.optim.SGD(plain.parameters(), lr=0.1)).inexact == [] and not caplog.text


def test_freezing_during_a_session_is_refused() -> None:
    model = make_model()
    session = make_session(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="requires_grad of a parameter changed"):  # noqa: PT012
        for batch in session.batches(TensorDataset(X, Y)):
            model[0].bias.requires_grad_(False)
            with session.step(batch):
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()


@pytest.mark.parametrize(
    "options", [{"max_batch_size": 20, "global_batch_size": 21}, {"accumulation_steps": 30, "global_batch_size": 29}]
)
def test_a_global_batch_that_does_not_fit_the_ranks_is_refused(options: dict[str, Any]) -> None:
    model = make_model()
    with pytest.raises(AgreedError, match="global_batch_size must hold a share for every rank"):
        make_session(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


class UnexchangedTransport(LocalTransport):
    """Simulated ranks whose gradients stay their own, for what follows from statistics only."""

    def distributed_optimizer(self, optimizer: Any, model: nn.Module, **_: Any) -> Any:
        return optimizer


def shares_over_rounds(speeds: list[list[float]], *, overhead_s: float = 0.0, **options: Any) -> np.ndarray:
    """The shares of each round, if the ranks compute so many samples a second in it and a step costs ``overhead_s``."""

    def run(transport: LocalTransport) -> list[list[float]]:
        world = UnexchangedTransport(transport._world, transport.rank)
        model = make_model()
        config = Config(strategy="sync", global_batch_size=400, **options)
        strategy: Any = Session(model, torch.optim.SGD(model.parameters(), lr=1), config, transport=world)._strategy
        shares = [strategy.batch_sizes.tolist()]
        for speed in speeds:
            values = np.zeros((4, len(FIELDS)))
            steps = 10.0 * config.accumulation_steps
            for name, column in {
                "num_steps": np.full(4, steps),
                "num_samples": 10 * strategy.batch_sizes,
                "busy_s": 10 * strategy.batch_sizes / np.array(speed) + steps * overhead_s,
            }.items():
                values[:, FIELDS.index(name)] = column
            strategy._rebalance(GatheredStats(values))
            shares.append(strategy.batch_sizes.tolist())
        return shares

    results = LocalWorld(4).run(run)
    assert all(result == results[0] for result in results)
    shares = np.array(results[0])
    assert (shares.sum(axis=1) == 400).all()
    return shares


@pytest.mark.parametrize("steps", [1, 3])
def test_shares_follow_the_speeds_by_a_quarter_at_a_time(steps: int) -> None:
    shares = shares_over_rounds(
        [[100, 100, 200, 400]] * 12 + [[400, 400, 200, 200]] * 15, overhead_s=0.002, accumulation_steps=steps
    )
    assert (np.abs(np.diff(shares, axis=0)) <= 0.25 * shares[:-1] + 1).all()
    for settled, speed in ((shares[12], [100, 100, 200, 400]), (shares[-1], [400, 400, 200, 200])):
        seconds = settled / np.array(speed) + steps * 0.002
        assert seconds.max() < 1.12 * seconds.min(), settled.tolist()


def test_equal_ranks_keep_equal_shares_through_noise() -> None:
    noise = np.random.default_rng(0).normal(1, 0.02, (40, 4))
    assert (shares_over_rounds((200 * noise).tolist()) == 100).all()


def test_static_shares_are_those_of_the_first_round() -> None:
    shares = shares_over_rounds([[100, 100, 200, 400], [400, 100, 100, 100]], batch_size_rule="static")
    assert shares[1:].tolist() == [[50, 50, 100, 200]] * 2
    assert (shares_over_rounds([[100, 100, 200, 400]] * 3, batch_size_rule="fixed") == 100).all()


def test_shares_stay_within_a_ranks_bounds() -> None:
    shares = shares_over_rounds([[1, 100, 100, 400]] * 20, min_batch_size=20, max_batch_size=150)
    assert shares.min() == 20 and shares.max() == 150


def test_shares_survive_a_restart_with_as_many_ranks() -> None:
    strategy: Any = make_session(make_model(), torch.optim.SGD(make_model().parameters(), lr=1))._strategy
    shared = copy.deepcopy(strategy.state_dict()["shared"])
    strategy.load_state_dict(shared, dict, world_size=1)
    assert strategy.batch_sizes.tolist() == [20]
    strategy.load_state_dict({**shared, "sizes": np.array([10.0, 30.0])}, dict, world_size=2)
    assert strategy.batch_sizes.tolist() == [20]
