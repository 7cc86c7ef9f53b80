"""CROSSBOW's SMA against its formula, restarts, and whole sessions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import BatchSource
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.research.sma import SmaStrategy
from hvd_adaptive.session.session import Session

ROUNDS = 5
_generator = torch.Generator().manual_seed(0)
X = torch.randn(300, 6, dtype=torch.float64, generator=_generator)
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())


def progress_of(rank: int, number: int) -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(50 * number + rank), dtype=torch.float64)


def drift(
    transport: Transport,
    change: Callable[[int, int, SmaStrategy, nn.Linear], None] = lambda rank, number, strategy, model: None,
    **options: Any,
) -> dict[str, Any]:
    """Rounds in which rank i adds known numbers to its replica."""
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    config = Config(strategy="sma", **options)
    strategy = SmaStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    source = BatchSource(DATA, torch.device("cpu"))
    starts, centres = [], []
    for number in range(ROUNDS):
        stats = RoundStats(batch_size=1, num_updates=1, num_samples=1)
        batches = strategy.round_batches(
            torch.arange(8).numpy(), work=None, source=source, round_id=number, stats=stats
        )
        next(batches)
        starts.append(model.weight.detach().view(-1).clone())
        with torch.no_grad():
            model.weight += progress_of(transport.rank, number).view(3, 4)
        change(transport.rank, number, strategy, model)
        stats.lr = strategy.optimizer.param_groups[0]["lr"]
        _, weight, _ = strategy.end_round(stats)
        centres.append(model.weight.detach().view(-1).clone())
    return {"starts": starts, "centres": centres, "weight": weight}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("alpha", [None, 0.3])
def test_it_is_the_papers_rule(world_size: int, alpha: float | None) -> None:
    results = LocalWorld(world_size).run(lambda t: drift(t, sma_alpha=alpha, outer_momentum=0.9))
    pull = alpha or 1 / world_size
    z = previous = torch.ones(12, dtype=torch.float64)
    replicas = [z.clone() for _ in range(world_size)]
    for number in range(ROUNDS):
        corrections = []
        for rank, w in enumerate(replicas):
            assert torch.allclose(results[rank]["starts"][number], w, rtol=1e-12)
            w += progress_of(rank, number)
            corrections.append(pull * (w - z))
            w -= corrections[-1]
        z, previous = z + sum(corrections) + 0.9 * (z - previous), z
        for result in results:
            assert torch.allclose(result["centres"][number], z, rtol=1e-12)
            assert torch.equal(result["centres"][number], results[0]["centres"][number])
            assert result["weight"].tolist() == [pull] * world_size


def test_a_lower_learning_rate_starts_all_replicas_again() -> None:
    def lower(rank: int, number: int, strategy: SmaStrategy, model: nn.Linear) -> None:
        if number == 2:
            strategy.optimizer.param_groups[0]["lr"] = 0.01

    results = LocalWorld(2).run(lambda t: drift(t, lower))
    for result in results:
        assert torch.equal(result["starts"][3], result["centres"][2])
        assert not torch.equal(result["starts"][2], result["centres"][1])
        # Without a velocity left over: the average moves by the corrections alone.
        change = sum(progress_of(rank, 3) for rank in range(2)) / 2
        assert torch.allclose(result["centres"][3] - result["centres"][2], change, rtol=1e-9)


def test_a_learning_rate_that_falls_slowly_starts_replicas_again_at_each_half() -> None:
    def lower(rank: int, number: int, strategy: SmaStrategy, model: nn.Linear) -> None:
        strategy.optimizer.param_groups[0]["lr"] = 0.1 * 0.7**number

    for result in LocalWorld(2).run(lambda t: drift(t, lower)):
        again = [torch.equal(start, centre) for start, centre in zip(result["starts"][1:], result["centres"], strict=False)]
        assert again == [False, False, True, False]


def train(
    transport: Transport,
    config: Config,
    *,
    lose: Callable[[int, int], bool] = lambda rank, round_number: False,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> dict[str, list[list[float]]]:
    """Three epochs of 15 rounds: which replicas were finite after each, and whether all started again.

    Args:
        transport: the world.
        config: with rounds of 20 samples.
        lose: whether a rank's losses of a round are NaN.
        schedule: makes a scheduler that steps with every batch.
    """
    model = nn.Linear(6, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = None if schedule is None else schedule(optimizer)
    session = Session(model, optimizer, config, transport=transport)
    finite: list[list[float]] = []
    again: list[bool] = []
    session.records.append(lambda record: finite.append(record.stats["finite"].tolist()))
    session.records.append(lambda record: again.append(session._strategy._replica is None))
    for batch in session.batches(DATA, num_epochs=3):
        with session.step(batch):
            session.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            (loss * (float("nan") if lose(transport.rank, session.round) else 1.0)).backward()
            session.optimizer.step()
        if scheduler is not None:
            scheduler.step()
    session.close()
    return {"finite": finite, "again": again}


def test_momentum_that_is_not_finite_breaks_one_round_and_a_rank_that_stays_broken_ends_the_job() -> None:
    config = Config(strategy="sma", batch_size=10, mega_batch=20)
    once = LocalWorld(2).run(lambda t: train(t, config, lose=lambda rank, number: rank == 1 and number == 4))[0]
    assert [number for number, finite in enumerate(once["finite"]) if finite != [1.0, 1.0]] == [4]
    with pytest.raises(AgreedError, match=r"replicas \[1\] had NaN or Inf in their parameters in 10 rounds in a row"):
        LocalWorld(2).run(lambda t: train(t, config, lose=lambda rank, number: rank == 1))


def test_schedules_and_decays_start_replicas_again_at_each_half() -> None:
    """A scheduler that steps with every batch has lowered the rate in every round."""
    steps = 3 * 15
    cosine = LocalWorld(2).run(
        lambda t: train(
            t,
            Config(strategy="sma", batch_size=10, mega_batch=20),
            schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.02),
        )
    )[0]["again"]
    assert sum(cosine) == 2 and cosine.index(True) > steps // 3
    decay = Config(strategy="sma", batch_size=10, mega_batch=20, lr_decay=1.0)
    # Rates of 1, 1/2 and 1/3.
    assert [n for n, again in enumerate(LocalWorld(2).run(lambda t: train(t, decay))[0]["again"]) if again] == [15]


def test_a_replica_that_is_not_finite_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    def poison(rank: int, number: int, strategy: SmaStrategy, model: nn.Linear) -> None:
        if rank == 1 and number == 1:
            model.weight.data[0, 0] = float("inf")

    results = LocalWorld(2).run(lambda t: drift(t, poison))
    assert "replicas [1] had NaN or Inf" in caplog.text
    assert torch.equal(results[1]["starts"][2], results[0]["centres"][1])
    assert all(centre.isfinite().all() for centre in results[0]["centres"])
    with pytest.raises(AgreedError, match="ALL ranks hold NaN"):
        LocalWorld(2).run(lambda t: drift(t, lambda r, n, s, model: model.weight.data.fill_(float("nan"))))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_session_trains_with_equal_shares_and_agrees(world_size: int) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()

    def run(transport: Transport) -> dict[str, Any]:
        # A copy: ranks that draw at the same time would draw from one generator.
        model = copy.deepcopy(first)
        config = Config(strategy="sma", batch_size=10, mega_batch=60, hash_interval=1, outer_momentum=0.5)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        records: list[Any] = []
        hashes: list[str] = []
        session.records += [records.append, lambda _: hashes.append(model_hash(model))]
        for batch in session.batches(DATA, num_epochs=3):
            with session.step(batch):
                session.optimizer.zero_grad()
                batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
                batch.loss.backward()
                session.optimizer.step()
        session.close()
        return {"records": records, "hashes": hashes}

    results = LocalWorld(world_size).run(run)
    assert all(result["hashes"] == results[0]["hashes"] for result in results)
    records = results[0]["records"]
    for record in records:
        assert record.stats["num_samples"].tolist() == [60 / world_size] * world_size
    assert records[-1].loss < 0.8 * records[0].loss


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_the_last_batch_of_an_epoch_is_padded(world_size: int) -> None:
    """Rounds of about 70 of 275 samples: a global batch of 20 or 30 divides neither."""
    data = TensorDataset(*(tensor[:275] for tensor in DATA.tensors))

    def run(transport: Transport) -> list[float]:
        model = nn.Linear(6, 2).double()
        config = Config(strategy="sma", batch_size=10, mega_batch=70)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        computed: list[float] = []
        session.records.append(lambda record: computed.append(float(record.stats["num_samples"].sum())))
        for batch in session.batches(data, num_epochs=2):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
        session.close()
        return computed

    computed = LocalWorld(world_size).run(run)[0]
    unit = 10 * world_size
    assert all(samples % unit == 0 for samples in computed)
    assert sum(computed) == 2 * -(-len(data) // unit) * unit
