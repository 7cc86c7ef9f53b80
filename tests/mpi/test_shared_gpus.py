"""Ranks that share a GPU, by a UUID that is handed in: all that crosses the wire goes through host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pretended_cuda
import pytest
import torch
from pretended_cuda import Log, is_on, recording
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.cluster import device as devices
from hvd_adaptive.comm import connect
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session.session import Session
from hvd_adaptive.wrap.shared_gpu import watch_for_shared_gpus


def on_one(index: int) -> str:
    return "GPU-7"


def on_its_own(index: int) -> str:
    from mpi4py import MPI

    return f"GPU-{MPI.COMM_WORLD.Get_rank()}"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, own_routes: None) -> Iterator[list[bool]]:
    """Whether each tensor that Horovod's library was given is on the GPU. Horovod says that it has NCCL."""
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    seen: list[bool] = []
    check = mpi_ops._check_function

    def watching(factory: Any, tensor: torch.Tensor) -> Any:
        seen.append(is_on(tensor))
        return check(factory, tensor)

    with pretended_cuda.pretended_cuda(monkeypatch), recording(Log()):
        monkeypatch.setattr(mpi_ops, "_check_function", watching)
        monkeypatch.setattr(hvd, "nccl_built", lambda: True)
        yield seen


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to("cuda")


def train(options: dict[str, Any]) -> str:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config(batch_size=8, mega_batch=64, **options)
    session = Session(model, optimizer, config, transport=connect(stall_limit_s=60))
    for batch in session.batches(TensorDataset(torch.randn(128, 4), torch.randint(0, 2, (128,)))):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    return model_hash(model, buffers=False)


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    "options",
    [
        {"dispatch": "equal"}, {"dispatch": "equal", "merge_fragments": 2}, {"dispatch": "equal", "compression": "maxmin:4"},
        {"strategy": "sync", "batch_size_rule": "fixed"}, {"strategy": "horovod"},
        {"strategy": "sync", "batch_size_rule": "fixed", "compression": "maxmin:4"},
    ],
    ids=str,
)  # fmt: skip
def test_no_collective_of_a_session_takes_a_tensor_of_a_shared_gpu(
    options: dict[str, Any], given: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "gpu_uuid", on_its_own)
    alone = train(options)
    # Alone on its GPU, a rank gives Horovod what is there.
    assert any(given) and "share the GPU" not in caplog.text
    given.clear()
    monkeypatch.setattr(devices, "gpu_uuid", on_one)
    together = train(options)
    assert given and not any(given)
    assert together == alone
    if on_its_own(0) == "GPU-0":
        assert "ranks 0, 1 on" in caplog.text and "share the GPU GPU-7" in caplog.text


@pytest.mark.mpi(2)
def test_all_of_a_scripts_collectives_go_through_the_host(given: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    import horovod.torch as hvd

    transport = connect(stall_limit_s=60)
    monkeypatch.setattr(devices, "gpu_uuid", on_one)
    notes: list[str] = []
    watch_for_shared_gpus(notes.append)
    rank = hvd.rank()
    # Nothing of the GPU is known, or asked, before the first exchange.
    assert hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum, name="host").item() == 3.0 and not notes
    model = make_model()
    with torch.no_grad():
        model[0].weight.add_(rank)  # type: ignore[operator,union-attr]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert len(notes) == 1 and "ranks 0, 1 on" in notes[0] and "MPS" in notes[0]
    own = torch.arange(3.0 + rank, device="cuda") + 10 * rank
    before = own.clone()
    assert hvd.allreduce(own[:3].contiguous(), op=hvd.Sum, name="sum").tolist() == [10.0, 12.0, 14.0]
    assert torch.equal(own, before)
    gathered = hvd.allgather(own, name="all")
    assert gathered.is_cuda and gathered.tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0]
    sizes = torch.tensor([1, 2], dtype=torch.int32)
    received, splits = hvd.alltoall(torch.full((3,), float(rank), device="cuda"), splits=sizes, name="swap")
    assert received.is_cuda and received.tolist() == ([0.0, 1.0] if rank == 0 else [0.0, 0.0, 1.0, 1.0])
    assert splits.tolist() == [[1, 1], [2, 2]][rank]
    both = [torch.ones(2, device="cuda"), torch.full((3,), float(rank), device="cuda")]
    summed = hvd.grouped_allreduce(both, op=hvd.Sum, name="both")
    assert [one.tolist() for one in summed] == [[2.0, 2.0], [1.0, 1.0, 1.0]] and all(one.is_cuda for one in summed)
    half = hvd.reducescatter(torch.ones(4, device="cuda"), op=hvd.Sum, name="half")
    assert half.is_cuda and half.tolist() == [2.0, 2.0]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    torch.manual_seed(rank)
    labels = torch.zeros(8, dtype=torch.long, device="cuda")
    nn.functional.cross_entropy(model(torch.randn(8, 4, device="cuda")), labels).backward()
    optimizer.step()
    assert len(set(hvd.allgather_object(model_hash(model, buffers=False), name="hashes"))) == 1
    assert given and not any(given) and len(notes) == 1
    transport.close()
