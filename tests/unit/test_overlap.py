"""Overlapped merges: every rank's progress enters the global model exactly once, one round late, with equal bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm.ledger import epoch_order
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.session.session import Session
from hvd_adaptive.strategies.local import LocalStrategy

ROUNDS = 5
_generator = torch.Generator().manual_seed(0)
X = torch.randn(300, 6, dtype=torch.float64, generator=_generator)
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())


def progress_of(rank: int, number: int) -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(50 * number + rank), dtype=torch.float64)


def drift(transport: Transport, *, drain_at: int = -1, **options: Any) -> dict[str, Any]:
    """Rounds in which rank i adds known numbers to its model; weights are 1 : 2 : 3 ..."""
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    config = Config(overlap_merge=True, merge_weights="updates", **options)
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    starts, globals_ = [], []
    for number in range(ROUNDS):
        strategy.merge.overlap.start_round_()
        starts.append(model.weight.detach().view(-1).clone())
        with torch.no_grad():
            model.weight += progress_of(transport.rank, number).view(3, 4)
        strategy.end_round(RoundStats(batch_size=1, num_updates=1.0 + transport.rank, num_samples=1))
        globals_.append(model.weight.detach().view(-1).clone())
        if number == drain_at:
            strategy.drain()
            globals_[-1] = model.weight.detach().view(-1).clone()
    strategy.drain()
    return {"starts": starts, "globals": globals_, "final": model.weight.detach().view(-1).clone()}


def expected(world_size: int, *, outer_step: str, outer_bias_correction: bool = False) -> tuple[list[Tensor], Tensor]:
    """The global model after each round, which lacks that round's progress, and the last one."""
    weight = np.arange(1, world_size + 1) / np.arange(1, world_size + 1).sum()
    values = [torch.ones(12, dtype=torch.float64)]
    velocity = torch.zeros(12, dtype=torch.float64)
    for number in range(ROUNDS):
        total = sum(w * progress_of(rank, number) for rank, w in enumerate(weight))
        if outer_step == "none":
            move = total
        else:
            velocity = 0.9 * velocity + total
            move = 0.7 * (total + 0.9 * velocity)
        if outer_bias_correction:
            move = move / (1 - 0.9 ** (number + 2))
        values.append(values[-1] + move)
    return values[:-1], values[-1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("outer_step", "corrected"), [("none", False), ("nesterov", False), ("nesterov", True)])
def test_all_progress_is_merged_once_and_a_round_late(world_size: int, outer_step: str, corrected: bool) -> None:
    options: dict[str, Any] = {"outer_step": outer_step, "outer_bias_correction": corrected}
    results = LocalWorld(world_size).run(lambda t: drift(t, **options))
    globals_, final = expected(world_size, **options)
    for rank, result in enumerate(results):
        for number in range(ROUNDS):
            assert torch.allclose(result["globals"][number], globals_[number], rtol=1e-12)
            assert torch.equal(result["globals"][number], results[0]["globals"][number])
        for number in range(1, ROUNDS):
            # A rank keeps its own latest progress.
            start = globals_[number - 1] + progress_of(rank, number - 1)
            assert torch.allclose(result["starts"][number], start, rtol=1e-12)
        assert torch.allclose(result["final"], final, rtol=1e-12)
        assert torch.equal(result["final"], results[0]["final"])


@pytest.mark.parametrize("drain_at", range(ROUNDS))
def test_a_drain_between_rounds_changes_no_sum(drain_at: int) -> None:
    results = LocalWorld(2).run(lambda t: drift(t, outer_step="none", drain_at=drain_at))
    plain, final = expected(2, outer_step="none")
    for result in results:
        assert torch.allclose(result["globals"][drain_at], [*plain[1:], final][drain_at], rtol=1e-12)
        if drain_at + 1 < ROUNDS:
            assert torch.equal(result["starts"][drain_at + 1], result["globals"][drain_at])
        assert torch.allclose(result["final"], final, rtol=1e-12)


def train(
    transport: Transport,
    config: Config,
    *,
    on_batch: Callable[[Session, Any], None] = lambda session, batch: None,
    normalize: bool = True,
) -> dict[str, Any]:
    # Threads share torch's own generator; rank 0's weights count.
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8) if normalize else nn.Identity(), nn.ReLU(), nn.Linear(8, 2)]
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    with torch.no_grad():
        model[0].weight.copy_(X[:8])
        model[3].weight.copy_(X[:2, :4].repeat(1, 2))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
    records: list[Any] = []
    hashes: list[str] = []
    session.records += [records.append, lambda _: hashes.append(model_hash(model))]
    for batch in session.batches(DATA, num_epochs=3):
        on_batch(session, batch)
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    last = model_hash(model)
    session.close()
    return {"model": model, "records": records, "hashes": [*hashes, last], "session": session}


def test_one_rank_without_outer_step_is_plain_sgd() -> None:
    config = Config(batch_size=20, mega_batch=100, outer_step="none", seed=5, overlap_merge=True)
    ours = LocalWorld(1).run(lambda t: train(t, config, normalize=False))[0]["model"]
    model = nn.Sequential(nn.Linear(6, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 2)).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    with torch.no_grad():
        model[0].weight.copy_(X[:8])
        model[3].weight.copy_(X[:2, :4].repeat(1, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for rows in np.split(epoch_order(300, seed=5, epoch=epoch), 15):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), DATA.tensors[1][rows]).backward()
            sgd.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, rtol=1e-9), name


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_after_every_round_and_at_the_end(world_size: int) -> None:
    config = Config(batch_size=10, mega_batch=60, hash_interval=1, overlap_merge=True)
    results = LocalWorld(world_size).run(lambda t: train(t, config))
    assert all(result["hashes"] == results[0]["hashes"] for result in results)
    # The first round's progress is still on the way when it ends, the last one's has arrived.
    assert len(set(results[0]["hashes"])) == len(results[0]["hashes"]) == 16
    losses = [record.loss for record in results[0]["records"]]
    # Of one round's samples it may be any; so the last four.
    assert np.mean(losses[-4:]) < 0.9 * losses[0]


def test_a_rank_that_is_not_finite_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    def poison(session: Session, batch: Any) -> None:
        if session.rank == 1 and session.round == 2:
            with torch.no_grad():
                session.model[0].weight[0, 0] = float("nan")

    # With a shared cursor, the other rank might take a whole round.
    config = Config(batch_size=10, mega_batch=60, hash_interval=1, overlap_merge=True, dispatch="equal")
    results = LocalWorld(2).run(lambda t: train(t, config, on_batch=poison))
    assert results[0]["hashes"] == results[1]["hashes"]
    assert "ranks [1] had NaN or Inf" in caplog.text
    weights = [record.weight for record in results[0]["records"]]
    assert weights[2].tolist() == [1.0, 0.0] and weights[4][1] > 0
    assert all(torch.isfinite(p).all() for p in results[1]["model"].parameters())


def test_memory_is_one_copy_more() -> None:
    session = LocalWorld(1).run(lambda t: train(t, Config(overlap_merge=True, outer_step="nesterov")))[0]["session"]
    strategy = session._strategy
    held = [t for g in strategy.flat_model.parameter_groups for t in (g.weights, g.delta)]
    held += [*strategy.merge.outer.velocity.values(), *(piece.ahead for piece in strategy.merge.overlap._pieces)]
    assert sum(t.numel() for t in held) == 4 * sum(p.numel() for p in session.model.parameters())


@pytest.mark.parametrize("options", [{"sparse_merge": "always"}])
def test_rows_do_not_overlap(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="overlap_merge exchanges all rows"):
        Config(overlap_merge=True, **options)
