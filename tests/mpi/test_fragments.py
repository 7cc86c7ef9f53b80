"""Merges in fragments over real ranks: the formula, equal bits at the end, unequal speeds, codecs, a rank that is not finite."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from pairs import half
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, Session
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.engine import model_fragments
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy

WIDTH = 100
STEPS = 6
NUM_SAMPLES = 480


def make_model() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def progress_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 * number + rank)
    return torch.randn(4, WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def check_known_progress(transport: Any, **options: Any) -> None:
    """Rank i's steps count as 1 + i updates, and add known numbers; ranks come to the phases at different times."""
    model = make_model()
    start = flat(model)
    config = Config(merge_weights="updates", outer_step="none", **options)
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    work = 1.0 + transport.rank
    for number in range(3):
        strategy.merge.begin_round(config.merges_per_round or 1)
        overlap = strategy.merge.overlap
        assert overlap is not None
        overlap.start_round_(work=50.0, merges=config.merges_per_round or 1)
        for step in range(STEPS):
            overlap.reach_(step / STEPS, step * work, step * work)
            with torch.no_grad():
                for p, part in zip(model.parameters(), progress_of(transport.rank, number * STEPS + step), strict=True):
                    p += part
        overlap.reach_(1.0, STEPS * work, STEPS * work)
        strategy.end_round(RoundStats(batch_size=1, num_updates=STEPS * work, num_samples=1))
        assert len(set(transport.allgather_object(model_hash(model)))) == 1
    strategy.drain()
    ranks = range(transport.world_size)
    total = sum(1.0 + rank for rank in ranks)
    moved = sum((1.0 + rank) / total * progress_of(rank, n).view(-1) for rank in ranks for n in range(3 * STEPS))
    assert torch.allclose(flat(model), start + moved, rtol=1e-9, atol=1e-9)
    assert len(set(transport.allgather_object(model_hash(model)))) == 1


def check_session(transport: Any, *, poison: bool = False, stop_at: int = 0, state: Any = None, **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 6, dtype=torch.float64, generator=generator)
    torch.manual_seed(transport.rank)
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    session = Session(model, optimizer, Config(batch_size=8, mega_batch=160, hash_interval=1, **options), transport=transport)
    if state is not None:
        session.load_state_dict(state)
    records: list[Any] = []
    kept: list[Any] = []
    poisoned = False

    def keep(record: Any) -> None:
        records.append(record)
        if session.round == stop_at:
            kept.append(copy.deepcopy(session.state_dict()))
            session.stop(agreed=True)

    session.records.append(keep)
    for batch in session.batches(TensorDataset(x, (x.sum(dim=1) > 0).long()), num_epochs=3):
        with session.step(batch):
            if poison and not poisoned and session.rank == 1 and session.round == 2:
                batch.x[0, 0], poisoned = float("nan"), True
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    session._check_hash()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return {"records": records, "hash": model_hash(model), "state": kept[0] if kept else None, "session": session}


@pytest.mark.mpi(1, 2, 3, 4, timeout=300)
def test_progress_is_merged_once_and_sessions_learn(num_ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small models are merged whole beside steps.
    monkeypatch.setattr(model_fragments, "_LEAST_BESIDE_STEPS", 1)
    transport = connect(stall_limit_s=60, backend=backend)
    assert transport.world_size == num_ranks
    known: list[dict[str, Any]] = [{"merge_fragments": 2}, {"merge_fragments": 4, "fragment_delay": 0.6, "fragment_alpha": 0.0}]
    known += [{"merges_per_round": 3}, {"merges_per_round": 2}]
    for options in half(known, num_ranks, backend):
        check_known_progress(transport, **options)
    slowdown = ",".join(["3", *["1"] * (num_ranks - 1)])
    sessions: list[dict[str, Any]] = [
        {"merge_fragments": 2, "slowdown": slowdown},
        {"merge_fragments": 3, "slowdown": slowdown, "compression": "maxmin:4", "fragment_delay": 0.5, "fragment_alpha": 0.0},
        {"merge_fragments": 2, "fragment_delay": 0.0, "outer_step": "nesterov", "outer_momentum": 0.5},
        {"merges_per_round": 4, "slowdown": slowdown},
        {"merges_per_round": 2, "slowdown": slowdown, "compression": "maxmin:4"},
    ]
    for options in half(sessions, num_ranks, backend):
        records = check_session(transport, **options)["records"]
        last_epoch = [record.loss for record in records[-len(records) // 3 :]]
        assert sum(last_epoch) / len(last_epoch) < 0.7 * records[0].loss, options
    if num_ranks > 1:
        # Whoever is free takes the next batch.
        samples = sum(record.stats["num_samples"] for record in records)
        assert (samples > 0).all() and samples.sum() == 3 * NUM_SAMPLES
    transport.close()


@pytest.mark.mpi(2, timeout=200)
def test_a_rank_that_is_not_finite_and_all_of_them(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    with caplog.at_level(logging.WARNING):
        check_session(transport, poison=True, merge_fragments=2, dispatch="equal")
    if transport.rank == 0:
        assert caplog.text.count("ranks [1] had NaN or Inf") == 1
    model = make_model()
    config = Config(merge_fragments=2, outer_step="none")
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    overlap = strategy.merge.overlap
    assert overlap is not None
    overlap.start_round_(work=4.0)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(AgreedError, match="ALL ranks hold NaN"):
        overlap.reach_(1.0, 2.0)
    transport.close()


@pytest.mark.mpi(2, timeout=200)
def test_a_resume_with_fragments_on_the_way_has_the_same_bits(backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend, repeatable=True)
    options = {"merge_fragments": 3, "fragment_delay": 0.5, "dispatch": "equal", "compression": "maxmin:4"}
    whole = check_session(transport, stop_at=8, **options)
    first = check_session(transport, stop_at=4, **options)
    second = check_session(transport, stop_at=8, state=first["state"], **options)
    assert second["hash"] == whole["hash"] != first["hash"]
    transport.close()


@pytest.mark.mpi(2, timeout=200)
@pytest.mark.parametrize("options", [{}, {"merge_fragments": 2}, {"merges_per_round": 2}], ids=str)
def test_a_rank_that_is_never_finite_ends_the_job_on_all(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    config = Config(batch_size=8, mega_batch=64, dispatch="equal", **options)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    x = torch.randn(640, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(AgreedError, match=r"^ranks \[1\] had NaN or Inf in their parameters in 10 rounds in a row"):  # noqa: PT012
        for batch in session.batches(TensorDataset(x, (x.sum(dim=1) > 0).long()), num_epochs=3):
            with session.step(batch):
                session.optimizer.zero_grad()
                # Rank 1 has one good round at first: what counts is in a row.
                broken = session.rank == 1 and session.round != 3
                (nn.functional.cross_entropy(model(batch.x), batch.y) * (float("nan") if broken else 1.0)).backward()
                session.optimizer.step()
    assert session.round == 13
    session.transport.close()
