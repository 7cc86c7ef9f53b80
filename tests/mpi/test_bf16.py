"""bf16 over real ranks: autocast, and parameters in bf16 under a global model in fp32, in both strategies and encoded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pairs import half
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, Session
from hvd_adaptive.comm import connect
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy


def train(transport: Any, *, autocast: bool = False, **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, 16, generator=generator)
    torch.manual_seed(transport.rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    if not autocast:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    session = Session(model, optimizer, Config(batch_size=8, mega_batch=80, hash_interval=1, **options), transport=transport)
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(TensorDataset(x, (x[:, :4].sum(dim=1) > 0).long()), num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
                logits = model(batch.x if autocast else batch.x.bfloat16())
                batch.loss = nn.functional.cross_entropy(logits.float(), batch.y)
            batch.loss.backward()
            session.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            session.optimizer.step()
    session._check_hash()
    return {"losses": [record.loss for record in records], "hash": model_hash(model), "bytes": records[-1].payload_bytes}


@pytest.mark.mpi(2, timeout=300)
@pytest.mark.parametrize("autocast", [False, True])
def test_every_strategy_trains_in_bf16(autocast: bool, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    sent = {}
    # Momentum that acts a round late would need to be lower.
    fragments = {"merge_fragments": 2, "compression": "maxmin:4", "outer_step": "none"}
    strategies: list[dict[str, dict[str, Any]]] = [
        {"local": {}, "encoded": {"compression": "bf16"}, "fragments": fragments},
        {"sync": {"strategy": "sync"}, "sync, encoded": {"strategy": "sync", "compression": "bf16"}},
    ]  # fmt: skip
    [cases] = half(strategies, int(autocast), backend)
    for name, options in cases.items():
        result = train(transport, autocast=autocast, **options)
        assert len(set(transport.allgather_object(result["hash"]))) == 1, name
        assert result["losses"][-1] < 0.75 * result["losses"][0], (name, result["losses"])
        sent[name] = result["bytes"]
    if "local" in sent:
        assert sent["encoded"] < 0.6 * sent["local"] and sent["fragments"] < 0.3 * sent["local"]
    transport.close()


@pytest.mark.mpi(2)
def test_the_global_model_keeps_what_bf16_cannot_hold(backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    model = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    config = Config(outer_step="none", merge_weights="uniform")
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    (group,) = strategy.flat_model.parameter_groups
    assert group.weights.dtype == torch.float32
    step = 2.0**-7  # the next number after 1
    for number in range(1, 5):
        with torch.no_grad():
            model.weight += step if transport.rank == 1 else 0.0
        strategy.end_round(RoundStats(batch_size=1, num_updates=1, num_samples=1))
        assert (group.weights == 1 + number * step / 2).all()
        assert (model.weight == torch.tensor(1 + number * step / 2).bfloat16()).all()
    transport.close()
