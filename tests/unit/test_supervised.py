"""Checkpoints in memory: kept as long as there is room, and on the disk from then on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import small_disk
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.session.session import Session
from hvd_adaptive.session.supervised import MemoryCheckpointer
from hvd_adaptive.state.checkpoint import check_files, find_checkpoints, read_manifest

X = torch.randn(400, 60, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()
# Of the model; a checkpoint has it once at the start and, with the outer step's momentum, twice after a merge.
MODEL_KIB = 4 * (60 * 500 + 500 + 500 * 2 + 2) // 1024


def train(transport: LocalTransport, memory: Path, folder: Path, momentum: float, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 500), nn.Linear(500, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    # Each rank with samples, and so with an optimizer's state, from the first round on.
    session = Session(model, optimizer, Config(batch_size=16, mega_batch=100, dispatch="equal"), transport=transport)
    # So that none is skipped.
    session.before_gather.append(lambda stats: checkpoints._thread and checkpoints._thread.join())
    in_memory = MemoryCheckpointer(session, memory, **options)
    start = in_memory.refusal
    checkpoints = Checkpointer(session, folder, interval=1 if start else 1000, keep=10)
    in_memory.beside = checkpoints
    for batch in session.batches(TensorDataset(X, Y)):
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    checkpoints.close()
    session.close()
    return {"start": start, "end": in_memory.refusal}


def test_a_checkpoint_in_memory_that_was_refused_is_set_aside(tmp_path: Path) -> None:
    """Each launch of the job would find it otherwise, and end."""
    memory, refused = tmp_path / "memory", tmp_path / "memory" / "round-00000009"
    refused.mkdir(parents=True)
    (memory / "lock").touch()
    LocalWorld(2).run(lambda transport: train(transport, memory, tmp_path / "disk", 0.0))
    assert [path.name for path in find_checkpoints(memory)] == ["round-00000004"] and not refused.exists()


@pytest.mark.root
@pytest.mark.parametrize(
    ("kib", "momentum", "start", "in_memory"),
    [
        # Two checkpoints of twice the model's size, and a sixteenth to spare.
        (5 * MODEL_KIB, 0.0, True, "round-00000004"),
        # With momentum there is no outer step. The state of the ranks' own optimizers comes with the first steps: two models.
        (5 * MODEL_KIB, 0.9, True, "round-00000001"),
        (MODEL_KIB, 0.0, False, None),
    ],
    ids=["enough", "not for two", "not for one"],
)
def test_a_checkpoint_in_memory_needs_room_beside_the_last(
    kib: int, momentum: float, start: bool, in_memory: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with small_disk(tmp_path / "memory", kib) as memory:
        (memory / "lock").touch()
        ranks = LocalWorld(2).run(lambda transport: train(transport, memory, tmp_path / "disk", momentum))
        found = find_checkpoints(memory)
        assert [path.name for path in found] == ([in_memory] if in_memory else [])
        for path in found:
            check_files(path, read_manifest(path))
        assert not list(memory.glob(".part-*"))
    assert len({rank["end"] for rank in ranks}) == 1 and all((rank["start"] is None) == start for rank in ranks)
    on_disk = [path.name for path in reversed(find_checkpoints(tmp_path / "disk"))]
    first = 4 if in_memory == "round-00000004" else 2 if in_memory else 1
    assert on_disk == [f"round-{number:08d}" for number in range(first, 5)]
    assert caplog.text.count("state for a restart cannot be kept in memory") == (first < 4)
    assert ("MiB free, and the next takes" in caplog.text) == (first < 4)


def test_a_best_model_that_cannot_be_written_fails_that_checkpoint_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory, num_asked = tmp_path / "memory", 0
    memory.mkdir()
    (memory / "lock").touch()

    def files() -> list[Path]:
        nonlocal num_asked
        num_asked += 1
        # Twice for each checkpoint: for its size, and for its files; and once at the start.
        if num_asked <= 5:
            raise OSError("the best model cannot be written")
        return []

    LocalWorld(2).run(lambda transport: train(transport, memory, tmp_path / "disk", 0.0, files=files))
    assert [path.name for path in find_checkpoints(memory)] == ["round-00000004"]
    assert caplog.text.count("was not written: rank 0: the best model cannot be written") == 2
