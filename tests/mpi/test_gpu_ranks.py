"""Two ranks on a real GPU: over host memory, and over NCCL, which is told that each is on a host of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.cluster import device as devices
from hvd_adaptive.comm import connect
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and a torch that is built for CUDA: torch sees none"
    ),
]


@pytest.fixture(params=["host", "nccl"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, own_routes: None) -> str:
    """How sums travel."""
    import horovod.torch as hvd
    from mpi4py import MPI

    torch.cuda.set_device(0)
    if request.param == "nccl":
        if not hvd.nccl_built():
            pytest.skip("needs a Horovod with NCCL")
        rank = MPI.COMM_WORLD.Get_rank()
        # NCCL refuses two ranks on one GPU of one host.
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
        monkeypatch.setattr(devices, "gpu_uuid", lambda index: f"GPU-{rank}")
    return str(request.param)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).to("cuda")


def train(transport: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, *, amp: bool = False, **options: Any) -> Any:
    """Two epochs; returns the records and the model."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(640, 8, generator=generator)
    y = (x @ torch.randn(8, 4, generator=generator)).argmax(1)
    model = make_model()
    settings: dict[str, Any] = {"batch_size": 16, "mega_batch": 160, "hash_interval": 1} | options
    if settings.get("strategy", "local") == "local":
        settings.setdefault("outer_step", "none")
    lr = 0.05 if optimizer is torch.optim.SGD else 0.005
    session = Session(model, optimizer(model.parameters(), lr=lr), Config(**settings), transport=transport)
    records: list[Any] = []
    session.records.append(records.append)
    for batch in session.batches(TensorDataset(x, y), num_epochs=4):
        with session.step(batch):
            session.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            session.optimizer.step()
    session.close()
    assert session.num_samples == 4 * len(x)
    return records, model


@pytest.mark.mpi(2, timeout=300)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"compression": "maxmin:4"}, {"compression": "topk:0.1"}, {"compression": "normal:2"}, {"compression": "bf16"},
        {"compression": "powersgd:2"}, {"merge_fragments": 2}, {"merge_fragments": 2, "compression": "maxmin:4"},
        {"outer_state": "host", "outer_step": "nesterov"}, {"optimizer": torch.optim.AdamW}, {"amp": True},
        {"optimizer": torch.optim.AdamW, "compression": "maxmin:4", "outer_step": "cautious"},
        {"strategy": "sync"}, {"strategy": "sync", "compression": "maxmin:4"}, {"strategy": "sync", "compression": "topk:0.1"},
        {"strategy": "horovod"},
    ],
    ids=str,
)  # fmt: skip
def test_ranks_on_a_gpu_learn_and_hold_the_same_bits(options: dict[str, Any], route: str) -> None:
    transport = connect(stall_limit_s=60)
    records, model = train(transport, **options)
    assert len(set(transport.allgather_object(model_hash(model, buffers=False)))) == 1
    assert records[-1].loss < 0.8 * records[0].loss, [record.loss for record in records]
    transport.close()


@pytest.mark.mpi(2, timeout=300)
def test_sums_and_parts_of_a_gpu_are_right(route: str) -> None:
    transport = connect(stall_limit_s=60)
    rank = transport.rank
    if route == "host":
        transport.exchange_through_host()
    for num in (1, 1000, 1 << 22):
        own = torch.arange(num, dtype=torch.float32, device="cuda").remainder_(1024).add_(rank)
        expected = torch.arange(num, dtype=torch.float32).remainder_(1024) * 2 + 1
        transport.allreduce_sum_(own, f"sum {num}")
        assert torch.equal(own.cpu(), expected)
    parts = torch.arange(10, dtype=torch.uint8, device="cuda") + 100 * rank
    sends, receives = ([3, 7], [3, 2]) if rank == 0 else ([2, 8], [7, 8])
    received = transport.alltoall_bytes_async(parts, send_bytes=sends, receive_bytes=receives, name="swap").wait()
    assert received.tolist() == ([0, 1, 2, 100, 101] if rank == 0 else [3, 4, 5, 6, 7, 8, 9, *range(102, 110)])
    gathered = transport.allgather_bytes_async(parts[: 1 + rank], receive_bytes=[1, 2], name="all").wait()
    assert received.is_cuda and gathered.is_cuda and gathered.tolist() == [0, 100, 101]
    # A sum that is begun while the GPU still computes its terms.
    for turn in range(20):
        term = torch.full((1 << 16,), float(turn), device="cuda")
        torch.cuda._sleep(1_000_000)
        term += rank
        pending = transport.allreduce_sum_async_(term, f"late {turn}")
        assert pending.wait().unique().tolist() == [2 * turn + 1]
    transport.close()


@pytest.mark.mpi(2, timeout=300)
def test_a_scripts_own_horovod_calls_work_on_a_gpu(route: str) -> None:
    import horovod.torch as hvd

    from hvd_adaptive.wrap.shared_gpu import watch_for_shared_gpus

    transport = connect(stall_limit_s=60)
    notes: list[str] = []
    watch_for_shared_gpus(notes.append)
    rank, model = hvd.rank(), make_model()
    with torch.no_grad():
        model[0].weight.add_(rank)  # type: ignore[operator,union-attr]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    both = [torch.ones(2, device="cuda"), torch.full((3,), float(rank), device="cuda")]
    assert [one.tolist() for one in hvd.grouped_allreduce(both, op=hvd.Sum, name="both")] == [[2.0, 2.0], [1.0, 1.0, 1.0]]
    assert hvd.allgather(torch.arange(1.0 + rank, device="cuda"), name="all").tolist() == [0.0, 0.0, 1.0]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    torch.manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        labels = torch.zeros(8, dtype=torch.long, device="cuda")
        nn.functional.cross_entropy(model(torch.randn(8, 8, device="cuda")), labels).backward()
        optimizer.step()
    assert len(set(hvd.allgather_object(model_hash(model, buffers=False), name="hashes"))) == 1
    assert len(notes) == (1 if route == "host" else 0)
    transport.close()
