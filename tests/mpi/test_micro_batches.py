"""Micro-batches of one size over real ranks: equal to one rank in ``sync``, and compiled once in both strategies."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, Session
from hvd_adaptive.algorithm.ledger import epoch_order
from hvd_adaptive.algorithm.shares import integer_shares

GLOBAL_BATCH, SIZE = 24, 4
# The last global batch of an epoch has six samples: one micro-batch, and half of another.
NUM_SAMPLES = 10 * GLOBAL_BATCH + 6
_generator = torch.Generator().manual_seed(3)
X = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=_generator)
Y = (X.sum(dim=1) > 0).long()
DATA = TensorDataset(X, Y)


# Half of the targets do not count.
SOME = torch.where(torch.rand(NUM_SAMPLES, generator=_generator) < 0.5, Y, -100)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def move_shares(session: Session) -> None:
    """Other shares after every second step, as uneven as they can be, the same on every rank."""
    strategy: Any = session._strategy
    shares, generator = strategy._shares, np.random.default_rng(1)

    def choose(*_: Any, step: int = -2) -> None:
        targets = generator.exponential(size=session.world_size) ** 2
        parts = integer_shares(targets.tolist(), GLOBAL_BATCH // SIZE, lower=shares.lower // SIZE)
        shares.whole = np.array(parts, dtype=float) * SIZE
        shares._changes.append((step + 1 + shares._num_prefetched, shares.whole.astype(int).tolist()))

    choose()
    shares._due = 2
    shares.observe = choose


def loss_of(logits: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, y, reduction="mean" if reduction == "targets" else reduction)


def reference(*, reduction: str, lr: float, num_epochs: int) -> nn.Module:
    """One rank's plain loop over the same global batches."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for epoch in range(num_epochs):
        order = epoch_order(NUM_SAMPLES, seed=7, epoch=epoch)
        for first in range(0, NUM_SAMPLES, GLOBAL_BATCH):
            rows = order[first : first + GLOBAL_BATCH]
            optimizer.zero_grad()
            loss_of(model(X[rows]), SOME[rows] if reduction == "targets" else Y[rows], reduction).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


def check_equality(reduction: str, *, num_workers: int = 0, **options: Any) -> None:
    lr = 0.01 if reduction == "sum" else 0.1
    data = TensorDataset(X, SOME) if reduction == "targets" else DATA
    model = make_model()
    config = Config(
        strategy="sync", global_batch_size=GLOBAL_BATCH, mega_batch=3 * GLOBAL_BATCH, hash_interval=1, seed=7,
        micro_batch_size=SIZE, loss_reduction=reduction, **options,
    )  # fmt: skip
    session = Session(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), config)
    move_shares(session)
    shapes, passes, records, rows = set(), set(), [], []
    session.records.append(records.append)
    loader = session.loader(data, num_workers=num_workers, persistent_workers=num_workers > 0)
    for batch in itertools.chain(loader, loader) if num_workers else session.batches(data, num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            passes.add(batch.num_micro_batches)
            rows += batch.rows.tolist()
            for micro in batch.micro_batches():
                shapes.add(tuple(micro.x.shape))
                if reduction == "targets":
                    micro.num_targets = (micro.y >= 0).sum()
                loss_of(model(micro.x), micro.y, reduction).backward()
            session.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            session.optimizer.step()
    assert shapes == {(SIZE, 5)}
    assert len(passes) > 1, "the ranks' numbers of backward passes did not change"
    assert sum(record.stats["num_samples"].sum() for record in records) == 2 * NUM_SAMPLES
    everyone = sorted(row for part in session.transport.allgather_object(rows) for row in part)
    assert everyone == sorted([*range(NUM_SAMPLES)] * 2)
    theirs = reference(reduction=reduction, lr=lr, num_epochs=2)
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), (a - b).abs().max()
    session.close()


@pytest.mark.mpi(2)
def test_two_ranks_equal_one() -> None:
    check_equality("mean")


@pytest.mark.mpi(2)
def test_two_ranks_whose_workers_read_equal_one() -> None:
    """The batches of four steps are on their way when the shares change."""
    check_equality("mean", num_workers=2)


@pytest.mark.mpi(3)
def test_three_ranks_equal_one_for_a_sum() -> None:
    """With three ranks, one of them has no samples of the last global batch."""
    check_equality("sum")


@pytest.mark.mpi(3)
def test_three_ranks_equal_one_for_a_mean_over_targets() -> None:
    check_equality("targets")


@pytest.mark.mpi(2)
def test_encoded_gradients_add_up_over_micro_batches() -> None:
    """Sent as they are, by our own exchange, where Horovod's hooks do not count the passes."""
    check_equality("mean", compression="maxmin:4; *=none")


def count_compilations(*, micro_batch_size: int | None, strategy: str) -> list[int]:
    """Trains two epochs with a compiled model; returns the graphs that each rank made of it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model()
    compiled: Any = torch.compile(model, backend="eager")
    config = Config(strategy=strategy, batch_size=12, micro_batch_size=micro_batch_size, mega_batch=72)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    if strategy == "sync" and micro_batch_size is not None:
        move_shares(session)
    for batch in session.batches(DATA, num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            for micro in batch.micro_batches():
                nn.functional.cross_entropy(compiled(micro.x), micro.y).backward()
            session.optimizer.step()
    counts = session.transport.allgather_object(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    session.close()
    return counts


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", ["local", "sync"])
def test_a_compiled_model_is_compiled_once(strategy: str) -> None:
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert count_compilations(micro_batch_size=SIZE, strategy=strategy) == [1, 1]


@pytest.mark.mpi(2)
def test_without_micro_batches_it_is_compiled_again() -> None:
    """What the test above would count otherwise."""
    assert sum(count_compilations(micro_batch_size=None, strategy="local")) > 2
