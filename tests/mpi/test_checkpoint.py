"""Checkpoints over real ranks: interrupted runs go on to where whole ones end, at any number of ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import read_run
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Checkpointer, Config, Session
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.state import checkpoint
from hvd_adaptive.state.checkpoint import find_checkpoints
from hvd_adaptive.xmc import run_directory
from hvd_adaptive.xmc.run_directory import BEST_MODEL, LAST_MODEL, RunDirectory, load_model
from hvd_adaptive.xmc.trainer import Trainer

COMMAND = [sys.executable, "-m", "hvd_adaptive", "train"]
OPTIONS = [
    "--batch-size", "16", "--mega-batch", "400", "--optimizer", "sgd", "--lr", "0.5", "--checkpoint-interval", "1",
    "--eval-rounds", "5",
]  # fmt: skip


def train_job(run_job: Any, data: Path, out: Path, *options: str, **job: Any) -> Any:
    where = ["--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out), "--no-calibration"]
    return run_job([*COMMAND, *where, *OPTIONS, *options], np=2, timeout=400, **job)


def succeed(job: Any) -> None:
    assert job.returncode == 0 and not job.leftover, job.describe()


@pytest.mark.mpi(1)
@pytest.mark.parametrize("strategy", ["local", "horovod"])
def test_an_interrupted_run_of_one_rank_ends_with_the_same_bits(train: Any, shared_tmp_path: Path, strategy: str) -> None:
    options = [*OPTIONS, "--strategy", strategy, "--input-gradients", "dense", "--optimizer", "momentum", "--lr", "0.2"]
    train(*options, "--epochs", "4", "--checkpoint-interval", "0", out="whole")
    train(*options, "--epochs", "2", out="parts")
    train(*options, "--epochs", "4", "--resume", "auto", out="parts")
    (whole, rounds), (parts, both) = read_run(shared_tmp_path / "whole"), read_run(shared_tmp_path / "parts")
    assert parts["model_hash"] == whole["model_hash"] and parts["final"] == whole["final"]
    assert parts["best"] == whole["best"] and parts["samples"] == 8000
    assert [(r["round"], r["loss"], r["eval"]) for r in both] == [(r["round"], r["loss"], r["eval"]) for r in rounds]
    assert not (shared_tmp_path / "whole" / "checkpoints").exists()
    assert json.loads((shared_tmp_path / "parts" / "config.json").read_text())["epochs"] == 4


@pytest.mark.mpi(1)
@pytest.mark.parametrize("limit", [("--target-p1", "0.1"), ("--time-limit", "0.05"), ("--patience", "1")])
def test_a_run_that_reached_its_limit_trains_no_further(train: Any, shared_tmp_path: Path, limit: tuple[str, str]) -> None:
    options = [*OPTIONS, "--eval-rounds", "1", *limit]
    train(*options)
    summary, rounds = read_run(shared_tmp_path / "run")
    best = (shared_tmp_path / "run" / BEST_MODEL).read_bytes()
    answer = train(*options, "--resume", "auto")
    assert "the run reached its --time-limit, --patience or --target-p1 before the resume" in answer.stderr
    again, both = read_run(shared_tmp_path / "run")
    assert both == rounds and (shared_tmp_path / "run" / BEST_MODEL).read_bytes() == best
    assert {name for name, value in again.items() if summary[name] != value} <= {"wall_s", "peak_memory_bytes", "checkpoints"}
    assert "before the resume" not in train(*OPTIONS, "--epochs", "3", "--resume", "auto").stderr
    assert len(read_run(shared_tmp_path / "run")[1]) > len(rounds)


@pytest.mark.mpi(2)
def test_an_error_of_all_ranks_lets_a_checkpoint_be_finished(
    train: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, after_round = checkpoint.write_state, Trainer._after_round

    failed = threading.Event()

    def write_slowly(*arguments: Any) -> Any:
        assert failed.wait(60)
        # Whoever does not wait for it leaves without it.
        time.sleep(1)
        return write(*arguments)

    def fail_in_the_second(trainer: Trainer, record: Any) -> None:
        after_round(trainer, record)
        if record.round == 1:
            failed.set()
            raise AgreedError("the second round failed on purpose")

    monkeypatch.setattr(checkpoint, "write_state", write_slowly)
    monkeypatch.setattr(Trainer, "_after_round", fail_in_the_second)
    answer = train(*OPTIONS, "--epochs", "2", code=2)
    assert "not completed" not in answer.stderr
    assert [path.name for path in find_checkpoints(shared_tmp_path / "run" / "checkpoints")] == ["round-00000001"]


@pytest.mark.mpi(2)
def test_a_run_directory_may_have_any_name(train: Any, shared_tmp_path: Path) -> None:
    out = os.fsdecode(b"caf\xe9")
    train(*OPTIONS, "--epochs", "1", out=out)
    train(*OPTIONS, "--epochs", "2", "--resume", "auto", out=out)
    summary, rounds = read_run(shared_tmp_path / out)
    assert len(rounds) == 10 and summary["checkpoints"]["failed"] == 0
    assert load_model(shared_tmp_path / out)[1]["hidden_size"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the models that find no room."""
    names: set[str] = set()
    save_file = run_directory.save_file

    def save(tensors: Any, path: Path, **options: Any) -> None:
        if path.name in names:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path, **options)

    monkeypatch.setattr(run_directory, "save_file", save)
    return names


# The one evaluation is after round 4, and the last model is not compared with it.
ONE_EVALUATION = ["--eval-samples", "100", "--epochs", "1.6"]


@pytest.mark.mpi(2)
def test_a_best_model_that_finds_no_room_is_written_when_it_can_be(
    train: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: set[str]
) -> None:
    after_round = Trainer._after_round
    from mpi4py import MPI

    best: dict[str, Any] = {}

    def fill_and_free(trainer: Trainer, record: Any) -> None:
        if record.round == 4:
            full_disk.add(BEST_MODEL)
            best.update({name: value.clone() for name, value in trainer._model.state_dict().items()})
        elif record.round == 5:
            full_disk.clear()
        after_round(trainer, record)

    monkeypatch.setattr(Trainer, "_after_round", fill_and_free)
    train(*OPTIONS, *ONE_EVALUATION)
    path = shared_tmp_path / "run"
    summary, rounds = read_run(path)
    assert summary["best"] == rounds[4]["eval"] and summary["checkpoints"]["failed"] <= 1
    newest = find_checkpoints(path / "checkpoints")[0]
    assert newest.name == "round-00000008"
    for folder in (path, newest):
        tensors, _, directory = load_model(folder)
        assert all((best[name] == value).all() for name, value in tensors.items()) and directory == path
    # A run may lie in a folder of that name.
    elsewhere = shared_tmp_path / "checkpoints" / "run"
    if MPI.COMM_WORLD.Get_rank() == 0:
        shutil.copytree(path, elsewhere)
        assert load_model(elsewhere)[2] == elsewhere


@pytest.mark.mpi(2)
@pytest.mark.parametrize("interval", ["0", "100"])
def test_a_best_model_that_never_finds_room_is_an_error(
    train: Any, shared_tmp_path: Path, full_disk: set[str], interval: str
) -> None:
    from mpi4py import MPI

    full_disk.add(BEST_MODEL)
    answer = train(*OPTIONS, *ONE_EVALUATION, "--checkpoint-interval", interval, code=2)
    assert not (shared_tmp_path / "run" / "summary.json").exists()
    if MPI.COMM_WORLD.Get_rank() == 0:
        reason = f"{BEST_MODEL} cannot be written: [Errno 28] No space left on device; mend that, or make room, and "
        assert reason in answer.stderr
        remedy = "start again; nothing was saved by this process" if interval == "0" else "go on with --resume auto; there is no"
        assert remedy in answer.stderr and ("--resume" in answer.stderr) == (interval != "0")


@pytest.mark.mpi(2)
def test_a_job_whose_folder_another_takes_over_writes_no_more_and_ends_with_an_error(
    train: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, after_round = shared_tmp_path / "run", Trainer._after_round
    theirs: dict[str, bytes] = {}

    def begin_another(trainer: Trainer, record: Any) -> None:
        after_round(trainer, record)
        if record.round == 5 and trainer.directory:
            other = RunDirectory(path, resume=True)
            other.go_on(2, None)
            other.write_summary({"job": "other"})
            other.close()
            theirs.update({file.name: file.read_bytes() for file in path.iterdir() if file.is_file()})
        assert record.round < 8

    monkeypatch.setattr(Trainer, "_after_round", begin_another)
    answer = train(*OPTIONS, "--epochs", "20", "--record", code=2)
    if theirs:
        assert answer.stderr.count("hvd-adaptive: error: rank 0: another job writes in ") == 1
        assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == theirs
        assert len(theirs["rounds.jsonl"].splitlines()) == 2 and LAST_MODEL not in theirs


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


def test_after_kill_9_the_run_goes_on_with_every_sample_once(run_job: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def kill(child: Any) -> None:
        end = time.monotonic() + 240
        while not [path for path in find_checkpoints(out / "checkpoints") if int(path.name[-8:]) >= 7]:
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        os.kill(rank_pid(out, 1), signal.SIGKILL)

    job = train_job(run_job, data, out, "--epochs", "1000", during=kill)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    newest = find_checkpoints(out / "checkpoints")[0]
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    epochs = manifest["epoch"] + 2
    job = train_job(run_job, data, out, "--epochs", str(epochs), "--resume", "auto")
    succeed(job)
    assert f"resumed from {newest}" in job.stderr, job.describe()
    summary, rounds = read_run(out)
    assert summary["samples"] == 2000 * epochs
    assert [r["round"] for r in rounds] == list(range(5 * epochs))
    assert all(sum(r["ranks"]["samples"]) == 400 for r in rounds)
    assert sum(summary["ranks"]["num_samples"]) == 2000 * epochs and summary["ranks_agreed"]
    assert not list((out / "checkpoints").glob(".part*"))


@pytest.mark.mpi(2, 4, timeout=400)
def test_other_numbers_of_ranks(train: Any, shared_tmp_path: Path, num_ranks: int) -> None:
    path = shared_tmp_path / "run"
    train(*OPTIONS, "--epochs", "4", out="whole")
    train(*OPTIONS, "--epochs", "1.3", alone=True)
    manifest = json.loads((find_checkpoints(path / "checkpoints")[0] / "MANIFEST.json").read_text())
    assert (manifest["epoch"], manifest["cursor"], read_run(path)[0]["samples"]) == (1, 800, 2800)
    train(*OPTIONS, "--epochs", "2.5", "--resume", "auto")
    train(*OPTIONS, "--epochs", "4", "--resume", "auto", alone=True)
    (whole, _), (summary, rounds) = read_run(shared_tmp_path / "whole"), read_run(path)
    assert summary["world_size"] == 1 and summary["samples"] == 8000 and summary["ranks_agreed"]
    counts = [len(r["ranks"]["samples"]) for r in rounds]
    assert counts == [1] * 7 + [num_ranks] * 6 + [1] * 7
    assert all(sum(r["ranks"]["samples"]) == 400 for r in rounds)
    assert [r["samples"] for r in rounds] == list(range(400, 8001, 400))
    assert summary["final"]["p1"] == pytest.approx(whole["final"]["p1"], abs=0.06)


SCRIPT = """
import os, signal, sys, torch
from pathlib import Path
from torch.utils.data import TensorDataset
import hvd_adaptive
from hvd_adaptive.state import checkpoint

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
                               hvd_adaptive.Config(batch_size=8, mega_batch=100))
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
    job = run_job([sys.executable, str(script), str(folder), where], np=2, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert [path.name for path in find_checkpoints(folder)] == ["round-00000002", "round-00000001"]
    assert len(list(folder.glob(".part-*"))) == 1
    job = run_job([sys.executable, str(script), str(folder), "nowhere"], np=3, timeout=200)
    succeed(job)
    names = [".owner", *(f"round-{number:08d}" for number in (2, 3, 4))]
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
    with pytest.raises(AgreedError, match=r"holds checkpoints of another run, the newest .*round-00000003, .* at round 0"):
        run(start(transport)[0], 1)
    again, checkpoints = start(transport)
    assert checkpoints.resume() is not None and again.round == 3
    assert torch.equal(torch.rand(3), expected)
    run(again, 2)
    assert again.num_samples == 400 and checkpoints.close().failed == 0
    session.close()


@pytest.mark.mpi(2)
def test_what_cannot_be_resumed_is_left_as_it_was(train: Any, shared_tmp_path: Path) -> None:
    from mpi4py import MPI

    path = shared_tmp_path / "run"

    def files() -> dict[Path, bytes]:
        MPI.COMM_WORLD.Barrier()
        found = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
        MPI.COMM_WORLD.Barrier()
        return found

    train(*OPTIONS, "--epochs", "1")
    before = files()
    for options, message in (
        (["--resume", "auto", "--lr", "3"], "lr was 0.5 and is 3.0"),
        (["--resume", "auto", "--strategy", "sync"], "other options: strategy was 'local' and is 'sync'. Give them"),
        (["--resume", str(path / "x")], f"there is no checkpoint in {path / 'x'}"),
        ([], "holds a run already: go on with it with --resume auto"),
    ):
        stderr = train(*OPTIONS, *options, code=2).stderr
        if MPI.COMM_WORLD.Get_rank() == 0:
            assert stderr.count("hvd-adaptive: error:") == 1 and message in stderr, stderr
        assert files() == before
    # The default, named, and what only measures.
    train(*OPTIONS, "--epochs", "1", "--resume", "auto", "--weight-decay", "0", "--calibration")


@pytest.mark.mpi(2)
def test_a_folder_that_is_removed_in_a_run_is_made_again(shared_tmp_path: Path) -> None:
    folder = shared_tmp_path / "run" / "checkpoints"
    model = nn.Linear(6, 2)
    config = Config(batch_size=8, mega_batch=100)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    checkpoints = Checkpointer(session, folder, interval=1)
    told = []

    def remove(record: Any) -> None:
        checkpoints.wait()
        if session.gather(session.round)[0] in (2, 4) and session.rank == 0:
            shutil.rmtree(folder.parent)
            told.append(session.preemption.saved())
        session.gather(None)

    session.records.append(remove)
    for batch in session.batches(TensorDataset(torch.ones(400, 6), torch.zeros(400).long()), num_epochs=1):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    # The last one was removed after it was written.
    counts = checkpoints.close()
    assert (counts.written, counts.failed) == (5, 0) and session.round == 4
    assert sorted(path.name for path in folder.iterdir()) == [".owner", "round-00000004"]
    assert told == [f"there is no checkpoint in {folder}"] * 2 * (session.rank == 0)
    session.close()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", ["sync", "horovod"])
def test_a_global_batch_that_a_resume_changes_is_told_with_what_keeps_it(
    strategy: str, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = connect(stall_limit_s=60, backend="horovod")

    def resume(world: Any, **options: Any) -> int:
        model = nn.Linear(6, 2)
        config = Config(strategy=strategy, batch_size=8, **options)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=world)
        checkpoints = Checkpointer(session, shared_tmp_path / "checkpoints", interval=1)
        if checkpoints.resume() is None:
            checkpoints.save()
        return session._strategy.round_unit

    if transport.rank == 0:
        resume(LocalTransport())
        assert "the global batch" not in caplog.text
    transport.rendezvous("saved")
    assert resume(transport, reference_ranks=1) == 8 and "the global batch" not in caplog.text
    assert resume(transport) == 16
    told = "is 16 samples with 2 ranks, and was 8 with 1: the learning rate may not fit it. Set reference_ranks=1 to keep it"
    assert caplog.text.count(told) == (transport.rank == 0)
    transport.close()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", ["sync", "horovod"])
def test_a_schedule_of_the_scripts_own_optimizer_goes_on_after_a_resume(strategy: str, shared_tmp_path: Path) -> None:
    """Horovod's copy of an optimizer has its groups, where the learning rate is; a state that is loaded brings new ones."""
    data = TensorDataset(torch.ones(64, 4), torch.zeros(64, 2))
    for num_epochs in (1, 2):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        session = Session(model, optimizer, Config(strategy=strategy, batch_size=8, mega_batch=16))
        session.schedule(scheduler, steps_per_epoch=2)
        checkpoints = Checkpointer(session, shared_tmp_path / "checkpoints")
        checkpoints.resume()
        for batch in session.batches(data, num_epochs=num_epochs):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.mse_loss(model(batch.x), batch.y).backward()
                session.optimizer.step()
            assert session.optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (batch.num_samples_before // 32)
        checkpoints.save()
        session.close()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (2 * num_epochs)
