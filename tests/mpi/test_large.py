"""What is too large for one of Horovod's collectives goes in parts; here the limits are small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvd_adaptive.comm import connect, horovod_collectives
from hvd_adaptive.comm.island_world import IslandWorld, ShardWorld
from hvd_adaptive.compress.policy import TensorInfo
from hvd_adaptive.exchange.buckets import Slot, SparseBucket
from hvd_adaptive.exchange.pipeline import run_pipeline

SUMMED = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
TYPES = [*SUMMED, torch.bfloat16, torch.uint8, torch.bool]


def values(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def spy(monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> list[str]:
    """Returns a list which gets the names of a function's calls."""
    names: list[str] = []
    original = getattr(target, name)

    def call(*arguments: Any, **options: Any) -> Any:
        names.append(options["name"])
        return original(*arguments, **options)

    monkeypatch.setattr(target, name, call)
    return names


def limit(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    monkeypatch.setattr(horovod_collectives, "MOST_ELEMENTS", num)


@pytest.mark.mpi(2, 3)
def test_sums_in_parts_have_the_bits_of_whole_ones(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transport: Any = connect(stall_limit_s=60, backend="horovod")
    names = spy(monkeypatch, transport._hvd, "allreduce_async_")
    for dtype in SUMMED:
        # Whole numbers: their sum does not depend on the order, which a library may choose by the place.
        own = values(transport.rank, torch.int32, 5, 201).to(dtype)
        for shape, num_parts in (((5, 201), 11), ((100,), 1), ((0,), 1), ((), 1)):
            flat = own.view(-1)[: int(np.prod(shape))].view(shape)
            whole, cut = flat.clone(), flat.clone()
            if flat.dim():
                limit(monkeypatch, 1 << 30)
                transport.allreduce_sum_(whole, f"sum.{dtype}")
                limit(monkeypatch, 100)
                names.clear()
                transport.allreduce_sum_(cut, f"sum.{dtype}")
                assert names == [f"sum.{dtype}", *(f"sum.{dtype}.part{index}" for index in range(1, num_parts))]
                assert torch.equal(cut, whole)
                assert not cut.numel() or not torch.equal(cut, flat)
    for dtype in (torch.int32, torch.int64):
        cut = values(transport.rank, dtype, 333)
        pending = transport.allreduce_max_async_(cut, "most")
        while not pending.done():
            pass
        assert pending.wait() is cut
        others = [values(rank, dtype, 333) for rank in range(transport.world_size)]
        assert torch.equal(cut, torch.stack(others).amax(0))
    # What is under way together.
    limit(monkeypatch, 7)
    tensors = [torch.full((50,), float(index + transport.rank)) for index in range(4)]
    pendings = [transport.allreduce_sum_async_(tensor, f"together.{index}") for index, tensor in enumerate(tensors)]
    for index, pending in reversed(list(enumerate(pendings))):
        assert (pending.wait() == sum(index + rank for rank in range(transport.world_size))).all()
    transport.close()


@pytest.mark.mpi(2)
def test_sums_of_other_sizes_fail_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 100)
    transport: Any = connect(stall_limit_s=60, backend="horovod")
    with pytest.raises(RuntimeError, match="Mismatched ALLREDUCE tensor shapes"):
        transport.allreduce_sum_(torch.zeros(90 + 200 * transport.rank), "other")
    transport.close()


@pytest.mark.mpi(3)
def test_broadcasts_in_parts_bring_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 100)
    transport: Any = connect(stall_limit_s=60, backend="horovod")
    names = spy(monkeypatch, transport._hvd, "broadcast")

    def all_of(rank: int) -> list[Tensor]:
        tensors = [values(rank, dtype, 7, 9, 5) for dtype in TYPES]
        strided = [values(rank, dtype, 9, 40).t() for dtype in TYPES]
        return [*tensors, *strided, values(rank, torch.bfloat16), values(rank, torch.float32, 0), values(rank, torch.int64, 10)]

    own = all_of(transport.rank)
    parameter = nn.Parameter(values(transport.rank, torch.float32, 300))
    transport.broadcast_([*own, parameter])
    for tensor, expected in zip(own, all_of(0), strict=True):
        assert torch.equal(tensor, expected) and tensor.stride() == expected.stride()
    assert torch.equal(parameter.detach(), values(0, torch.float32, 300)) and parameter.requires_grad
    assert len(set(names)) == len(names)
    # 315 elements of 8 bytes; 10 of them are less than the limit.
    at = TYPES.index(torch.float64)
    assert [name for name in names if name.startswith(f"broadcast.{at}")] == [
        f"broadcast.{at}", *(f"broadcast.{at}.part{index}" for index in range(1, 26))
    ]
    small = 2 * len(TYPES) + 2
    assert [name for name in names if name.startswith(f"broadcast.{small}")] == [f"broadcast.{small}"]
    transport.close()


@pytest.mark.mpi(4, timeout=200)
def test_an_island_is_told_in_parts(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 1000)
    transport: Any = connect(stall_limit_s=60, backend=backend, groups=True)
    islands = IslandWorld(transport, np.array([0, 0, 1, 1]))
    names = spy(monkeypatch, type(islands.inside._group), "allgather_bytes_async")
    for dtype in TYPES:
        names.clear()
        tensor = values(transport.rank, dtype, 601)
        islands.inside.tell_(tensor, "model")
        assert torch.equal(tensor, values(transport.rank // 2 * 2, dtype, 601))
        parts = -(-tensor.nbytes // 1000)
        assert names == ["model.inside", *(f"model.part{index}.inside" for index in range(1, parts))]
    for dtype in (torch.float32, torch.float64):
        tensor = values(transport.rank, torch.int32, 5003).to(dtype)
        islands.allreduce_sum_(tensor, "sum")
        assert torch.equal(tensor, values(0, torch.int32, 5003).to(dtype) + values(2, torch.int32, 5003).to(dtype))
    shards = values(transport.rank, torch.float32, 2001)
    ShardWorld(islands).broadcast_([shards])
    assert torch.equal(shards, values(transport.rank % 2, torch.float32, 2001))
    transport.close()


def bucket(rank: int, dtype: torch.dtype, num_entries: int) -> SparseBucket:
    parameter = nn.Parameter(torch.zeros(500, 3, dtype=dtype))
    if num_entries:
        rows = torch.randperm(500, generator=torch.Generator().manual_seed(rank))[:num_entries]
        parameter.grad = torch.sparse_coo_tensor(rows[None], values(rank, dtype, num_entries, 3), parameter.shape)
    result = SparseBucket("rows", Slot(TensorInfo("rows", (500, 3)), parameter, 1), 1)
    result.take(result.slots[0])
    return result


@pytest.mark.mpi(3, timeout=200)
def test_sparse_gradients_in_parts_have_the_bits_of_whole_ones(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transport: Any = connect(stall_limit_s=60, backend=backend)
    names = spy(monkeypatch, type(transport), "allgather_bytes_async")
    total: Any = None  # SparseBucket has no use for it
    for dtype in (torch.float16, torch.float32, torch.float64):
        # Rows of 14, 20 and 32 bytes with their index; one rank has none, or one all.
        for counts in ((1, 77, 300), (0, 0, 211), (0, 0, 0), (5, 5, 5)):
            sums = []
            for most in (1 << 30, 1000):
                limit(monkeypatch, most)
                names.clear()
                one = bucket(transport.rank, dtype, counts[transport.rank])
                run_pipeline(one.tasks(total, transport, 0.5))
                gradient = one.slots[0].parameter.grad
                assert gradient is not None
                sums.append(gradient.to_dense())
                most_bytes = 8 + max(counts) * (8 + 3 * dtype.itemsize)
                parts = 1 if most > 1000 else -(-(most_bytes + -most_bytes % 8) // 328)
                assert names == ["rows", *(f"rows.part{index}" for index in range(1, parts))]
            assert torch.equal(*sums)
            expected = sum(
                0.5 * bucket(rank, torch.float64, count).slots[0].parameter.grad.to_dense()  # type: ignore[union-attr]
                for rank, count in enumerate(counts)
            )
            assert torch.allclose(sums[0].double(), expected, rtol=1e-2, atol=0.3)  # type: ignore[arg-type]
    transport.close()


@pytest.mark.mpi(2)
def test_gathers_that_horovod_cannot_count_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    transport: Any = connect(stall_limit_s=60, backend="horovod")
    monkeypatch.setattr(horovod_collectives, "_MOST_GATHERED_BYTES", 100)
    own = torch.zeros(50 + transport.rank, dtype=torch.uint8)
    with pytest.raises(ValueError, match="at most 100 bytes together, which is all that Horovod counts, got 101: use backend"):
        transport.allgather_bytes_async(own, receive_bytes=[50, 51], name="gather")
    sent = torch.zeros(102, dtype=torch.uint8)
    with pytest.raises(ValueError, match="got 102"):
        transport.alltoall_bytes_async(sent, send_bytes=[51, 51], receive_bytes=[51, 51], name="alltoall")
    # The limit itself is not refused, and the ranks are still together.
    gathered = transport.allgather_bytes_async(own[:50], receive_bytes=[50, 50], name="gather").wait()
    assert gathered.numel() == 100
    transport.close()
