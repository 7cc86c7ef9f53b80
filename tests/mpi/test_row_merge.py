"""Merging only touched rows over real ranks: as the dense merge, with another number of rows every round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import half
from torch import nn

from hvd_adaptive import Config
from hvd_adaptive.comm import connect
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy

NUM_ROWS = 5000


def train(transport: Any, **options: Any) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(NUM_ROWS, 8, mode="sum", sparse=True), nn.Linear(8, 5))
    config = Config(**{"merge_weights": "updates", **options})
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.05), config, transport)
    models, rows = [], []
    for number in range(6):
        generator = torch.Generator().manual_seed(100 * number + transport.rank)
        strategy._round = number
        num_steps = 1 + transport.rank
        for _ in range(num_steps):
            strategy.optimizer.zero_grad()
            x = torch.randint(0, 50 * (number + 1), (16, 7), generator=generator)
            model(x).square().mean().backward()
            strategy.optimizer.step()
        stats = RoundStats(batch_size=16, num_updates=num_steps, num_samples=16 * num_steps)
        strategy.end_round(stats)
        models.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        rows.append(stats.merge_rows)
    return models, rows


@pytest.mark.mpi(1, 2, 3, 4, timeout=300)
def test_touched_rows_merge_as_all_rows(num_ranks: int, backend: str) -> None:
    from mpi4py import MPI

    transport = connect(stall_limit_s=60, backend=backend)
    assert transport.world_size == num_ranks
    ways: list[dict[str, Any]] = [{}, {"merge_weights": "fisher-rows"}, {"merge_weights": "fisher-rows", "outer_step": "none"}]
    for options in half(ways, num_ranks, backend):
        dense, _ = train(transport, sparse_merge="never", **options)
        sparse, rows = train(transport, sparse_merge="always", **options)
        automatic, _ = train(transport, sparse_merge="auto", **options)
        assert len(set(rows)) > 3 and min(rows) > 0 and max(rows) < 301
        for ours in (sparse, automatic):
            for number, (a, b) in enumerate(zip(ours, dense, strict=True)):
                # Three and more numbers are added in another order when the message has another length.
                assert torch.equal(a, b) if num_ranks < 3 else torch.allclose(a, b, rtol=1e-4, atol=1e-6), number
                assert all(torch.equal(a, other) for other in MPI.COMM_WORLD.allgather(a))
    transport.close()
