"""Logical ranks over simulated ranks: the same bits for any number of them. Randomness is tested on real ranks, as simulated
ones share a process's generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session.session import Session
from hvd_adaptive.state.random_state import random_state, seeded_random_state, set_random_state

_generator = torch.Generator().manual_seed(0)
X = torch.randn(500, 6, generator=_generator)
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(
    transport: LocalTransport,
    config: Config,
    *,
    optimizer: str = "momentum",
    num_epochs: float = 2,
    work: np.ndarray | None = None,
    dtype: torch.dtype = torch.float32,
    accumulate: bool = False,
    before: Callable[[Session], None] = lambda session: None,
    on_batch: Callable[[Session, Any], None] = lambda session, batch: None,
) -> dict[str, Any]:
    # A copy: simulated ranks that draw at the same time would draw from one generator.
    model = copy.deepcopy(MODEL)
    if work is not None:
        # A heavy row can be a batch alone, which batch normalization refuses.
        model[1] = nn.LayerNorm(8)
    model.to(dtype)
    session = Session(model, OPTIMIZERS[optimizer](model.parameters()), config, transport=transport)
    before(session)
    hashes: list[str] = []
    records: list[Any] = []
    session.records += [lambda _: hashes.append(model_hash(model)), records.append]
    rows = []
    for batch in session.batches(DATA, num_epochs=num_epochs, work=work):
        rows.append(batch.rows)
        on_batch(session, batch)
        with session.step(batch):
            nn.functional.cross_entropy(model(batch.x.to(dtype)), batch.y).backward()
            if not accumulate or batch.rows[0] % 2:
                session.optimizer.step()
                session.optimizer.zero_grad()
    session.close()
    return {"session": session, "model": model, "hashes": hashes, "rows": rows, "records": records}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"merge_weights": "samples", "outer_step": "momentum", "optimizer_state": "reset"},
        {"work": "nonzeros", "merge_weights": "heterogpu", "perturbation": True, "perturbation_threshold": 9.0},
    ],
    ids=["default", "samples", "nonzeros"],
)
def test_the_same_bits_for_any_number_of_ranks(optimizer: str, options: dict[str, Any]) -> None:
    config = Config(logical_ranks=5, batch_size=16, mega_batch=240, **options)
    work = np.random.default_rng(0).integers(0, 50, len(DATA)) if config.work == "nonzeros" else None
    alone = LocalWorld(1).run(lambda t: train(t, config, optimizer=optimizer, work=work))[0]
    assert len(set(alone["hashes"])) == len(alone["hashes"]) == 4
    # Every optimizer, and all options, with all of these.
    turn = list(OPTIMIZERS).index(optimizer) + bool(options) + (work is not None)
    for world_size in ((2, 5), (3, 4))[turn % 2]:
        results = LocalWorld(world_size).run(lambda t: train(t, config, optimizer=optimizer, work=work))
        consumed = np.concatenate([rows for result in results for rows in result["rows"]])
        assert np.array_equal(np.bincount(consumed, minlength=len(DATA)), np.full(len(DATA), 2))
        for result in results:
            assert result["hashes"] == alone["hashes"], world_size
        for one, many in zip(alone["records"], results[0]["records"], strict=True):
            assert many.weight.shape == (world_size,)
            assert many.weight.sum() == pytest.approx(one.weight.sum(), rel=1e-12)


def test_rounds_of_few_data_are_as_long_for_any_number_of_ranks() -> None:
    """Where no mega-batch is set, a round has a batch of each logical rank at least."""
    config = Config(logical_ranks=4, batch_size=32)
    results = [LocalWorld(world_size).run(lambda t: train(t, config, num_epochs=1))[0] for world_size in (1, 2, 4)]
    assert [record.num_samples for record in results[0]["records"]] == [125, 250, 375, 500]
    assert results[0]["hashes"] == results[1]["hashes"] == results[2]["hashes"]


def test_sums_in_double_precision_and_left_over_gradients() -> None:
    # In float64 the order of the additions shows; steps on some batches only leave gradients over.
    config = Config(logical_ranks=4, batch_size=25, mega_batch=500)
    hashes = {
        tuple(result["hashes"])
        for world_size in (1, 2, 4)
        for result in LocalWorld(world_size).run(
            lambda t: train(t, config, dtype=torch.float64, accumulate=True)
        )
    }
    assert len(hashes) == 1


def test_one_logical_rank_is_strategy_local_on_one_rank() -> None:
    results = [
        LocalWorld(1).run(lambda t: train(t, Config(batch_size=16, mega_batch=240, logical_ranks=v, num_threads=1)))[0]  # noqa: B023
        for v in (None, 1)
    ]
    assert results[0]["hashes"] == results[1]["hashes"]


def test_other_logical_ranks_are_another_run() -> None:
    hashes = [
        LocalWorld(1).run(lambda t: train(t, Config(batch_size=16, mega_batch=240, logical_ranks=v, num_threads=1)))[0]["hashes"]  # noqa: B023
        for v in (2, 3)
    ]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("ranks", [(1, 3), (4, 2), (3, 4)])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_saved_states_go_on_at_another_number_of_ranks(ranks: tuple[int, int], optimizer: str) -> None:
    # Without an outer step the model and the logical ranks' states are all that there is.
    config = Config(logical_ranks=4, batch_size=16, mega_batch=240, outer_step="none")
    whole = LocalWorld(1).run(lambda t: train(t, config, optimizer=optimizer))[0]
    first = LocalWorld(ranks[0]).run(lambda t: train(t, config, optimizer=optimizer, num_epochs=1))
    joined: dict[str, Any] = {}
    for result in first:
        joined |= result["session"]._strategy.logical_states()
    assert sorted(joined) == ["0", "1", "2", "3"]

    def resume(session: Session) -> None:
        session.model.load_state_dict(first[0]["model"].state_dict())
        for group in session._strategy._groups:
            for tensor, weights in zip(group.tensors, group.slices(group.weights), strict=True):
                weights.copy_(tensor)
        session.ledger, session.round = first[0]["session"].ledger, first[0]["session"].round
        session._strategy.load_logical_states(joined)

    for result in LocalWorld(ranks[1]).run(lambda t: train(t, config, optimizer=optimizer, before=resume)):
        assert first[0]["hashes"] + result["hashes"] == whole["hashes"]
    del joined["0"]
    with pytest.raises(ValueError, match="must hold logical rank 0, got"):
        whole["session"]._strategy.load_logical_states(joined)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_state_is_where_its_parameters_are(fused: bool) -> None:
    """A checkpoint is on the processor, parameters perhaps not. As with torch, Adam's count stays there unless it is fused."""
    config = Config(logical_ranks=2, batch_size=16, mega_batch=240)
    strategy = LocalWorld(1).run(lambda t: train(t, config, optimizer="adam", num_epochs=1))[0]["session"]._strategy
    states = strategy.logical_states()
    strategy._parameters = [p.to("meta") for p in strategy._parameters]
    strategy.optimizer.param_groups[0]["fused"] = fused
    strategy.load_logical_states(states)
    for logical in strategy._own.values():
        assert len(logical.optimizer) == len(strategy._parameters)
        for entries in logical.optimizer.values():
            assert {name: value.is_meta for name, value in entries.items()} == {
                "step": fused, "exp_avg": True, "exp_avg_sq": True
            }  # fmt: skip


def test_a_logical_rank_that_is_not_finite_contributes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def poison(session: Session, batch: Any) -> None:
        # The samples tell which logical rank this is, whoever plays it.
        if 77 in batch.rows and session.round == 0:
            seen.append(session.rank)
            with torch.no_grad():
                session.model[0].weight[0, 0] = float("nan")

    config = Config(logical_ranks=4, batch_size=16, mega_batch=500, outer_step="none")
    hashes = set()
    for world_size in (1, 3):
        results = LocalWorld(world_size).run(lambda t: train(t, config, on_batch=poison))
        hashes |= {tuple(result["hashes"]) for result in results}
        assert all(torch.isfinite(p).all() for p in results[0]["model"].parameters())
    assert len(hashes) == 1 and len(seen) == 2
    assert caplog.text.count("had NaN or Inf") == 2


def test_lbfgs_begins_again_at_each_merge() -> None:
    """Its history is of another model, as on real ranks."""

    def run(transport: LocalTransport) -> list[int]:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        session = Session(model, optimizer, Config(logical_ranks=2, batch_size=50, mega_batch=250), transport=transport)
        num_before: dict[int, int] = {}
        for batch in session.batches(DATA):

            def loss(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                value = nn.functional.cross_entropy(model(batch.x), batch.y)
                value.backward()
                return value

            num_before.setdefault(session.round, optimizer.state[model.weight].get("n_iter", 0))
            with session.step(batch):
                optimizer.step(loss)
        session.close()
        return list(num_before.values())

    assert LocalWorld(1).run(run) == [[0, 0]]


def test_more_ranks_than_logical_ranks_are_refused() -> None:
    with pytest.raises(AgreedError, match=r"logical_ranks must be >= the number of ranks, got 2 < 3"):
        LocalWorld(3).run(lambda t: train(t, Config(logical_ranks=2)))


@pytest.mark.parametrize(
    "options",
    [{"strategy": "horovod"}, {"batch_size_rule": "paper"}, {"optimizer_state": "average"}],
    ids=lambda options: next(iter(options)),
)
def test_what_depends_on_the_ranks_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"logical_ranks needs {next(iter(options))}"):
        Config(logical_ranks=2, **options)  # type: ignore[arg-type]


def test_random_states_are_independent_and_come_back() -> None:
    cpu = torch.device("cpu")

    def draw() -> list[float]:
        return [float(torch.rand(1)), float(np.random.rand()), random.random(), random.gauss(0, 1)]

    outside = random_state(cpu)
    before = draw()
    set_random_state(seeded_random_state((0, 1), cpu), cpu)
    ours = draw()
    kept = random_state(cpu)
    later = draw()
    for seed, number in ((0, 2), (1, 1)):
        set_random_state(seeded_random_state((seed, number), cpu), cpu)
        assert all(a != b for a, b in zip(draw(), ours, strict=True))
    set_random_state(kept, cpu)
    assert draw() == later
    set_random_state(seeded_random_state((0, 1), cpu), cpu)
    assert draw() == ours
    set_random_state(outside, cpu)
    assert draw() == before
