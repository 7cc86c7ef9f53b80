"""``Session.loader`` over real ranks: workers read what their rank has claimed, and die with their job."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, Session
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.settled_claims import SettledClaims

NUM_SAMPLES = 600
DATA = TensorDataset(torch.arange(float(NUM_SAMPLES)).reshape(-1, 1), torch.zeros(NUM_SAMPLES))


@pytest.mark.mpi(2)
def test_ranks_share_epochs_whose_rows_workers_read() -> None:
    """The slow rank leaves most of them to the other one."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1e-6), Config(batch_size=8, mega_batch=150, hash_interval=1))
    loader = session.loader(DATA, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        rows: list[int] = []
        for batch in loader:
            with session.step(batch):
                assert batch.x[:, 0].tolist() == batch.rows.tolist()
                session.optimizer.zero_grad()
                model(batch.x).mean().backward()
                session.optimizer.step()
                time.sleep(0.04 * session.rank + 0.005)
            rows += batch.rows.tolist()
        assert session.ledger.epoch == epoch + 1
        parts = session.transport.allgather_object(rows)
        assert sorted(parts[0] + parts[1]) == list(range(NUM_SAMPLES))
    assert len(parts[1]) < len(parts[0]) / 2, "claims did not follow speeds"
    hashes = session.transport.allgather_object(model_hash(model))
    assert hashes[0] == hashes[1]
    session.close()


@pytest.mark.mpi(2)
def test_ranks_that_are_alike_take_equally_many_batches_until_one_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may make a rank many times as slow: as alike as need be for ten rounds, and then hardly ever.
    monkeypatch.setattr("hvd_adaptive.algorithm.merge_period._ALIKE", 0.0)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    session = Session(model, torch.optim.AdamW(model.parameters(), lr=1e-6), Config(batch_size=4))
    steps: list[list[float]] = []

    def ended(record: Any) -> None:
        steps.append(record.stats["num_steps"].tolist())
        if len(steps) == 10:
            monkeypatch.setattr("hvd_adaptive.algorithm.merge_period._ALIKE", 0.9)

    session.records.append(ended)
    rows: list[int] = []
    loader = session.loader(DATA, num_workers=2)
    for batch in (batch for _ in range(2) for batch in loader):
        with session.step(batch):
            session.optimizer.zero_grad()
            model(batch.x).mean().backward()
            session.optimizer.step()
            time.sleep(0.5 if session.rank and 10 <= len(steps) < 14 else 0.02)
        rows += batch.rows.tolist()
    every = [row for part in session.gather(rows) for row in part]
    assert sorted(every) == sorted(2 * list(range(NUM_SAMPLES)))
    assert all(a == b for a, b in steps[2:10]), steps
    assert any(a > b for a, b in steps[11:15]), steps
    session.close()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 4}, {"batch_size_rule": "proportional"}])
def test_no_sample_is_lost_when_rounds_come_out_otherwise(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are closed early begin elsewhere than was settled, and what was read for them is read again by whoever claims
    it."""
    found: list[bool] = []
    fit = SettledClaims.fit

    def watched(self: SettledClaims, *others: Any) -> bool:
        found.append(fit(self, *others))
        return found[-1]

    monkeypatch.setattr(SettledClaims, "fit", watched)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1e-6), Config(batch_size=8, mega_batch=120, **options))
    loader = session.loader(DATA, num_workers=2)
    rows: list[int] = []
    rounds: list[Any] = []
    for _ in range(2):
        for batch in loader:
            is_first = not rounds or session._strategy._mega_batch is not rounds[-1]
            if is_first:
                rounds.append(session._strategy._mega_batch)
                settled = session._strategy._settled_now
                # Ranks take what was settled in turns.
                if settled is not None and len(settled.of_rank(session.rank)):
                    assert batch.num_samples_before == session.num_samples
            with session.step(batch):
                session.optimizer.zero_grad()
                for micro in batch.micro_batches():
                    assert micro.x[:, 0].tolist() == micro.rows.tolist()
                    model(micro.x).sum().backward()
                session.optimizer.step()
                time.sleep(0.004 * session.rank + 0.001)
            rows += batch.rows.tolist()
            if session.rank == 0 and is_first and len(rounds) in (2, 5):
                # Much of the round is unclaimed yet.
                session._strategy.close_round()
    every = [row for part in session.gather(rows) for row in part]
    assert sorted(every) == sorted(2 * list(range(NUM_SAMPLES)))
    # The same on both ranks.
    assert session.gather(found)[0] == found and found.count(False) >= 1 and found.count(True) >= 4, found
    session.close()


@pytest.mark.mpi(2)
def test_ranks_with_different_workers_are_told() -> None:
    session = Session(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1), Config())
    with pytest.raises(Exception, match="num_workers"):
        session.loader(DATA, num_workers=1 + session.rank)
    session.close()


SCRIPT = """
import multiprocessing, os, signal, time
import torch, hvd_adaptive
from torch.utils.data import TensorDataset

model = torch.nn.Linear(6, 2)
session = hvd_adaptive.Session(
    model, torch.optim.SGD(model.parameters(), lr=0.1), hvd_adaptive.Config(batch_size=8, mega_batch=100_000, stall_limit_s=60)
)
data = TensorDataset(torch.randn(100_000, 6), torch.zeros(100_000, dtype=torch.int64))
for number, batch in enumerate(session.loader(data, num_workers=1)):
    if session.rank == 1 and number == 30:
        print(f"killed at {time.time()}", flush=True)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with session.step(batch):
        session.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
"""


def test_a_worker_that_dies_ends_the_job_with_its_error(run_job: Any, tmp_path: Path) -> None:
    script = tmp_path / "worker_dies.py"
    script.write_text(SCRIPT)
    job = run_job([sys.executable, str(script)], np=2, timeout=200)
    end = time.time() - job.outlived_s
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    words = r"worker \((pid \d+\) (is|was) killed by signal: Killed|pid\(s\) \d+\) exited unexpectedly)"
    assert re.search(words, job.stderr) and "rank 1 failed" in job.stderr, job.describe()
    # PyTorch looks after its workers every five seconds; the stall limit is far longer.
    assert end - float(job.stdout.partition("killed at ")[2].split()[0]) < 40, job.describe()


class Damaged(TensorDataset):
    """Every fortieth sample is of a damaged shard, or of another shape."""

    def __init__(self, fault: str) -> None:
        super().__init__(*DATA.tensors)
        self.fault = fault

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        if row % 40 or self.fault == "shape":
            return (x if row % 40 else x.repeat(2)), y
        raise OSError("shard 3 is damaged") if self.fault == "file" else UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid byte")


@pytest.mark.mpi(2)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "kind", "cause", "message"),
    [
        ("file", OSError, OSError, r"sample \d*[02468]0 of the data set: shard 3 is damaged"),
        ("text", RuntimeError, UnicodeDecodeError, r"sample \d*[02468]0 of .* invalid byte \(UnicodeDecodeError\)"),
        ("shape", RuntimeError, RuntimeError, r"samples (\d+, )*\d*[02468]0, .* of the data set: stack expects each tensor"),
    ],
)
def test_samples_that_cannot_be_read_are_named(
    fault: str, kind: type[Exception], cause: type[Exception], message: str, num_workers: int
) -> None:
    """By the rank that reads them, as the same type of error, as torch's loader does it."""
    model = nn.Linear(1, 1)
    config = Config(batch_size=60, mega_batch=600, dispatch="equal")
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1e-6), config)
    batches = session.loader(Damaged(fault), num_workers=1) if num_workers else session.batches(Damaged(fault))
    with pytest.raises(kind, match=f"rank {session.rank}: {message}") as raised:  # noqa: PT012
        for batch in batches:
            with session.step(batch):
                pass
    assert num_workers or type(raised.value.__cause__) is cause
    session.transport.close()
