"""Parameters that a loop changes between two rounds, over simulated ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain_loop import take_steps
from torch import nn

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.base_watch import BaseWatch
from hvd_adaptive.engine.flat_model import FlatModel
from hvd_adaptive.engine.merge import Merge
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.session.session import Session

X = torch.randn(480, 6, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, (X.sum(dim=1) > 0).long())
OUTER = {"outer_step": "nesterov", "outer_momentum": 0.9}
# Parts of their own, so that runs have the same bits.
SAME_BITS = {"dispatch": "equal", "batch_size_rule": "fixed"}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def train(
    transport: LocalTransport,
    options: dict[str, Any],
    on_record: Callable[[Session, nn.Module, Any], None],
    *,
    model: nn.Module | None = None,
) -> nn.Module:
    model = model or make_model()
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config(batch_size=10, mega_batch=80, hash_interval=1, **OUTER | options)
    session = Session(model, optimizer, config, transport=transport)
    session.records.append(lambda record: on_record(session, model, record))
    for batch in session.batches(DATA, num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x.to(dtype)).float(), batch.y).backward()
            session.optimizer.step()
    session.close()
    return model


class Rollback:
    """Goes back to an early model, after which the learning rate is 0."""

    def __init__(self) -> None:
        self.best: dict[str, torch.Tensor] = {}

    def __call__(self, session: Session, model: nn.Module, record: Any) -> None:
        if record.round == 1:
            self.best = copy.deepcopy(model.state_dict())
        if record.round == 6:
            assert not torch.equal(model[0].weight, self.best["0.weight"])
            model.load_state_dict(self.best)
            session.optimizer.param_groups[0]["lr"] = 0.0


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32), ({"outer_step": "cautious"}, torch.float32), ({"outer_step": "momentum"}, torch.bfloat16),
        ({}, torch.float64), ({"merges_per_round": 2}, torch.float32), ({"compression": "maxmin:4"}, torch.float32),
        ({"merge_weights": "fisher-rows"}, torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_merges_go_on_from_a_model_that_all_ranks_went_back_to(options: dict[str, Any], dtype: torch.dtype) -> None:
    def run(transport: LocalTransport) -> None:
        rollback = Rollback()
        model = train(transport, options, rollback, model=make_model(dtype))
        for name, value in model.state_dict().items():
            assert torch.equal(value, rollback.best[name])

    LocalWorld(2).run(run)


def test_a_checkpoint_has_the_model_that_all_ranks_went_back_to(tmp_path: Any) -> None:
    def make() -> tuple[nn.Module, Session, Checkpointer]:
        model = make_model()
        session = Session(
            model, torch.optim.SGD(model.parameters(), lr=0.0), Config(batch_size=10, mega_batch=80, **OUTER),
            transport=LocalTransport(),
        )  # fmt: skip
        return model, session, Checkpointer(session, tmp_path)

    best = {name: value + 1 for name, value in make_model().state_dict().items()}
    model, session, checkpointer = make()
    session.records.append(lambda record: model.load_state_dict(best) if record.round == 2 else None)
    session.records.append(lambda record: checkpointer.save() if record.round == 2 else None)
    for batch in session.batches(DATA):
        with session.step(batch):
            session.optimizer.step()
    assert checkpointer.counts.written == 1
    model, session, checkpointer = make()
    assert checkpointer.resume() is not None and session.round == 3
    for batch in session.batches(DATA):
        with session.step(batch):
            session.optimizer.step()
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_parameters_that_are_put_back_change_nothing(swaps: bool, bf16: bool) -> None:
    """As an evaluation of averaged weights does, on one rank or on all."""
    dtype = torch.bfloat16 if bf16 else torch.float32

    def swap(session: Session, model: nn.Module, record: Any) -> None:
        if session.rank == 0 or swaps:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict({name: value * 0.5 for name, value in own.items()})
            model.load_state_dict(own)

    # Not on the ranks' threads, which share the random numbers.
    plain, swapped = ([make_model(dtype) for _ in range(2)] for _ in range(2))
    LocalWorld(2).run(lambda t: train(t, SAME_BITS, lambda *_: None, model=plain[t.rank]))
    LocalWorld(2).run(lambda t: train(t, SAME_BITS, swap, model=swapped[t.rank]))
    for one, other in zip(plain, swapped, strict=True):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize("agreed", [True, False])
def test_the_velocity_forgets_the_elements_that_changed(agreed: bool) -> None:
    """Such as a constraint's, which is applied after each merge."""
    model = make_model()
    flat, outer = FlatModel(model, LocalTransport()), OuterStep("nesterov", momentum=0.9)
    watch = BaseWatch(flat, outer)
    group = flat.parameter_groups[0]
    velocity = outer.velocity_of(group.weights)
    velocity.fill_(1.0)
    before = group.weights.clone()
    with torch.no_grad():
        model[2].weight.clamp_(min=0)
    clamped = torch.cat([p.detach().view(-1) for p in model.parameters()])
    assert watch.adopt_() and not watch.adopt_() and watch.checksum > 0
    assert torch.equal(group.weights, clamped) and torch.equal(velocity, (before == clamped).float())
    with torch.no_grad():
        # Before a checkpoint and after it.
        model[2].bias.fill_(3.0)
    assert watch.adopt_()
    other = watch.checksum if agreed else 0
    assert watch.settle_(np.array([watch.checksum, other], dtype=np.float64), who=None) == agreed
    if not agreed:
        assert torch.equal(group.weights, before) and (velocity == 1.0).all()
    assert watch.checksum == 0 and not watch.adopt_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_that_nobody_wrote_keep_what_their_parameter_rounds(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8, bias=False).to(dtype)
    flat, outer = FlatModel(model, LocalTransport()), OuterStep("nesterov", momentum=0.9)
    watch, weights = BaseWatch(flat, outer), flat.parameter_groups[0].weights
    with torch.no_grad():
        # As merges leave it, between the values of the parameter's dtype.
        weights.mul_(1 + torch.linspace(-1e-4, 1e-4, 64))
        flat.restore_()
        outer.velocity_of(weights).fill_(1.0)
        before = weights.clone()
        model.weight[2, 3] = 5.0
    assert watch.adopt_()
    assert (weights != before).nonzero().tolist() == [[19]] and float(weights[19]) == 5.0
    assert (outer.velocity_of(weights) == 0.0).nonzero().tolist() == [[19]]


@pytest.mark.parametrize(("changes_all", "agreed"), [(True, True), (False, True), (True, False)])
def test_what_codecs_lost_is_forgotten_if_all_parameters_change_on_all_ranks(changes_all: bool, agreed: bool) -> None:
    model = make_model()
    config = Config(compression="maxmin:4", mega_batch=80, batch_size=10, **OUTER)
    merge = Merge(model, torch.optim.SGD(model.parameters(), lr=0.1), config, LocalTransport())
    forgotten: list[bool] = []
    merge.flat_model.compressed.reset = lambda: forgotten.append(True)  # type: ignore[union-attr,method-assign]
    merge.begin_round(1)
    watch = merge._base
    assert watch is not None
    with torch.no_grad():
        for parameter in list(model.parameters())[: None if changes_all else 1]:
            parameter.add_(1.0)
    assert watch.adopt_() and not forgotten
    # Nor is it in a checkpoint of the changed model.
    merge.flat_model.compressed._exchange._memory["one"] = torch.ones(1)  # type: ignore[union-attr]
    assert ("one" in merge.state_dict()["own"]["compressed"]["exchange"]["factors"]) != changes_all
    watch.settle_(np.array([watch.checksum, watch.checksum if agreed else 0], dtype=np.float64), who=None)
    assert bool(forgotten) == (changes_all and agreed)


def test_a_loaded_state_is_not_overwritten_by_what_was_before() -> None:
    model = make_model()
    config = Config(mega_batch=80, batch_size=10, **OUTER)
    merge = Merge(model, torch.optim.SGD(model.parameters(), lr=0.1), config, LocalTransport())
    merge.begin_round(1)
    merge._within_round = False
    with torch.no_grad():
        model[0].weight.add_(1.0)
    state = copy.deepcopy(merge.state_dict())
    watch, weights = merge._base, merge.flat_model.parameter_groups[0].weights
    assert watch is not None and watch.checksum
    state["shared"]["model"]["weights"]["parameters.float32"].fill_(7.0)
    merge.load_shared(state["shared"])
    assert watch.checksum == 0 and not watch.is_whole
    assert not watch.settle_(np.array([0.0, 1.0]), who=None) and (weights == 7.0).all()


def test_a_change_on_some_ranks_is_averaged_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def spread(session: Session, model: nn.Module, record: Any) -> None:
        session.optimizer.param_groups[0]["lr"] = 0.0
        before.setdefault(session.rank, model[0].weight.detach().clone())
        if session.rank == 1 and record.round == 0:
            with torch.no_grad():
                model[0].weight.add_(1.0)

    before: dict[int, torch.Tensor] = {}
    options = {"outer_step": "none", "outer_momentum": None, "merge_weights": "uniform"}
    with caplog.at_level(logging.WARNING):
        models = LocalWorld(2).run(lambda t: train(t, {**SAME_BITS, **options}, spread))
    for model in models:
        assert torch.allclose(model[0].weight, before[0] + 0.5)
    assert [r.message for r in caplog.records if "between two rounds" in r.message] == [
        "ranks [1] changed parameters between two rounds, and the others did not, or otherwise: the merge has averaged these "
        "changes. Make them alike on all of them, in session.records, or within session.step."
    ]


def test_fragments_on_the_way_refuse_changes_between_rounds() -> None:
    with pytest.raises(RuntimeError, match="does not go with merge_fragments"):
        LocalWorld(2).run(lambda t: train(t, {"merge_fragments": 2}, Rollback()))


def test_merges_beside_steps_refuse_changes_on_some_ranks() -> None:
    def spread(session: Session, model: nn.Module, record: Any) -> None:
        if session.rank == 1 and record.round == 3:
            with torch.no_grad():
                model[0].weight.add_(1.0)

    with pytest.raises(AgreedError, match="not all alike"):
        LocalWorld(2).run(lambda t: train(t, {"merges_per_round": 2}, spread))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_rows_of_sparse_parameters_that_a_loop_changes(alike: bool, mode: str) -> None:
    rows = torch.utils.data.TensorDataset(torch.arange(480) % 20, torch.arange(480) % 2)
    expected: list[torch.Tensor] = []

    def run(transport: LocalTransport) -> torch.Tensor:
        model = nn.Embedding(40, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"sparse_merge": mode, "merge_weights": "uniform", **OUTER, **SAME_BITS}
        config = Config(batch_size=10, mega_batch=80, hash_interval=1, **options)
        session = Session(model, optimizer, config, transport=transport)

        def change(record: Any) -> None:
            # The upper half of the rows gets no gradient.
            if record.round == 2:
                optimizer.param_groups[0]["lr"] = 0.0
            if record.round == 4 and (alike or session.rank == 1):
                with torch.no_grad():
                    model.weight.fill_(7.0)
            elif record.round == 4:
                expected.append(model.weight.detach().clone())

        session.records.append(change)
        take_steps(session, model, rows)
        return model.weight.detach()

    first, second = LocalWorld(2).run(run)
    assert torch.equal(first, second)
    if alike:
        assert (first == 7.0).all()
    else:
        assert (first[20:] > expected[0][20:] + 0.5).all()
