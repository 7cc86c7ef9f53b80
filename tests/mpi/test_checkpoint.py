"""Checkpoints over real ranks: interrupted runs go on to where whole ones end, at any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Checkpointer, Config, Session
from hvd_adaptive.train.checkpoint import find_checkpoints

COMMAND = [sys.executable, "-m", "hvd_adaptive", "train"]
OPTIONS = [
    "--no-calibration", "--batch-size", "16", "--mega-batch", "400", "--lr", "0.5", "--checkpoint-interval", "1",
    "--eval-rounds", "5",
]  # fmt: skip


@pytest.fixture
def train(run_job: Any, data: Path, tmp_path: Path) -> Any:
    def run(out: str, *options: str, np: int | None, **job: Any) -> Any:
        where = ["--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(tmp_path / out)]
        return run_job([*COMMAND, *where, *OPTIONS, *options], np=np, **{"timeout": 300, **job})

    return run


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return json.loads((path / "summary.json").read_text()), rounds


def succeed(job: Any) -> None:
    assert job.returncode == 0 and not job.leftover, job.describe()


@pytest.mark.parametrize("strategy", ["local", "horovod"])
def test_an_interrupted_run_of_one_rank_ends_with_the_same_bits(train: Any, tmp_path: Path, strategy: str) -> None:
    options = ["--strategy", strategy, "--input-gradients", "dense", "--momentum", "0.9", "--lr", "0.2"]
    succeed(train("whole", *options, "--epochs", "4", "--checkpoint-interval", "0", np=1))
    succeed(train("parts", *options, "--epochs", "2", np=1))
    succeed(train("parts", *options, "--epochs", "4", "--resume", "auto", np=1))
    (whole, rounds), (parts, both) = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert parts["model_hash"] == whole["model_hash"] and parts["final"] == whole["final"]
    assert parts["best"] == whole["best"] and parts["samples"] == 8000
    assert [(r["round"], r["loss"], r["eval"]) for r in both] == [(r["round"], r["loss"], r["eval"]) for r in rounds]
    assert not (tmp_path / "whole" / "checkpoints").exists()
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["epochs"] == 4


def rank_pid(out: Path, rank: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in words and f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables:
            return int(folder.name)
    raise ProcessLookupError(f"rank {rank} is not there")


def test_after_kill_9_the_run_goes_on_with_every_sample_once(train: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def kill(_: Any) -> None:
        end = time.monotonic() + 60
        while not [path for path in find_checkpoints(out / "checkpoints") if int(path.name[-8:]) >= 7]:
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(rank_pid(out, 1), signal.SIGKILL)

    job = train("run", "--epochs", "1000", np=2, during=kill)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    newest = find_checkpoints(out / "checkpoints")[0]
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    epochs = manifest["epoch"] + 2
    job = train("run", "--epochs", str(epochs), "--resume", "auto", np=2)
    succeed(job)
    assert f"resumed from {newest}" in job.stderr, job.describe()
    summary, rounds = read(out)
    assert summary["samples"] == 2000 * epochs
    assert [r["round"] for r in rounds] == list(range(5 * epochs))
    assert all(sum(r["ranks"]["samples"]) == 400 for r in rounds)
    assert sum(summary["ranks"]["num_samples"]) == 2000 * epochs and summary["ranks_agreed"]
    assert not list((out / "checkpoints").glob(".part*"))


def test_other_numbers_of_ranks(train: Any, tmp_path: Path) -> None:
    succeed(train("whole", "--epochs", "4", np=2))
    succeed(train("run", "--epochs", "1.3", np=1))
    first, _ = read(tmp_path / "run")
    manifest = json.loads((find_checkpoints(tmp_path / "run" / "checkpoints")[0] / "MANIFEST.json").read_text())
    assert (manifest["epoch"], manifest["cursor"], first["samples"]) == (1, 800, 2800)
    succeed(train("run", "--epochs", "2.5", "--resume", "auto", np=4))
    succeed(train("run", "--epochs", "4", "--resume", "auto", np=3))
    (whole, _), (summary, rounds) = read(tmp_path / "whole"), read(tmp_path / "run")
    assert summary["world_size"] == 3 and summary["samples"] == 8000 and summary["ranks_agreed"]
    counts = [len(r["ranks"]["samples"]) for r in rounds]
    assert counts == [1] * 7 + [4] * 6 + [3] * 7
    assert all(sum(r["ranks"]["samples"]) == 400 for r in rounds)
    assert [r["samples"] for r in rounds] == list(range(400, 8001, 400))
    assert summary["final"]["p1"] == pytest.approx(whole["final"]["p1"], abs=0.03)


SCRIPT = """
import os, signal, sys, torch
from pathlib import Path
from torch.utils.data import TensorDataset
import hvd_adaptive
from hvd_adaptive.train import checkpoint

folder, where = Path(sys.argv[1]), sys.argv[2]
write, commit = checkpoint.write_state, checkpoint.commit

def write_half(path, skeleton, tensors):
    if path.name == where and "round-00000003" in str(path):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, skeleton, tensors)

def commit_half(part, final, files, content):
    if where == "commit" and content["round"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(part, final, files, content)

checkpoint.write_state, checkpoint.commit = write_half, commit_half
x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
model = torch.nn.Linear(6, 2)
session = hvd_adaptive.Session(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                               hvd_adaptive.Config(batch_size=8, mega_batch=100, stall_limit_s=10))
# Waits for the last one, so that none is skipped.
checkpoints = hvd_adaptive.Checkpointer(session, folder, interval=1000)
session.records.append(lambda record: checkpoints.save())
checkpoints.resume()
for batch in session.batches(TensorDataset(x, (x.sum(1) > 0).long()), num_epochs=1):
    with session.step(batch):
        session.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
if session.rank == 0:
    print("samples", session.num_samples, "files", sorted(os.listdir(folder)), flush=True)
checkpoints.close()
session.close()
"""


@pytest.mark.parametrize("where", ["rank-0001.safetensors", "commit"])
def test_sigkill_while_writing_leaves_the_older_one(run_job: Any, tmp_path: Path, where: str) -> None:
    script, folder = tmp_path / "own_loop.py", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    job = run_job([sys.executable, str(script), str(folder), where], np=2, timeout=90)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert [path.name for path in find_checkpoints(folder)] == ["round-00000002", "round-00000001"]
    assert len(list(folder.glob(".part-*"))) == 1
    job = run_job([sys.executable, str(script), str(folder), "nowhere"], np=3, timeout=90)
    succeed(job)
    names = [f"round-{number:08d}" for number in (2, 3, 4)]
    assert f"samples 400 files {names}" in job.stdout, job.describe()


@pytest.mark.mpi(1, 2)
def test_every_rank_has_its_random_numbers_back(num_ranks: int, shared_tmp_path: Path) -> None:
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())

    def start(transport: Any) -> tuple[Session, Checkpointer]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        session = Session(model, optimizer, Config(batch_size=8, mega_batch=50), transport=transport)
        return session, Checkpointer(session, shared_tmp_path / "checkpoints", interval=2)

    def run(session: Session, num_epochs: float) -> None:
        for batch in session.batches(data, num_epochs=num_epochs):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(session.model(batch.x), batch.y).backward()
                session.optimizer.step()

    session, checkpoints = start(None)
    torch.manual_seed(session.rank)
    run(session, 0.75)
    assert checkpoints.close().failed == 0
    expected = torch.rand(3)
    transport = session.transport
    assert len({tuple(x.tolist()) for x in transport.allgather_object(expected)}) == num_ranks
    torch.manual_seed(99)
    again, checkpoints = start(transport)
    assert checkpoints.resume() is not None and again.round == 3
    assert torch.equal(torch.rand(3), expected)
    run(again, 2)
    assert again.num_samples == 400 and checkpoints.close().failed == 0
    session.close()


def test_what_cannot_be_resumed_is_left_as_it_was(train: Any, tmp_path: Path) -> None:
    succeed(train("run", "--epochs", "1", np=2))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for options, message in (
        (["--resume", "auto", "--lr", "3"], "lr was 0.5 and is 3.0"),
        (["--resume", str(tmp_path / "run" / "x")], f"there is no checkpoint in {tmp_path / 'run' / 'x'}"),
        ([], "holds a run already: go on with it with --resume auto"),
    ):
        job = train("run", *options, np=2)
        assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
        assert job.stderr.count("hvd-adaptive: error:") == 1 and message in job.stderr, job.describe()
        assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
