"""Scalars for TensorBoard, read back with its own reader."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_adaptive.report.tensorboard import ScalarWriter


def record(number: int, num_ranks: int = 2, **changes: Any) -> dict[str, Any]:
    ranks = {"batch_size": [64.0 + rank for rank in range(num_ranks)], "wait_s": [0.5] * num_ranks}
    line = {"round": number, "train_s": 2.0 * number, "samples": 100 * number, "loss": 3.0, "payload_bytes": 2_000_000}
    return {**line, "eval": {"p1": 0.1 * number}, "ranks": ranks, **changes}


def write(folder: Path, *records: dict[str, Any]) -> EventAccumulator:
    writer = ScalarWriter(folder)
    for line in records:
        writer.add_round(line)
    # Before it is closed: what a person sees while the run goes on.
    events = EventAccumulator(str(folder)).Reload()
    writer.close()
    return events


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_rounds_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    events = write(tmp_path, record(0, loss=None, eval=None), record(1, loss=math.nan), record(2))
    assert scalars(events, "test/p1") == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]
    assert scalars(events, "batch size/rank 1") == [(number, 65.0) for number in range(3)]
    assert scalars(events, "round/payload (MB)")[0] == (0, 2.0)
    assert [step for step, _ in scalars(events, "round/loss")] == [1, 2]


def test_many_ranks_are_summed_up(tmp_path: Path) -> None:
    events = write(tmp_path, record(0, num_ranks=17))
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("batch size/")]
    assert sorted(tags) == ["batch size/largest", "batch size/mean", "batch size/smallest"]
    assert scalars(events, "batch size/mean") == [(0, 72.0)]


def test_rounds_that_a_resume_runs_again_replace_the_lost_ones(tmp_path: Path) -> None:
    write(tmp_path, *(record(number, loss=1.0) for number in range(5)))
    events = write(tmp_path, *(record(number, loss=2.0) for number in (3, 4)))
    assert scalars(events, "round/loss") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_missing_package_is_an_error_that_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install tensorboard, or leave --tensorboard out"):
        ScalarWriter(tmp_path / "tensorboard")
    assert not (tmp_path / "tensorboard").exists()
