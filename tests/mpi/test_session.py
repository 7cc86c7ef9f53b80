"""The Session over real ranks, Horovod and MPI: the merge is the formula, bit for bit the same on every rank."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BACKENDS
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, Session
from hvd_adaptive.cluster.relaunch import meeting_place
from hvd_adaptive.comm import connect


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def run(session: Session, **options: Any) -> list[Any]:
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(make_data(), **options):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(session.model(batch.x), batch.y).backward()
            session.optimizer.step()
    return records


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("rule", ["updates", "heterogpu"])
def test_a_merge_is_the_weighted_sum_of_deltas(rule: str, num_ranks: int, use_backend: Any) -> None:
    from mpi4py import MPI

    backend = use_backend(BACKENDS[(num_ranks + (rule == "updates")) % 2])

    torch.manual_seed(MPI.COMM_WORLD.Get_rank())
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    perturbed: dict[str, Any] = {"perturbation": True, "perturbation_threshold": 10.0} if rule == "heterogpu" else {}
    config = Config(
        backend=backend, batch_size=16, mega_batch=200, outer_step="momentum", outer_momentum=0.9, hash_interval=1,
        merge_weights=rule, **perturbed,
    )  # fmt: skip
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    assert session.world_size == num_ranks
    globals_, deltas = [flat(model)], []
    merge = session._strategy.end_round

    def watched(stats: Any) -> Any:
        deltas.append(flat(model) - globals_[-1])
        result = merge(stats)
        globals_.append(flat(model))
        return result

    session._strategy.end_round = watched  # type: ignore[method-assign]
    records = run(session, num_epochs=2)
    comm = MPI.COMM_WORLD
    velocity = torch.zeros_like(deltas[0])
    for number, record in enumerate(records):
        others = comm.allgather(deltas[number])
        velocity = 0.9 * velocity + sum(w * d for w, d in zip(record.weight, others, strict=True))
        assert torch.allclose(globals_[number + 1], globals_[number] + velocity, rtol=1e-12, atol=1e-14)
        assert all(torch.equal(globals_[number + 1], other) for other in comm.allgather(globals_[number + 1]))
        spread = record.stats["num_updates"] / record.stats["num_updates"].sum()
        spread = spread[spread > 0]
        expected = 1 + 0.1 * (spread.max() - spread.min()) if rule == "heterogpu" and len(spread) > 1 else 1.0
        assert record.weight.sum() == pytest.approx(expected)
    assert sum(r.stats["num_samples"].sum() for r in records) == 1200
    session.close()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("sparse", [False, True])
def test_the_baseline_is_plain_horovod(sparse: bool) -> None:
    """One step of two ranks equals one rank's step on both halves of the batch, with dense and sparse gradients."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=sparse, dtype=torch.float64)
            self.out = nn.Linear(4, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.bag(x))

    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randint(0, 50, (64, 5), generator=generator), torch.randint(0, 3, (64,), generator=generator)
    )
    torch.manual_seed(0)
    model, alone = Bag(), Bag()
    session = Session(
        model, torch.optim.SGD(model.parameters(), lr=0.5), Config(strategy="horovod", batch_size=8)
    )
    alone.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(alone.parameters(), lr=0.5)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    for batch in session.batches(data, num_epochs=1):
        rows = [row for part in comm.allgather(batch.rows) for row in part]
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
        sgd.zero_grad()
        nn.functional.cross_entropy(alone(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        sgd.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9)
    session.close()


SCRIPT = """
import sys, time, torch
from torch.utils.data import TensorDataset
import hvd_adaptive

def fail(session):
    {body}

x = torch.randn(400, 6)
model = torch.nn.Linear(6, 2)
session = hvd_adaptive.Session(model, torch.optim.SGD(model.parameters(), lr=0.1),
                               hvd_adaptive.Config(batch_size=8, mega_batch=200, stall_limit_s={limit_s}, backend={backend!r}))
print("started", flush=True)
for batch in session.batches(TensorDataset(x, (x.sum(1) > 0).long()), num_epochs={epochs}):
    with session.step(batch):
        session.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
    # On crowded cores one rank may take all batches of a round.
    if session.round >= 2:
        fail(session)
session.close()
"""


@pytest.mark.mpi(2)
def test_a_session_closes_once_and_then_gives_nothing(backend: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, Config(), transport=connect(stall_limit_s=60, backend=backend))
    session.close()
    session.close()
    for use in (lambda: session.gather(1), lambda: next(session.batches(torch.zeros(9, 2)))):
        with pytest.raises(RuntimeError, match="this Session is closed"):
            use()


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("strategy", "name"), [("sync", "horovod"), ("sync", "torch"), ("horovod", "horovod"), ("local", "horovod")]
)
def test_a_closed_session_leaves_nothing_on_model_and_optimizer(strategy: str, name: str, use_backend: Any) -> None:
    """Ranks go on by themselves, and then together again."""
    backend = use_backend(name)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x, y = make_data().tensors
    for _ in range(2):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.01)
        # Shares that differ have a weight on each gradient. Each rank makes steps, also beside other work.
        own: dict[str, dict[str, Any]] = {"sync": {"global_batch_size": 33}, "local": {"dispatch": "equal"}}
        options = own.get(strategy, {})
        config = Config(strategy=strategy, batch_size=16, mega_batch=200, backend=backend, **options)
        session = Session(model, optimizer, config)
        rank, before = session.rank, flat(model)
        run(session, num_epochs=1)
        assert not torch.equal(flat(model), before)
        session.close()
        # What Horovod's copy of the optimizer has learnt is the script's now.
        assert len(optimizer.state) == len(trained)
        # Not the same on each rank: nothing is exchanged.
        for its in (optimizer, session.optimizer):
            for _ in range(2):
                its.zero_grad()
                part = slice(100 * rank, 100 * rank + 50 + rank)
                loss = nn.functional.cross_entropy(model(x[part]), y[part])
                loss.backward()
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                expected = torch.autograd.grad(nn.functional.cross_entropy(model(x[part]), y[part]), trained)
                assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
                before = flat(model)
                its.step()
                assert not torch.equal(flat(model), before)
        # The remedy for a model that was changed: its next session exchanges the rest.
        model[0].weight.requires_grad_(False)
        optimizer.zero_grad()


@pytest.mark.mpi(2)
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    ("strategy", "name"), [("sync", "horovod"), ("sync", "torch"), ("horovod", "horovod"), ("local", "horovod")]
)
def test_a_session_that_was_never_closed_leaves_the_next_one_alone(
    strategy: str, name: str, is_kept: bool, use_backend: Any
) -> None:
    """As in a notebook whose cell is run again; with an optimizer of its own at last."""
    backend = use_backend(name)
    own: dict[str, dict[str, Any]] = {"sync": {"global_batch_size": 33}, "local": {"dispatch": "equal"}}
    config = Config(strategy=strategy, batch_size=16, mega_batch=200, backend=backend, hash_interval=1, **own.get(strategy, {}))
    found = []
    for closes in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        kept: list[Session] = []
        for number in range(3):
            if number == 2:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            session = Session(model, optimizer, config)
            if number and is_kept and not closes:
                with pytest.raises(RuntimeError, match="not closed before another one was made"):
                    next(kept[-1].batches(make_data()))
            # Plain Horovod's copy of a collected session's optimizer is gone, with what it has learnt.
            if number == 1 and (closes or is_kept or strategy != "horovod"):
                assert len(session.optimizer.state_dict()["state"]) == 4
            run(session, num_epochs=1)
            if closes or number == 2:
                session.close()
            elif is_kept:
                kept.append(session)
            else:
                del session
                gc.collect()
        found.append(flat(model))
    if is_kept or strategy != "horovod":
        assert torch.allclose(*found, rtol=1e-9, atol=1e-12)
    # Nothing is exchanged or weighted any more: ranks have other gradients.
    x, y = make_data().tensors
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    loss = nn.functional.cross_entropy(model(x[rank : 50 + rank]), y[rank : 50 + rank])
    expected = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", ["sync", "horovod"])
def test_a_graph_from_within_a_session_may_outlive_it(strategy: str) -> None:
    model = nn.Linear(6, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, Config(strategy=strategy, batch_size=16))
    x, y = make_data().tensors
    kept = nn.functional.cross_entropy(model(x), y)
    session.close()
    for _ in range(2):
        session.optimizer.zero_grad()
        kept.backward(retain_graph=True)
    expected = nn.functional.cross_entropy(model(x), y)
    for p, gradient in zip(model.parameters(), torch.autograd.grad(expected, [*model.parameters()]), strict=True):
        assert p.grad is not None and torch.equal(p.grad, gradient)
    session.optimizer.step()


@pytest.fixture(params=["horovod", "torch"])
def job_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each backend in turn, for jobs that the test starts."""
    with meeting_place({}) as place:
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        yield request.param


def script(tmp_path: Path, body: str, backend: str, *, epochs: int = 1000, limit_s: float = 30) -> list[str]:
    path = tmp_path / "own_loop.py"
    path.write_text(SCRIPT.format(body=body, epochs=epochs, limit_s=limit_s, backend=backend))
    return [sys.executable, str(path)]


def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(run_job: Any, tmp_path: Path, job_backend: str) -> None:
    # torch.distributed, once it has begun, holds back what a hook for exceptions writes.
    world = "'gloo', store=dist.HashStore(), rank=0, world_size=1"
    begin = f"import torch.distributed as dist; dist.is_initialized() or dist.init_process_group({world})"
    body = f"if session.rank == 1: {begin}; print('raising at', time.time(), flush=True); raise KeyError('on purpose')"
    job = run_job(script(tmp_path, body, job_backend), np=3, timeout=200)
    end = time.time() - job.outlived_s
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    # Of what ranks say: the launcher's notice of the end comes another way, and may overtake the reason.
    first = next((line for line in job.stderr.splitlines() if re.match(r"rank \d+ failed:|hvd_adaptive: |Traceback", line)), "")
    assert first == "rank 1 failed:" and "KeyError: 'on purpose'" in job.stderr, job.describe()
    raised = re.search(r"raising at ([\d.]+)", job.stdout)
    # Ten seconds, and as many for a machine that stalls.
    assert raised is not None and end - float(raised[1]) < 20, job.describe()


def test_what_all_ranks_refuse_is_said_once_and_nobody_is_blamed(run_job: Any, tmp_path: Path, job_backend: str) -> None:
    body = "from hvd_adaptive.comm.protocols import agree; agree(session.transport, 'refused on purpose')"
    job = run_job(script(tmp_path, body, job_backend), np=3, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert job.stderr.count("AgreedError: refused on purpose") == 1 and "is dead" not in job.stderr, job.describe()


def test_a_rank_that_exits_early_is_named(run_job: Any, tmp_path: Path) -> None:
    job = run_job(script(tmp_path, "if session.rank == 1: sys.exit(0)", "horovod"), np=2, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 1" in job.stderr, job.describe()


def test_a_rank_stuck_in_the_users_code_is_named(run_job: Any, tmp_path: Path) -> None:
    job = run_job(script(tmp_path, "while session.rank == 1: time.sleep(0.1)", "horovod", limit_s=8), np=2, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 1" in job.stderr and "stuck" in job.stderr, job.describe()


def test_a_collective_on_one_rank_ends_the_job_and_is_named(run_job: Any, tmp_path: Path, job_backend: str) -> None:
    body = "session.records.append(lambda _: session.rank == 1 and session.gather(1))"
    job = run_job(script(tmp_path, body, job_backend, limit_s=3), np=2, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "deadlocked" in job.stderr and "'rendezvous round'" in job.stderr and "'session.gather'" in job.stderr, job.describe()


def rank_pid(path: Path, rank: int) -> int:
    """The process of a rank that runs a script, once it is there."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(path).encode() in words and f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables:
                return int(folder.name)
        time.sleep(0.1)
    raise TimeoutError(f"rank {rank} did not start")


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGSTOP, ("rank 1", "pid")), (signal.SIGKILL, ("rank 1",))]
)
def test_a_rank_frozen_or_killed_in_training_ends_the_job(
    run_job: Any, tmp_path: Path, number: int, words: Any, job_backend: str
) -> None:
    started = tmp_path / "started"
    limit_s = 8 if number == signal.SIGSTOP else 30
    command = script(tmp_path, f"open({str(started)!r}, 'w').close()", job_backend, epochs=100_000, limit_s=limit_s)

    def disturb(child: Any) -> None:
        while not started.exists() and child.poll() is None:
            time.sleep(0.1)
        os.kill(rank_pid(tmp_path / "own_loop.py", 1), number)

    job = run_job(command, np=2, timeout=200, during=disturb)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert all(word in job.stderr for word in words), job.describe()


CYCLES = """
import os, sys, torch, hvd_adaptive

for options in [{}, {"strategy": "sync"}, {"strategy": "local"}, {"strategy": "local", "record": True}]:
    model = torch.nn.Linear(6, 2)
    try:
        session = hvd_adaptive.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), hvd_adaptive.Config(**options))
    except RuntimeError as error:
        found = str(error)
    else:
        found = os.environ.get("HOROVOD_CYCLE_TIME")
        rank = session.rank
        session.close()
    if rank == 0:
        print("FOUND", found, flush=True)
"""


@pytest.mark.parametrize(("preset", "expected"), [(None, ["5", "1", "5"]), ("2", ["2", "2", "2"])])
def test_horovods_thread_looks_seldom_where_sums_are_seldom(
    preset: str | None, expected: list[str], run_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process may have several sessions; what a user has set stays."""
    (tmp_path / "cycles.py").write_text(CYCLES)
    if preset is not None:
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", preset)
    job = run_job([sys.executable, str(tmp_path / "cycles.py")], np=2, timeout=200)
    found = re.findall("FOUND (.*)", job.stdout)
    assert job.returncode == 0 and found[:3] == expected, job.describe()
    assert "start a new process" in found[3], job.describe()
