"""Wrapped scripts on a real GPU: the updates of equal shares. And CUDA graphs, which keep those."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_scripts import SCRIPTS

from hvd_adaptive.wrap.compilers import intercept_graphs


def test_calls_of_captured_code_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other functions in the place of those that need a GPU."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda callables, args: callables)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    calls: list[int] = []
    intercept_graphs(nullcontext, lambda: calls.append(1))
    linear = nn.Linear(2, 3)
    model, function = torch.cuda.make_graphed_callables((linear, torch.square), ((torch.ones(1, 2),), (torch.ones(1),)))
    assert model is linear and model(torch.ones(4, 2)).shape == (4, 3) and calls == [1]
    assert function(torch.tensor(3.0)) == 9 and calls == [1, 1]
    torch.cuda.CUDAGraph.replay(None)  # type: ignore[arg-type]
    assert calls == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and a torch that is built for CUDA: torch sees none"
)
@pytest.mark.parametrize("habits", ["pinned workers fused", "scaled", "graphed"])
def test_unequal_shares_give_the_updates_of_equal_ones(run_job: Any, habits: str) -> None:
    found = []
    for shares in ("1,1", "1,3"):
        command = [sys.executable, "-m", "hvd_adaptive", "run", "-np", "2", "--shares", shares, "--interval", "5"]
        job = run_job([*command, str(SCRIPTS / "on_gpu.py"), *habits.split()], timeout=300)
        assert job.returncode == 0, job.describe()
        found.append([float(value) for _, value in sorted(re.findall(r"rank (\d): (\S+)", job.stdout))])
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=1e-9), found
    assert ("CUDA graphs: what the script has captured" in job.stderr) == (habits == "graphed"), job.describe()
    assert ("25.0, 75.0 % of each global batch" in job.stderr) == (habits != "graphed"), job.describe()
