"""Islands whose model fully_shard has cut up, over real ranks: equal to islands of whole models, and ranks send their shards."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Checkpointer, Config, Session, island_mesh
from hvd_adaptive.cluster.relaunch import torchrun
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.session.sameness import compare_models

_generator = torch.Generator().manual_seed(0)
X = torch.randn(606, 5, dtype=torch.float64, generator=_generator)
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())


def make_model(dtype: torch.dtype = torch.float64, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    # Shards of 8 and 7 rows, and one where the second rank has none.
    layers = [nn.Linear(5, 15), nn.BatchNorm1d(15) if norm else nn.LayerNorm(15), nn.ReLU(), nn.Linear(15, 1), nn.Linear(1, 2)]
    return nn.Sequential(*layers).to(dtype)


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def start(transport: Any, *, sharded: bool, adam: bool = False, norm: bool = False, **options: Any) -> Session:
    config = Config(**{"batch_size": 16, "mega_batch": 150, "hash_interval": 1, "dispatch": "equal", "island": "2", **options})
    model = make_model(norm=norm)
    if sharded:
        shard(model, island_mesh(config, transport=transport))
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.01) if adam else torch.optim.SGD(
        parameters, lr=0.1, momentum=0.5
    )
    return Session(model, optimizer, config, transport=transport)


def learn(session: Session, *, num_epochs: float = 2, each: Any = None, clip: float = 0.0) -> list[Any]:
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(DATA, num_epochs=num_epochs):
        with session.step(batch):
            session.optimizer.zero_grad()
            if each is not None:
                each(session, batch)
            batch.loss = nn.functional.cross_entropy(session.model(batch.x), batch.y)
            batch.loss.backward()
            if clip:
                session.synchronize()
                nn.utils.clip_grad_norm_(session.model.parameters(), clip)
            session.optimizer.step()
    return records


def whole(model: nn.Module) -> torch.Tensor:
    """All parameters, flat, gathered where they are sharded. COLLECTIVE inside the island."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in found])


@pytest.mark.mpi(4, timeout=300)
def test_sharded_islands_end_where_whole_ones_do(backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"adam": True}, {"clip": 0.5}),
        ({"adam": True, "optimizer_state": "average"}, {}),
        ({"optimizer_state": "reset", "norm": True, "merge_weights": "samples"}, {}),
    ]
    for options, how in cases:
        ends = []
        for sharded in (False, True):
            session = start(transport, sharded=sharded, **options)
            records = learn(session, **how)
            assert records[-1].loss < records[0].loss and len(records) > 6
            assert len({record.model_hash for record in records}) == len(records)
            # A forward pass without a backward one leaves the model gathered.
            with torch.no_grad():
                session.model(X[:4])
            ends.append(whole(session.model))
            ends[-1] = torch.cat([ends[-1], *(b.reshape(-1).double() for b in session.model.buffers())])
            session._hooks.remove()
        assert torch.allclose(*ends, rtol=1e-9, atol=1e-11), (options, (ends[0] - ends[1]).abs().max())
    transport.close()


@pytest.mark.mpi(4, timeout=200)
def test_a_rank_holds_and_sends_its_shard(backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    for compression in ("none", "maxmin:8"):
        session = start(transport, sharded=True, compression=compression)
        records = learn(session, num_epochs=1)
        own = sum(p.to_local().numel() for p in session.model.parameters())  # type: ignore[attr-defined]
        numels = session.gather(own)
        assert sum(numels) == 2 * whole(session.model).numel() and numels[0] > numels[1] > 0
        sizes = [group.weights.numel() for group in session._strategy.flat_model.parameter_groups]  # type: ignore[attr-defined]
        assert sum(sizes) == own
        sent = [int(b) for b in sum(record.stats["payload_bytes"] for record in records)]
        if compression == "none":
            assert sent == [8 * len(records) * n for n in numels]
        digest, odd = compare_models(session.model, transport, buffers=True)
        assert len(set(session.gather(digest))) == 1 and not odd
        # A difference in one shard of one island is found, and its rank named.
        if session.rank == 3:
            next(session.model.parameters()).to_local().data[0] += 1  # type: ignore[attr-defined]
        assert compare_models(session.model, transport, buffers=True)[1] == [3]
        session._strategy.flat_model.restore_()  # type: ignore[attr-defined]
        session._hooks.remove()
    transport.close()


@pytest.mark.mpi(4, timeout=200)
def test_one_shard_that_is_not_finite_is_its_island(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    session = start(connect(stall_limit_s=60, backend=backend, groups=True), sharded=True)
    poisoned: list[int] = []

    def poison(session: Session, batch: Any) -> None:
        if session.rank == 3 and session.round == 2 and not poisoned:
            with torch.no_grad():
                next(session.model.parameters()).to_local()[0] = float("nan")  # type: ignore[attr-defined]
            poisoned.append(session.round)

    with caplog.at_level(logging.WARNING):
        records = learn(session, each=poison)
    assert [record.weight.tolist() for record in records if not record.weight.all()] == [[0.5, 0.5, 0.0, 0.0]]
    assert torch.isfinite(whole(session.model)).all()
    assert caplog.text.count("islands [1] had NaN or Inf") == (session.rank == 0)
    session.close()


@pytest.mark.mpi(4, timeout=300)
def test_a_resume_has_the_same_bits(backend: str, shared_tmp_path: Path) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True, repeatable=True)
    options = {"adam": True, "compression": "maxmin:8", "outer_step": "nesterov", "norm": True}

    def run(num_epochs: float, folder: str | None, *, sharded: bool = True) -> str:
        session = start(transport, sharded=sharded, **options)
        checkpointer = None if folder is None else Checkpointer(session, shared_tmp_path / folder, interval=1)
        if checkpointer is not None:
            checkpointer.resume()
        learn(session, num_epochs=num_epochs)
        if checkpointer is not None:
            assert checkpointer.close().failed == 0
        session._hooks.remove()
        return compare_models(session.model, transport, buffers=True)[0]

    expected = run(2, None)
    assert run(1, "sharded") != expected
    assert run(2, "sharded") == expected
    with pytest.raises(AgreedError, match=r"of another model: .*torch\.float64 in 2 shards.* there"):
        run(2, "sharded", sharded=False)
    run(1, "whole", sharded=False)
    with pytest.raises(AgreedError, match=r"of another model: .*torch\.float64 in 2 shards.* here"):
        run(2, "whole")
    transport.close()


@pytest.mark.mpi(4, timeout=200)
def test_an_island_that_made_no_step_gets_the_others_optimizer_state_in_its_own_shards(backend: str) -> None:
    """Also where the shards of a parameter have other lengths, and one has none of it."""
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    options = {"batch_size": 2, "mega_batch": 2, "dispatch": "dynamic", "optimizer_state": "average"}
    session = start(transport, sharded=True, adam=True, **options)
    seen: list[list[bool]] = []
    session.records.append(lambda record: seen.append((record.stats["num_steps"] > 0).tolist()))
    for batch in session.batches(DATA, num_epochs=0.01):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(session.model(batch.x), batch.y).backward()
            session.optimizer.step()
    assert sum(seen[0]) == 2, "both islands had a batch of the first round"
    for parameter in session.model.parameters():
        state = session.optimizer.state[parameter]
        assert {name: value.shape for name, value in state.items() if name != "step"} == dict.fromkeys(
            ("exp_avg", "exp_avg_sq"), parameter.shape
        )
        local: Any = state["exp_avg_sq"]
        values = session.gather((session.rank % 2, local.to_local().tolist()))
        assert all(a == b for a in values for b in values if a[0] == b[0])
    session.close()


@pytest.mark.mpi(4, timeout=200)
def test_ranks_of_an_island_begin_with_one_optimizer_state_or_none(backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    config = Config(island="2", batch_size=16, mega_batch=150)
    mesh = island_mesh(config, transport=transport)

    def begin(loads: bool) -> Session:
        model = shard(make_model(), mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(X[:4]).sum().backward()
        optimizer.step()
        if not loads:
            optimizer.state.clear()
        return Session(model, optimizer, config, transport=transport)

    begin(True)._hooks.remove()
    with pytest.raises(AgreedError, match=r"ranks \[2, 3\] of an island have different entries in their optimizers' states"):
        begin(transport.rank != 3)
    transport.close()


@pytest.mark.mpi(4, timeout=200)
def test_frozen_shards_are_each_rank_s_own(backend: str, shared_tmp_path: Path) -> None:
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    config = Config(island="2", batch_size=16, mega_batch=150, hash_interval=1)
    mesh = island_mesh(config, transport=transport)

    def make() -> Session:
        model = make_model()
        with torch.no_grad():
            model[0].weight.copy_(torch.rand(15, 5, generator=torch.Generator().manual_seed(transport.rank // 2)))
        model[0].requires_grad_(False)
        shard(model, mesh)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Session(model, torch.optim.SGD(trained, lr=0.1), config, transport=transport)

    session = make()
    expected = torch.rand(15, 5, generator=torch.Generator().manual_seed(0))
    learn(session, num_epochs=1)
    # All islands have those of the first one, which do not move.
    assert torch.equal(whole(session.model)[:75], expected.double().reshape(-1))
    checkpointer = Checkpointer(session, shared_tmp_path / "checkpoints", interval=1)
    checkpointer.save()
    assert checkpointer.close().failed == 0
    saved = whole(session.model)
    session._hooks.remove()

    session = make()
    with torch.no_grad():
        session.model[0].weight.to_local().zero_()  # type: ignore[index, union-attr]
    Checkpointer(session, shared_tmp_path / "checkpoints", interval=1).resume()
    assert torch.equal(whole(session.model), saved)
    session.close()


@pytest.mark.mpi(4, timeout=200)
def test_what_cannot_be_merged_by_shards_is_refused_on_all_ranks(backend: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    options = [
        ({"island": "1,3"}, "equally many ranks"),
        ({"micro_batch_size": 4}, "no micro_batch_size, got 4"),
        ({"clip_delta": 1.0}, "no clip_delta"),
        ({"merge_fragments": 2}, "no merge_fragments, got 2"),
        ({"island": "4"}, ""),
    ]
    for given, message in options:
        if message:
            with pytest.raises(AgreedError, match=message):
                start(transport, sharded=True, **given)  # type: ignore[arg-type]
        else:
            start(transport, sharded=True, **given)._hooks.remove()  # type: ignore[arg-type]

    def refuse(model: nn.Module, message: str, **given: Any) -> None:
        with pytest.raises(AgreedError, match=message):
            Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Config(**given), transport=transport)

    mesh = island_mesh(Config(island="2"), transport=transport)
    refuse(shard(make_model(), mesh), "merges without islands need whole ones")
    world = init_device_mesh("cpu", (4,))
    refuse(shard(make_model(), world), r"sharded over ranks \[0, 1, 2, 3\] .* ranks of its island, \[0, 1\]", island="2")
    part = make_model()
    shard(nn.Sequential(part[0]), mesh)
    refuse(part, r"got 1\.bias, 1\.weight, 3\.bias unsharded", island="2")
    # Each rank has another shard of what is frozen, and a checkpoint of whole models has the first one's for all.
    part[0].requires_grad_(False)
    refuse(part, r"only frozen parameters are sharded, such as 0\.weight: shard the trainable ones too", island="2")
    part = make_model()
    shard(nn.Sequential(part[0]), world)
    part[0].requires_grad_(False)
    fully_shard(part, mesh=mesh)
    refuse(part, r"0\.weight is sharded over ranks \[0, 1, 2, 3\]", island="2")
    mixed = shard(make_model(), mesh) if transport.rank < 2 else make_model()
    refuse(mixed, r"is \(\(15, 5\), 'torch.float64 in 2 shards', True\) on rank 0", island="2")
    transport.close()


SCRIPT = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
import hvd_adaptive

torch.manual_seed(0)
x = torch.randn(400, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
config = hvd_adaptive.Config(batch_size=8, mega_batch=200, island="2", backend=sys.argv[1])
fully_shard(model, mesh=hvd_adaptive.island_mesh(config))
session = hvd_adaptive.Session(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)
losses = []
session.records.append(lambda record: losses.append(record.loss))
for batch in session.batches(TensorDataset(x, (x.sum(1) > 0).long()), num_epochs=4):
    if session.round == 5 and len(sys.argv) > 2:
        out = model.forward(batch.x) if sys.argv[2] == "forward" else None
    with session.step(batch):
        session.optimizer.zero_grad()
        batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
        batch.loss.backward()
        session.optimizer.step()
assert losses[-1] < 0.8 * losses[0], losses
print("learned on", session.rank, flush=True)
session.close()
"""


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_a_script_gets_its_mesh_before_its_session(run_job: Any, tmp_path: Path, backend: str) -> None:
    path = tmp_path / "own_loop.py"
    path.write_text(SCRIPT)
    if backend == "torch":
        job = run_job([*torchrun(sys.executable, 2), str(path), backend], timeout=200)
    else:
        job = run_job([sys.executable, str(path), backend], np=2, timeout=200)
    assert job.returncode == 0 and not job.leftover, job.describe()
    assert job.stdout.count("learned on") == 2, job.describe()
