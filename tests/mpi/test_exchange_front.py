"""The exchange's front over Horovod and torch.distributed: a model's layers by policy, in groups, with residuals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_adaptive.comm import connect
from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.exchange.exchange import Exchange

MODEL = [
    TensorInfo("a.weight", (100, 64)),
    TensorInfo("a.bias", (100,)),
    TensorInfo("b.weight", (50, 100)),
    TensorInfo("b.bias", (50,)),
    TensorInfo("c.weight", (70, 50)),
    TensorInfo("d.weight", (200, 300)),
]
NUM = sum(tensor.size for tensor in MODEL)
POLICY = "maxmin:4; b.weight=powersgd:2; c*=normal:1"


def values(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUM, generator=torch.Generator().manual_seed(100 * step + rank))


def train(transport: Any, reducer: str) -> tuple[torch.Tensor, Exchange]:
    """Three rounds; all ranks must hold the same bits after each."""
    exchange = Exchange(transport, parse_policy(POLICY), reducer=reducer, error_feedback=True, chunk_elements=8192)
    received = torch.zeros(NUM)
    for step in range(3):
        flat = values(transport.rank, step)
        exchange.sum_(flat, "parameters", step=step, tensors=MODEL)
        others = transport.allgather_object(flat.numpy().tobytes())
        assert all(other == others[0] for other in others)
        received += flat
    return received, exchange


@pytest.mark.mpi(2)
def test_layers_by_policy(num_ranks: int, backend: str) -> None:
    transport = connect(stall_limit_s=60, backend=backend)
    inputs = sum(values(rank, step) for rank in range(2) for step in range(3))
    received, exchange = train(transport, "sra")
    exact, got = (dict(zip([t.name for t in MODEL], x.split([t.size for t in MODEL]), strict=True)) for x in (inputs, received))
    assert torch.allclose(got["a.bias"], exact["a.bias"], atol=1e-5)
    assert 0.001 < float((got["d.weight"] - exact["d.weight"]).norm() / exact["d.weight"].norm()) < 0.2
    assert exchange.reducer == "sra"
    transport.close()


@pytest.mark.mpi(4)
def test_over_two_hosts(num_ranks: int, backend: str, pretend_host: Any) -> None:
    from mpi4py import MPI

    pretend_host(f"host{MPI.COMM_WORLD.Get_rank() % 2}")
    transport = connect(stall_limit_s=60, backend=backend, groups=None)
    received, exchange = train(transport, "by-host")
    inputs = sum(values(rank, step) for rank in range(4) for step in range(3))
    assert float((received[-60000:] - inputs[-60000:]).norm() / inputs[-60000:].norm()) < 0.15
    assert exchange.reducer == "hierarchical"
    transport.close()


def test_bench_comm(run_job: Any, tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    options = ["--mb", "1", "--repeat", "2", "--rate-mbit", "1000", "--json", str(file)]
    codecs = "horovod-fp32;horovod-fp16;maxmin:4;powersgd:2"
    job = run_job([sys.executable, "-m", "hvd_adaptive", "bench", "comm", *options, "--codecs", codecs], np=2, timeout=300)
    assert job.returncode == 0 and not job.leftover, job.describe()
    content = json.loads(file.read_text())
    fp32, fp16, coded, _ = content["rows"]
    assert content["ranks"] == 2 and content["ranks_per_host"] == 2
    assert fp32["error"] < 1e-6 < fp16["error"] < 1e-3 and 0.05 < coded["error"] < 0.3
    assert fp32["wire_seconds"] == pytest.approx(2 * fp16["wire_seconds"], rel=1e-6)
    assert fp32["wire_seconds"] == pytest.approx(0.008 * 1538 / 1448, rel=1e-3)
    assert fp32["bits"] == 32 and coded["bits"] < 4.2 and coded["reducer"] == "sra"
    assert coded["break_even_mbit"] > 1 and "decode" not in job.stdout and "Mbit/s" in job.stdout

    job = run_job([sys.executable, "-m", "hvd_adaptive", "bench", "comm", "--codecs", "maxmin:0"], np=2, timeout=300)
    assert job.returncode == 2 and job.stderr.count("hvd-adaptive: error:") == 1, job.describe()
    assert "bits must be in [1, 8], got 0" in job.stderr and "Traceback" not in job.stderr, job.describe()
