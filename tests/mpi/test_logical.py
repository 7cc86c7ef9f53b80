"""Logical ranks over real ranks: the same bits at 1, 2, 3 and 4 of them, through the library and through the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

# Everything that draws from the global generators: the data set from all three, dropout in the model.
SCRIPT = """
import random, sys
import numpy as np, torch
from torch import nn
import hvd_adaptive
from hvd_adaptive.train.flat_model import model_hash

class Noisy:
    x = torch.randn(600, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        noise = torch.randn(6) + np.random.randn() + random.gauss(0, 1)
        return self.x[row] + 0.1 * noise, (self.x[row].sum() > 0).long()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
config = hvd_adaptive.Config(batch_size=8, mega_batch=200, logical_ranks=4)
session = hvd_adaptive.Session(model, optimizer, config)
# What the ranks themselves draw must not matter.
torch.manual_seed(session.rank), np.random.seed(session.rank), random.seed(session.rank)
hashes = []
session.records.append(lambda record: hashes.append(model_hash(model)))
for batch in session.batches(Noisy(), num_epochs=2):
    with session.step(batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
if session.rank == 0:
    print("hashes", *hashes)
session.close()
"""


def test_random_states_buffers_and_optimizers_are_a_logical_ranks_own(run_job: Any, tmp_path: Path) -> None:
    path = tmp_path / "own_loop.py"
    path.write_text(SCRIPT)
    answers = []
    for world_size in (1, 2, 3, 4):
        job = run_job([sys.executable, str(path)], np=world_size, timeout=240)
        assert job.returncode == 0, job.describe()
        answers += [line for line in job.stdout.splitlines() if line.startswith("hashes")]
    assert len(answers) == 4 and len(set(answers)) == 1, answers
    assert len(set(answers[0].split())) == 7


@pytest.mark.parametrize(
    "options",
    [
        ["--input-gradients", "dense", "--momentum", "0.9", "--lr", "0.5"],
        ["--optimizer", "adagrad", "--lr", "0.05", "--work", "nonzeros"],
    ],
    ids=["sgd-momentum-dense", "adagrad-sparse"],
)
def test_the_command_gives_one_model_at_any_number_of_ranks(
    run_job: Any, tmp_path: Path, options: list[str]
) -> None:
    summaries = []
    for world_size in (1, 2, 3, 4):
        out = tmp_path / str(world_size)
        command = [sys.executable, "-m", "hvd_adaptive", "train", "--logical-ranks", "4", "--out", str(out)]
        limits = ["--epochs", "0.1", "--hidden-size", "16", "--batch-size", "32", "--mega-batch", "1500"]
        job = run_job([*command, *limits, *options, "--no-calibration", "--eval-rounds", "0"], np=world_size, timeout=240)
        assert job.returncode == 0, job.describe()
        assert "4 logical ranks" in job.stderr and "adaptivity is off" in job.stderr, job.describe()
        summaries.append(json.loads((out / "summary.json").read_text()))
    assert len({s["model_hash"] for s in summaries}) == 1, [s["model_hash"] for s in summaries]
    assert all(s["ranks_agreed"] and s["rounds"] > 1 for s in summaries)
    assert all(s["final"] == summaries[0]["final"] for s in summaries)


def test_too_many_ranks_are_told_once(run_job: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvd_adaptive", "train", "--logical-ranks", "1", "--no-calibration"]
    job = run_job([*command, "--out", str(tmp_path / "run")], np=2, timeout=240)
    assert job.returncode == 2, job.describe()
    assert job.stderr.count("logical_ranks must be >= the number of ranks, got 1 < 2") == 1, job.describe()
