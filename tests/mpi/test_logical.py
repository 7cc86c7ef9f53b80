"""Logical ranks over real ranks: the bits of one process at 1, 2, 3 and 4 of them, in a loop of one's own and in the command."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import read_run
from torch import nn

from hvd_adaptive import Config, Session
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.engine.flat_model import model_hash


class Noisy:
    """Draws from all three global generators; the model's dropout does, too."""

    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        noise = torch.randn(6) + np.random.randn() + random.gauss(0, 1)
        return self.x[row] + 0.1 * noise, (self.x[row].sum() > 0).long()


def hashes_of_rounds(transport: Any) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = Config(batch_size=8, mega_batch=100, logical_ranks=4)
    session = Session(model, optimizer, config, transport=transport)
    # What the ranks themselves draw must not matter.
    torch.manual_seed(session.rank), np.random.seed(session.rank), random.seed(session.rank)
    hashes: list[str] = []
    session.records.append(lambda record: hashes.append(model_hash(model)))
    for batch in session.batches(Noisy(), num_epochs=2):
        with session.step(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
    session.close()
    return hashes


@pytest.mark.mpi(1, 2, 3, 4)
def test_random_states_buffers_and_optimizers_are_a_logical_ranks_own(num_ranks: int) -> None:
    from mpi4py import MPI

    hashes = hashes_of_rounds(None)
    assert len(set(hashes)) == 6
    alone = hashes_of_rounds(LocalTransport()) if MPI.COMM_WORLD.Get_rank() == 0 else None
    assert hashes == MPI.COMM_WORLD.bcast(alone)


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize(
    "options",
    [
        ["--input-gradients", "dense", "--optimizer", "momentum", "--lr", "0.5"],
        ["--optimizer", "adagrad", "--lr", "0.05", "--work", "nonzeros"],
    ],
    ids=["sgd-momentum-dense", "adagrad-sparse"],
)
def test_the_command_gives_one_model_at_any_number_of_ranks(
    train: Any, shared_tmp_path: Path, num_ranks: int, options: list[str]
) -> None:
    from mpi4py import MPI

    limits = ["--logical-ranks", "4", "--epochs", "1.5", "--hidden-size", "16", "--batch-size", "32", "--mega-batch", "1000"]
    ranks, alone = (train(*limits, *options, "--eval-rounds", "0", out=out, alone=out == "alone") for out in ("ranks", "alone"))
    if MPI.COMM_WORLD.Get_rank() == 0:
        for answer in (ranks, alone):
            assert "4 logical ranks" in answer.stderr and "adaptivity is off" in answer.stderr, answer
    (ours, _), (theirs, _) = (read_run(shared_tmp_path / name) for name in ("ranks", "alone"))
    assert (ours["world_size"], theirs["world_size"]) == (num_ranks, 1)
    assert ours["model_hash"] == theirs["model_hash"] and ours["final"] == theirs["final"]
    assert ours["ranks_agreed"] and ours["rounds"] > 1


@pytest.mark.mpi(2)
def test_too_many_ranks_are_told_once(train: Any) -> None:
    from mpi4py import MPI

    stderr = train("--logical-ranks", "1", code=2).stderr
    expected = int(MPI.COMM_WORLD.Get_rank() == 0)
    assert stderr.count("logical_ranks must be >= the number of ranks, got 1 < 2") == expected, stderr
