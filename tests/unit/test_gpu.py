"""What only a GPU can show. Where torch sees none, each test is skipped and says so; CI may skip these alone."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress.codec import compile_kernels
from hvd_adaptive.compress.parse import parse_codec
from hvd_adaptive.config import Config
from hvd_adaptive.engine import device_copies
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session.session import Session

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and a torch that is built for CUDA: torch sees none")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("spec", ["maxmin:4", "maxmin:8", "normal:2", "fp16", "topk:0.1"])
def test_a_codec_gives_the_processors_bytes(spec: str, gpu: torch.device) -> None:
    codec = parse_codec(spec)
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    payloads, decoded = [], []
    for device in (torch.device("cpu"), gpu):
        payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8, device=device)
        codec.encode_(values.to(device, copy=True), payload, key=7)
        out = torch.zeros(len(values), device=device)
        codec.decode_(payload, out, add=0)
        payloads.append(payload.cpu())
        decoded.append(out.cpu())
    assert torch.equal(decoded[0], decoded[1])
    assert torch.equal(payloads[0], payloads[1])


@pytest.mark.parametrize("part", ["levels", "peers", "squares", "large", "large_decoded"])
def test_the_kernels_give_the_references_bits(part: str) -> None:
    """The same assertions as in Triton's interpreter (tests/unit/test_triton.py)."""
    script = Path(__file__).parents[1] / "support" / "triton_bits.py"
    done = subprocess.run([sys.executable, str(script), part, "cuda"], capture_output=True, text=True, timeout=900)
    assert done.stdout.strip() == f"{part}: same bits", done.stderr[-3000:]


@pytest.mark.parametrize("spec", ["maxmin:4", "normal:2", "topk:0.1", "topk:0.1,sampled"])
def test_no_codec_waits_for_the_gpu(spec: str, gpu: torch.device) -> None:
    codec = parse_codec(spec)
    values = torch.randn(200_000, device=gpu)
    residual, out = torch.zeros_like(values), torch.empty_like(values)
    payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8, device=gpu)
    compile_kernels(codec, gpu, error_feedback=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode_(values, payload, key=1, residual=residual, weight=0.5)
        codec.decode_(payload, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out + residual, values * 0.5) or not spec.startswith("topk")


def train(transport: LocalTransport, device: torch.device, **options: Any) -> tuple[Session, nn.Module]:
    torch.manual_seed(0)
    x = torch.randn(400, 6, dtype=torch.float64)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = Session(model, optimizer, Config(batch_size=16, mega_batch=100, hash_interval=1, **options), transport=transport)
    for batch in session.batches(data, num_epochs=2):
        assert batch.x.device.type == batch.y.device.type == device.type
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    return session, copy.deepcopy(model).cpu()


def test_a_session_computes_what_it_does_on_the_processor(gpu: torch.device) -> None:
    (_, expected), = LocalWorld(1).run(lambda t: train(t, torch.device("cpu")))
    (session, model), = LocalWorld(1).run(lambda t: train(t, gpu))
    assert session.num_samples == 800
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"compression": "maxmin:4"}, {"merge_fragments": 2}])
def test_ranks_hold_the_same_bits(options: dict[str, Any], gpu: torch.device) -> None:
    results = LocalWorld(2).run(lambda t: train(t, gpu, **options))
    assert len({model_hash(model) for _, model in results}) == 1
    assert results[0][0].num_samples == 800


def test_a_batch_that_does_not_fit_comes_again_in_parts(gpu: torch.device) -> None:
    model = nn.Linear(6, 2, dtype=torch.float64, device=gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, Config(batch_size=16, mega_batch=100), transport=LocalTransport())
    sizes = []
    for batch in session.batches(TensorDataset(torch.randn(200, 6, dtype=torch.float64)), num_epochs=1):
        with session.step(batch):
            optimizer.zero_grad()
            if batch.num_samples > 8:
                torch.empty(1 << 50, device=gpu)
            model(batch.x[0]).square().mean().backward()
            optimizer.step()
            sizes.append(batch.num_samples)
    session.close()
    assert sum(sizes) == 200 and max(sizes) <= 8


def test_a_session_may_run_on_a_stream_of_its_own(gpu: torch.device) -> None:
    (_, expected), = LocalWorld(1).run(lambda t: train(t, torch.device("cpu")))

    def body(transport: LocalTransport) -> tuple[Session, nn.Module]:
        stream = torch.cuda.Stream(gpu)
        with torch.cuda.stream(stream):
            result = train(transport, gpu)
        stream.synchronize()
        return result

    (_, model), = LocalWorld(1).run(body)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9)


def test_a_model_has_one_hash_wherever_it_is(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_PART_BYTES", 1000)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40))
    assert model_hash(model) == model_hash(copy.deepcopy(model).to(gpu))


def test_seconds_are_the_gpus_and_claims_stay_one_step_ahead(gpu: torch.device) -> None:
    model = nn.Linear(6, 2, device=gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, Config(batch_size=16, mega_batch=320), transport=LocalTransport())
    records: list[Any] = []
    session.records.append(records.append)
    ends: list[Any] = []
    start = time.perf_counter()
    for number, batch in enumerate(session.batches(TensorDataset(torch.randn(320, 6)))):
        if number >= 2:
            assert ends[number - 2].query()
        with session.step(batch):
            optimizer.zero_grad()
            batch.loss = model(batch.x[0]).square().mean()
            batch.loss.backward()
            optimizer.step()
            torch.cuda._sleep(20_000_000)
        event = torch.cuda.Event()
        event.record()
        ends.append(event)
    seconds = time.perf_counter() - start
    session.close()
    assert 0.7 * seconds < float(records[0].stats["busy_s"].sum()) < seconds
    assert records[0].loss is not None
