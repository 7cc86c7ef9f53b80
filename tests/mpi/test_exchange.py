"""Codec x reducer over Horovod and torch.distributed: the same bits on every rank.

In whichever group, chunk or fusion buffer they met.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from sums import SPECS, assert_near

from hvd_adaptive.comm import connect
from hvd_adaptive.compress import parse_codec
from hvd_adaptive.compress.feedback import ErrorFeedback
from hvd_adaptive.exchange.pipeline import run_pipeline
from hvd_adaptive.exchange.reducers import Job, allreduce, hierarchical, scatter_reduce_allgather


def values(rank: int, num: int) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(rank))


def check(transport: Any, spec: str, name: str, run: Any, *, nums: tuple[int, ...] = (1, 30_011)) -> None:
    for num in nums:
        for dtype in (torch.float32, torch.float64) if spec in ("fp16", "maxmin:4") else (torch.float32,):
            flat = values(transport.rank, num).to(dtype)
            job = Job(flat=flat, name=f"{name}.{spec}.{num}.{dtype}", codec=parse_codec(spec), key=num, chunk_elements=8192)
            run_pipeline(run(job))
            others = transport.allgather_object(flat.numpy().tobytes())
            assert all(other == others[0] for other in others)
            exact = sum(values(rank, num).to(dtype).double() for rank in range(transport.world_size))
            assert_near(flat, exact, spec)


@pytest.mark.mpi(2, 3, 4)
def test_sra_and_allreduce_agree_bit_for_bit_on_all_ranks(num_ranks: int, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    for spec in SPECS:
        check(transport, spec, "sra", lambda job: scatter_reduce_allgather(transport, job))
        if parse_codec(spec).wire_dtype is not None:
            check(transport, spec, "allreduce", lambda job: allreduce(transport, job))
    transport.close()


@pytest.mark.mpi(4)
def test_hierarchical_over_two_hosts(num_ranks: int, backend: str, pretend_host: Any) -> None:
    from mpi4py import MPI

    name = f"host{MPI.COMM_WORLD.Get_rank() // 2}"
    pretend_host(name)
    assert socket.gethostname() != name
    transport = connect(stall_limit_s=60, backend=backend, groups=True)
    assert transport.local_size == 2
    host, cross = transport.split(transport.rank // 2), transport.split(2 + transport.local_rank)
    again = transport.split(transport.rank // 2)
    assert (host.rank, host.world_size, again.rank) == (transport.local_rank, 2, transport.local_rank)
    assert (cross.rank, cross.world_size) == (transport.rank // 2, 2)
    for spec in SPECS:
        check(transport, spec, "hierarchical", lambda job: hierarchical(host, cross, job))
    whole = transport.split(0)
    assert whole.world_size == 4
    transport.close()


@pytest.mark.mpi(3)
def test_layers_larger_than_the_fusion_buffer(num_ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "65536")
    transport = connect(stall_limit_s=60, backend=backend)
    for spec in ("maxmin:4", "fp16"):
        for reducer in (scatter_reduce_allgather, allreduce):
            if reducer is allreduce and spec != "fp16":
                continue
            flat = values(transport.rank, 300_007)
            job = Job(flat=flat, name=f"large.{spec}", codec=parse_codec(spec), key=1, chunk_elements=1 << 22)
            run_pipeline(reducer(transport, job))
            assert_near(flat, sum(values(rank, 300_007).double() for rank in range(3)), spec)
            others = transport.allgather_object(flat.numpy().tobytes())
            assert all(other == others[0] for other in others)
    transport.close()


@pytest.mark.mpi(2)
def test_real_ranks_give_the_simulated_ranks_bits(num_ranks: int, backend: str) -> None:
    """Nothing of a result depends on what carried the bytes; residuals too."""
    from hvd_adaptive.comm.threads import LocalWorld

    def body(transport: Any) -> torch.Tensor:
        feedback = ErrorFeedback()
        for step in range(3):
            flat = values(transport.rank + 10 * step, 20_001)
            codec = parse_codec("maxmin:2")
            job = Job(flat=flat, name="x", codec=codec, key=step, chunk_elements=4096, feedback=feedback)
            run_pipeline(scatter_reduce_allgather(transport, job))
        return flat

    transport = connect(stall_limit_s=60, backend=backend)
    assert torch.equal(body(transport), LocalWorld(2).run(body)[0])
    if backend == "horovod":
        with pytest.raises(RuntimeError, match="connect with groups=True"):
            transport.split(0)
    transport.close()


@pytest.mark.mpi(2)
def test_ranks_whose_codecs_differ_fail_together(num_ranks: int, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    codec = parse_codec(f"maxmin:{4 + transport.rank}")
    job = Job(flat=values(0, 900), name="x", codec=codec, key=1, chunk_elements=4096)
    with pytest.raises(RuntimeError, match=r"the ranks sent .* bytes, but .* were expected"):
        run_pipeline(scatter_reduce_allgather(transport, job))
    transport.close()
