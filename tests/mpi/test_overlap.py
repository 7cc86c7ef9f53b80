"""Overlapped merges and SMA over real ranks: known progress arrives as the formulas say, with equal bits everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import half
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, Session
from hvd_adaptive.comm import connect
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy

SIZE = 50_000
ROUNDS = 4


def progress_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 * number + rank)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def check_overlap(transport: Any) -> None:
    model = nn.Linear(SIZE, 1, bias=False).double()
    config = Config(overlap_merge=True, merge_weights="uniform", outer_step="momentum", outer_momentum=0.5)
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    expected = model.weight.detach().view(-1).clone()
    velocity = torch.zeros(SIZE, dtype=torch.float64)
    for number in range(ROUNDS):
        strategy.merge.overlap.start_round_()
        with torch.no_grad():
            model.weight += progress_of(transport.rank, number)
        strategy.end_round(RoundStats(batch_size=1, num_updates=1, num_samples=1))
        if number:
            ranks = range(transport.world_size)
            velocity = 0.5 * velocity + sum(progress_of(r, number - 1) for r in ranks) / transport.world_size
            expected = expected + velocity
        assert torch.allclose(model.weight.detach().view(-1), expected, rtol=1e-9, atol=1e-12)
        # What others exchange meanwhile does not mix with it.
        total = torch.ones(1000)
        transport.allreduce_sum_(total, name="evaluate")
        assert (total == transport.world_size).all()
    before = model.weight.detach().clone()
    strategy.drain()
    assert not torch.equal(model.weight, before)


def check_session(transport: Any, **options: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 6, dtype=torch.float64, generator=generator)
    torch.manual_seed(transport.rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    config = Config(batch_size=8, mega_batch=96, hash_interval=1, **options)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
    losses: list[float] = []
    session.records.append(lambda record: losses.append(record.loss))
    for batch in session.batches(TensorDataset(x, (x.sum(dim=1) > 0).long()), num_epochs=3):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    session._check_hash()
    # A round has few samples, and which ones each rank takes is another matter each time.
    assert sum(losses[-4:]) / 4 < 0.9 * losses[0]


@pytest.mark.mpi(2, 3, 4, timeout=300)
def test_overlap_and_sma(num_ranks: int, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    assert transport.world_size == num_ranks
    check_overlap(transport)
    for options in half([{"overlap_merge": True}, {"strategy": "sma", "outer_momentum": 0.5}], num_ranks, backend):
        check_session(transport, **options)
    transport.close()
