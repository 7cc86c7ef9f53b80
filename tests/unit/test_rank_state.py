"""What a test that shares its ranks with others may leave behind, and what is noticed: see support/rank_state.py."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_state import RankState
from torch.utils.data import DataLoader

from hvd_adaptive.cluster import binding


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> RankState:
    # Messages between ranks are for tests/mpi/test_harness.py.
    monkeypatch.setattr(RankState, "_unread_messages", lambda self: False)
    return RankState()


def replace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(binding, "read_launcher", print)
    yield


def replace_method(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DataLoader, "__iter__", print)
    yield


def run_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="forgotten")
    thread.start()
    yield
    over.set()
    thread.join()


def run_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            yield
        finally:
            child.kill()


def handle_signal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


def set_up_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    yield
    logging.root.removeHandler(handler)


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (replace, "replaced: hvd_adaptive.cluster.binding.read_launcher"),
        (replace_method, "replaced: torch.utils.data.dataloader.DataLoader.__iter__"),
        (run_thread, "threads run: ['forgotten']"),
        (run_process, "sleep"),
        (handle_signal, "signal handlers differ"),
        (set_up_logging, "logging is set up"),
    ],
)
def test_what_is_left_behind_is_told(
    state: RankState, monkeypatch: pytest.MonkeyPatch, leave: Callable[..., Any], message: str
) -> None:
    assert state.leaks() == []
    left = leave(monkeypatch)
    next(left)
    (found,) = state.leaks()
    assert message in found
    assert next(left, None) is None
    monkeypatch.undo()
    monkeypatch.setattr(RankState, "_unread_messages", lambda self: False)
    assert state.leaks() == []


def test_the_rest_is_put_back_as_a_new_process_has_it(state: RankState, tmp_path: Path) -> None:
    folder, path, environ = Path.cwd(), list(sys.path), dict(state._environ)
    threads = torch.get_num_threads()
    drawn = []
    for _ in range(2):
        os.environ["LEFT"] = "behind"
        os.environ.pop("PATH", None)
        sys.path.insert(0, "/left")
        sys.argv[:], sys.excepthook = ["x"], print  # type: ignore[assignment]
        os.chdir(tmp_path)
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        state.restore()
        assert (Path.cwd(), sys.path, dict(os.environ)) == (folder, path, environ)
        assert sys.argv != ["x"] and sys.excepthook is not print
        assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
        assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert all(one != other for one, other in zip(*drawn, strict=True))
