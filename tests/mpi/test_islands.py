"""Islands over real ranks: equal to one rank an island, equal bits inside after every step, and only first ranks send between."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import half
from runs import read_run
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Checkpointer, Config, Session
from hvd_adaptive.cluster.relaunch import torchrun
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.horovod_collectives import HorovodCollectives
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.comm.torch_collectives import TorchCollectives
from hvd_adaptive.engine.flat_model import model_hash

_lock = threading.Lock()
_generator = torch.Generator().manual_seed(0)
X = torch.randn(303, 6, dtype=torch.float64, generator=_generator)
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())
ISLANDS = ["2", "1,3"]


def make_model() -> nn.Sequential:
    # Simulated ranks are threads with one random generator.
    with _lock:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2)).double()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def start(transport: Any, model: nn.Module, *, adam: bool = False, **options: Any) -> Session:
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.01) if adam else torch.optim.SGD(
        parameters, lr=0.1, momentum=0.5
    )
    config = Config(**{"batch_size": 16, "mega_batch": 80, "hash_interval": 1, **options})
    return Session(model, optimizer, config, transport=transport)


def learn(session: Session, *, num_epochs: float = 2, data: Any = DATA, each: Any = None) -> list[Any]:
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(data, num_epochs=num_epochs):
        with session.step(batch):
            session.optimizer.zero_grad()
            if each is not None:
                each(session, batch)
            for micro in batch.micro_batches():
                micro.loss = nn.functional.cross_entropy(session.model(micro.x), micro.y)
                micro.loss.backward()
            session.optimizer.step()
        if session.config.island is not None:
            same_inside(session)
    return records


def same_inside(session: Session) -> None:
    """All ranks of an island hold the same parameters, bit for bit."""
    hashes = session._strategy._inside.allgather_object(model_hash(session.model, buffers=False))  # type: ignore[attr-defined]
    assert len(set(hashes)) == 1


@pytest.mark.mpi(4, timeout=300)
@pytest.mark.parametrize("island", ISLANDS)
def test_islands_end_where_as_many_ranks_would(island: str, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    cases: list[dict[str, Any]] = [
        {"adam": False},
        {"adam": True},
        {"adam": False, "compression": "maxmin:4"},
        {"adam": False, "micro_batch_size": 4, "dispatch": "proportional"},
        {"adam": True, "merge_fragments": 3, "fragment_alpha": 0.3},
        {"adam": False, "merge_fragments": 2, "fragment_delay": 0.4, "compression": "maxmin:8"},
    ]
    for case in half(cases, ISLANDS.index(island), backend):
        options = {"dispatch": "equal", **case}
        # Two simulated ranks, once: all ranks would compute the same.
        alone = LocalWorld(2).run(lambda t: flat_after(t, **options)) if transport.rank == 0 else None  # noqa: B023
        expected = transport.allgather_object(alone)[0]
        session = start(transport, make_model(), island=island, **options)
        records = learn(session)
        assert sum(record.stats["num_samples"].sum() for record in records) == 2 * len(X)
        if options["dispatch"] == "equal":
            # Their shares would follow from seconds.
            loose = {"rtol": 1e-2, "atol": 1e-2} if "compression" in options else {"rtol": 1e-9, "atol": 1e-11}
            assert torch.allclose(flat(session.model), expected[0], **loose), options
        assert records[-1].loss < records[0].loss
        session._hooks.remove()
    transport.close()


@pytest.mark.mpi(4, timeout=200)
@pytest.mark.parametrize("island", ISLANDS)
def test_adam_s_short_rounds_are_the_islands(island: str, backend: str) -> None:
    """The period follows from what islands did, of which there are fewer than ranks."""
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    session = start(transport, make_model(), adam=True, island=island, mega_batch=None, batch_size=8)
    records = learn(session)
    # The model starts from five steps of each island.
    assert records[0].num_samples <= 5 * 2 * 8 and len(records) >= 8
    for epoch in (1, 2):
        assert sum(record.stats["num_samples"].sum() for record in records if epoch - 1 < record.epoch <= epoch) == len(X)
    assert records[-1].loss < records[0].loss
    session._hooks.remove()
    transport.close()


def flat_after(transport: Any, **options: Any) -> torch.Tensor:
    session = start(transport, make_model(), **options)
    learn(session)
    return flat(session.model)


@pytest.mark.mpi(4, timeout=300)
def test_sparse_gradients_and_batch_norm(backend: str) -> None:
    """Rows that only one rank of an island touched are the island's; parts are never too small for BatchNorm."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=True, dtype=torch.float64)
            self.norm, self.out = nn.BatchNorm1d(4).double(), nn.Linear(4, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(self.bag(x)))

    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(0, 50, (201, 5), generator=generator), torch.randint(0, 3, (201,), generator=generator))
    for mode in ("always", "never"):
        torch.manual_seed(transport.rank)
        model = Bag()
        config = Config(batch_size=8, mega_batch=100, island="2", sparse_merge=mode, hash_interval=1)
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        records = learn(session, data=data, num_epochs=1)
        assert records[-1].num_samples == 201
        session._hooks.remove()
    transport.close()


@pytest.mark.mpi(2, 3, timeout=200)
def test_a_single_island_has_its_first_rank_s_batch_norm(num_ranks: int, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).double()
    session = start(transport, model, island="node", batch_size=12)
    norm: Any = model[1]
    passed: list[Any] = []
    model.register_forward_hook(lambda *_: passed.append(norm.running_mean.tolist()))
    rounds: list[Any] = []
    session.records.append(lambda record: rounds.append((passed[-1], norm.running_mean.tolist())))
    # The ranks' models are compared after every round.
    learn(session, num_epochs=1)
    first, *others = session.gather(rounds)
    assert all(before == after for before, after in first)
    assert all(mine[0] != its[0] and mine[1] == its[1] for other in others for mine, its in zip(first, other, strict=True))
    session.close()


@pytest.mark.mpi(4, timeout=200)
def test_gradients_can_be_clipped_as_the_island_s(backend: str) -> None:
    session = start(connect(stall_limit_s=60, backend=backend, groups=True), make_model(), island="2")
    for batch in session.batches(DATA, num_epochs=0.5):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(session.model(batch.x), batch.y).backward()
            assert session.synchronize()
            norm = float(torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.1))
            assert len(set(session._strategy._inside.allgather_object(norm))) == 1  # type: ignore[attr-defined]
            session.optimizer.step()
        same_inside(session)
    session.close()


@pytest.mark.mpi(4, timeout=300)
def test_any_rank_ends_a_round_and_the_run_and_workers_read(backend: str) -> None:
    """The last ranks of islands, whichever comes first; all agree on what was consumed."""
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    session = start(transport, make_model(), island="2", batch_size=8, mega_batch=150)
    loader = session.loader(DATA, num_workers=1, persistent_workers=True)
    ends: list[int] = []
    session.records.append(lambda record: ends.append(record.num_samples))
    rows: list[int] = []
    for number, batch in enumerate(loader):
        rows += batch.rows.tolist()
        with session.step(batch):
            assert torch.equal(batch.x, X[batch.rows])
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(session.model(batch.x), batch.y).backward()
            session.optimizer.step()
        is_last = session.rank in (1, 3)
        if is_last and number == 0:
            session._strategy.close_round()
        if is_last and ends:
            session.stop()
    # What is left of the epoch is cut into rounds of one size.
    assert len(ends) == 2 and ends[0] < 100 and 100 < ends[1] - ends[0] <= 150, ends
    assert len(set(session.gather(tuple(ends)))) == 1
    every = sorted(row for part in session.gather(rows) for row in part)
    assert len(every) == len(set(every)) == ends[-1]
    session.close()


@pytest.mark.mpi(4, timeout=200)
def test_an_island_is_as_fast_as_its_slowest_rank(backend: str) -> None:
    """One rank against three, of which one is slow: whoever is free takes the next batch."""
    session = start(connect(stall_limit_s=60, backend=backend, groups=True), make_model(), island="1,3", mega_batch=160)
    seconds = [0.02, 0.0, 0.08, 0.0][session.rank]
    records = learn(session, num_epochs=4, each=lambda *_: time.sleep(seconds))
    samples = sum(record.stats["num_samples"] for record in records)
    assert samples.sum() == 4 * len(X)
    # Each batch is cut evenly, whoever is slow: no two parts differ by more than a sample.
    num_steps = sum(record.stats["num_steps"] for record in records)
    assert samples[1:].max() - samples[1:].min() <= num_steps[1:].max() < samples[1:].min(), (samples, num_steps)
    assert samples[0] > 1.8 * samples[1:].sum(), samples
    # A rank's own seconds are without its waiting for the slow one, which is more than that at the ends of rounds.
    own_s, waited_s = (sum(record.stats[name] for record in records) for name in ("busy_s", "wait_s"))
    assert own_s[2] > own_s[[1, 3]].max() + 0.03 * num_steps[2], own_s
    assert waited_s[[1, 3]].min() > waited_s[2] + 0.03 * num_steps[2], waited_s
    weights = sum(record.weight for record in records) / len(records)
    assert weights.sum() == pytest.approx(1.0) and weights[0] > 0.6
    assert weights[1] == pytest.approx(weights[3])
    session.close()


@pytest.mark.mpi(4, timeout=200)
def test_one_rank_that_is_not_finite_is_its_island(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    session = start(connect(stall_limit_s=60, backend=backend, groups=True), make_model(), island="2", dispatch="equal")
    poisoned: list[int] = []

    def poison(session: Session, batch: Any) -> None:
        if session.rank == 3 and session.round == 2 and not poisoned:
            batch.x[0, 0] = float("nan")
            poisoned.append(session.round)

    with caplog.at_level(logging.WARNING):
        records = learn(session, each=poison)
    assert [record.weight.tolist() for record in records if not record.weight.all()] == [[0.5, 0.5, 0.0, 0.0]]
    assert records[2].stats["finite"].min() == 0
    assert all(torch.isfinite(p).all() for p in session.model.parameters())
    assert caplog.text.count("islands [1] had NaN or Inf") == (session.rank == 0)
    session.close()


@pytest.mark.mpi(4, timeout=300)
def test_a_resume_has_the_same_bits_and_needs_the_same_islands(backend: str, shared_tmp_path: Path) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True, repeatable=True)
    folder = shared_tmp_path / "checkpoints"
    options = {"adam": True, "dispatch": "equal", "compression": "maxmin:8"}

    def run(num_epochs: float, *, checkpoints: bool = True) -> str:
        session = start(transport, make_model(), island="2", **options)
        checkpointer = Checkpointer(session, folder, interval=1) if checkpoints else None
        if checkpointer is not None:
            checkpointer.resume()
        learn(session, num_epochs=num_epochs)
        if checkpointer is not None:
            assert checkpointer.close().failed == 0
        session._hooks.remove()
        return model_hash(session.model)

    whole = run(2, checkpoints=False)
    assert run(1) != whole
    assert run(2) == whole
    other = start(transport, make_model(), island="1,3", **options)
    with pytest.raises(AgreedError, match=r"island was '2' and is '1,3'"):
        Checkpointer(other, folder, interval=1).resume()
    state = other.state_dict()
    state["shared"]["strategy"]["islands"] = [0, 0, 1, 1]
    with pytest.raises(ValueError, match="it is of other islands"):
        other.load_state_dict(state)
    transport.close()


@pytest.mark.mpi(4)
def test_islands_that_the_ranks_do_not_fill_are_refused_on_all(backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    with pytest.raises(AgreedError, match="island must divide the number of ranks, got 3 and 4 ranks: choose 2 or 4"):
        start(transport, make_model(), island="3")
    with pytest.raises(AgreedError, match="3 of 4 ranks"):
        start(transport, make_model(), island="1,2")
    transport.close()


@pytest.mark.mpi(4, timeout=200)
@pytest.mark.parametrize("compression", ["none", "maxmin:8"])
def test_only_first_ranks_send_between_islands(backend: str, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[int, int] = {}
    kind: Any = TorchCollectives if backend == "torch" else HorovodCollectives

    def counted(name: str) -> None:
        original = getattr(kind, name)

        def count(self: Any, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            sent[self.world_size] = sent.get(self.world_size, 0) + tensor.nbytes
            return original(self, tensor, *arguments, **options)

        monkeypatch.setattr(kind, name, count)

    for name in ("allreduce_sum_async_", "alltoall_bytes_async", "allgather_bytes_async"):
        counted(name)
    # Codecs leave small tensors as they are.
    model = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)).double()
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    # On a busy machine the first island may claim all batches.
    session = start(transport, model, island="1,3", compression=compression, dispatch="equal")
    # By size: 4 ranks are the world, 3 the second island, 2 the first ranks. What torch gathers for statistics is the world's.
    sent.clear()
    records = learn(session, num_epochs=1)
    payload = sum(record.stats["payload_bytes"] for record in records)
    dense = flat(session.model).numel() * 8 * len(records)
    leads = session.rank in (0, 1)
    assert (payload > 0).tolist() == [True, True, False, False]
    assert payload[0] == pytest.approx(dense) if compression == "none" else payload[0] < dense / 4
    # SRA sends a part twice, and codes beside their scales.
    assert (sent.get(2, 0) > 0) == leads and sent.get(2, 0) <= 2.5 * payload[session.rank]
    assert (sent.get(3, 0) > 0) == (session.rank > 0)
    assert sent.get(4, 0) < len(records) * 4096
    session.close()


SCRIPT = """
import sys, torch
from torch.utils.data import TensorDataset
import hvd_adaptive

x = torch.randn(400, 6)
model = torch.nn.Linear(6, 2)
session = hvd_adaptive.Session(model, torch.optim.SGD(model.parameters(), lr=0.1),
                               hvd_adaptive.Config(batch_size=8, mega_batch=200, island="2", backend="torch"))
for batch in session.batches(TensorDataset(x, (x.sum(1) > 0).long()), num_epochs=4):
    if session.rank == 1 and session.round == 1:
        continue
    with session.step(batch):
        session.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        session.optimizer.step()
session.close()
"""


def test_a_rank_that_leaves_out_a_step_ends_the_job(run_job: Any, tmp_path: Path) -> None:
    path = tmp_path / "own_loop.py"
    path.write_text(SCRIPT)
    job = run_job([*torchrun(sys.executable, 2), str(path)], timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 1 made no step with a batch of its island" in job.stderr, job.describe()


@pytest.mark.mpi(4, timeout=300)
def test_the_trainer_takes_islands(train: Any, shared_tmp_path: Path, backend: str) -> None:
    options = ["--batch-size", "16", "--mega-batch", "400", "--optimizer", "sgd", "--lr", "0.5", "--epochs", "1"]
    train(*options, "--island", "2", "--backend", backend)
    summary, rounds = read_run(shared_tmp_path / "run")
    assert summary["world_size"] == 4 and rounds[-1]["samples"] == summary["samples"]
    assert np.allclose([r["weight_sum"] for r in rounds], 1.0)
    assert rounds[-1]["loss"] < rounds[0]["loss"]


@pytest.mark.mpi(4, timeout=200)
def test_weights_that_islands_do_not_have_are_not_dropped_in_silence(train: Any, backend: str) -> None:
    """With rare labels, auto means weights by row or coordinate, unless there are islands."""
    from mpi4py import MPI

    options = ["--batch-size", "4", "--mega-batch", "8", "--optimizer", "adagrad", "--lr", "0.1", "--epochs", "0.1"]
    heard = train(*options, "--backend", backend, out="alone").stderr
    told = train(*options, "--backend", backend, "--island", "2", out="islands").stderr
    if MPI.COMM_WORLD.Get_rank() == 0:
        assert "merge_weights dual-averaging: the" in heard
        assert "merge_weights auto means updates with island 2" in told
    quiet = train(*options, "--backend", backend, "--island", "2", "--merge-weights", "updates", out="named").stderr
    assert "merge_weights auto" not in quiet
