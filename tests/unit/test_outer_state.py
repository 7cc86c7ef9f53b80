"""The global model and the velocity in host memory: the same bits, and the bytes a parameter that docs/merging.md promises."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretended_cuda
import pytest
import torch
from pretended_cuda import Log, is_on, recording
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.algorithm import outer_step
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine import host_state
from hvd_adaptive.session.session import Session

# Several pieces, the last one cut.
SIZE, PIECE = 50, 1000
# Ranks that are threads share torch's generator.
SEEDED = threading.Lock()
DOCS = Path(__file__).parents[2] / "docs" / "merging.md"


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_state, "PIECE", PIECE)
    monkeypatch.setattr(outer_step, "_HOST_CHUNK", PIECE)
    with pretended_cuda.pretended_cuda(monkeypatch):
        yield


def begin(
    config: Config, dtype: torch.dtype = torch.float32, size: int = SIZE, transport: LocalTransport | None = None
) -> tuple[Session, Any]:
    with SEEDED:
        torch.manual_seed(0)
        model = nn.Linear(size, size, bias=False, dtype=dtype).to("cuda")
        data = TensorDataset(torch.randn(128, size, dtype=dtype), torch.randn(128, size, dtype=dtype))
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport or LocalTransport()), data


def train(session: Session, data: Any, num_epochs: float) -> None:
    for batch in session.batches(data, num_epochs=num_epochs):
        with session.step(batch):
            session.optimizer.zero_grad()
            (session.model(batch.x) - batch.y).square().mean().backward()
            session.optimizer.step()


def config(**options: Any) -> Config:
    return Config(batch_size=16, mega_batch=64, outer_step="nesterov", **options)


@pytest.mark.parametrize("outer", ["nesterov", "momentum", "cautious", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_are_those_of_the_device(outer: str, dtype: torch.dtype) -> None:
    found = []
    with recording(Log()):
        for place in ("device", "host"):
            options = {"outer_step": outer, "outer_state": place}
            session, data = begin(Config(batch_size=16, mega_batch=64, **options), dtype)
            train(session, data, 1.0)
            state = session.state_dict()
            session.load_state_dict(state)
            train(session, data, 2.0)
            (group,) = session._strategy.flat_model.parameter_groups
            assert is_on(group.delta) and is_on(group.weights) is (place == "device")
            velocity = session._strategy.merge.outer.velocity
            assert bool(velocity) == (outer != "none")
            assert all(is_on(v) is (place == "device") for v in velocity.values())
            found.append((next(session.model.parameters()).detach().cpu(), group.weights.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("codec", ["fp16", "maxmin:4", "topk:0.1", "powersgd:2"])
def test_what_codecs_have_lost_is_on_the_host_too(codec: str) -> None:
    def body(transport: LocalTransport, place: str) -> tuple[Any, ...]:
        with recording(Log()) as log:
            session, data = begin(config(compression=codec, dispatch="equal", outer_state=place), transport=transport)
            train(session, data, 1.0)
            session.load_state_dict(session.state_dict())
            train(session, data, 2.0)
            kept = session.state_dict()["own"]["strategy"]["compressed"]["exchange"]["residuals"]
            assert kept and all(is_on(r) is (place == "device") and r.any() for r in kept.values())
            assert place == "device" or all(r.is_pinned() for r in kept.values())
            wrong = [line for line in log.lines("start") if any(word in line for word in (" mix ", " race ", " pageable "))]
            return next(session.model.parameters()).detach().cpu(), [r.cpu() for r in kept.values()], wrong

    found = {place: LocalWorld(2).run(lambda t, place=place: body(t, place)) for place in ("device", "host")}
    for (device_model, device_kept, _), (model, kept, wrong) in zip(found["device"], found["host"], strict=True):
        assert torch.equal(device_model, model) and not wrong, wrong
        assert all(torch.equal(a, b) for a, b in zip(device_kept, kept, strict=True))


def bytes_on_device() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and is_on(thing):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "options", "state_bytes"),
    [
        ("`local`, no outer step", {"outer_step": "none"}, 8),
        ("`local`, no outer step, `--outer-state host`", {"outer_step": "none", "outer_state": "host"}, 4),
        ("`local`, outer step", {"outer_step": "nesterov"}, 12),
        ("`local`, outer step, `--outer-state host`", {"outer_step": "nesterov", "outer_state": "host"}, 4),
        ("`sync`, `horovod`", {"strategy": "sync"}, 0),
    ],
)
def test_bytes_a_parameter_are_those_of_the_table(
    name: str, options: dict[str, Any], state_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Large beside batches.
    size = 300
    monkeypatch.setattr(host_state, "PIECE", size**2 // 5)
    monkeypatch.setattr(outer_step, "_HOST_CHUNK", size**2 // 5)
    with recording(Log()):
        before = bytes_on_device()
        session, data = begin(Config(batch_size=16, mega_batch=64, **options), size=size)
        train(session, data, 1.0)
        # Without the parameter and its gradient.
        found = (bytes_on_device() - before) / size**2 - 8
    row = re.search(rf"^\| {re.escape(name)} \| (\d+) \|", DOCS.read_text(), re.MULTILINE)
    assert row is not None, name
    assert found == pytest.approx(int(row[1]), abs=1.0)
    assert state_bytes == int(row[1])


def test_what_does_not_go_together_is_refused() -> None:
    for other in ({"merge_fragments": 2}, {"sparse_merge": "always"}, {"logical_ranks": 2}):
        with pytest.raises(ValueError, match="outer_state 'host'"):
            config(outer_state="host", **other)  # type: ignore[arg-type]
