"""Compiled models in wrapped scripts: shared out in micro-batches of one size, compiled once, the same updates."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from wrapped_scripts import SCRIPTS, run_both

from hvd_adaptive.wrap.closing_report import Report
from hvd_adaptive.wrap.compiled_modules import MicroBatches
from hvd_adaptive.wrap.reasons import Reason


class Traced:
    """As much of a follower as is asked while it follows a batch."""

    is_tracing = True

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.results: set[Any] = set()
        self.refused: set[Reason] = set()

    def refuse(self, reason: Reason) -> None:
        self.refused.add(reason)


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ({"scores": [0.5] * 4}, True),
        ([{"boxes": ((0, 1),) * 4}], True),
        (tuple(torch.ones(3, 2) for _ in range(4)), True),
        ([torch.ones(4, n) for n in (1, 2, 4, 8)], False),
        ({"names": np.ones(4)}, True),
        (torch.Size([4, 1, 2, 2]), False),
        ({"sizes": [3, 4, 5], "layers": (torch.ones(4, 2), "four")}, False),
    ],
)
def test_an_entry_for_each_sample_beside_tensors_cannot_be_cut(more: Any, is_refused: bool) -> None:
    follower, module = Traced(4), nn.Linear(2, 1)
    micro = MicroBatches(2, follower, Report())  # type: ignore[arg-type]
    for args, options in (((torch.ones(4, 2), more), {}), ((torch.ones(4, 2),), {"more": more})):
        follower.refused.clear()
        result = micro.call(module, lambda x, more: module(x), lambda: pytest.fail("compiled"), args, options)
        assert result.shape == (4, 1) and follower.refused == ({Reason.UNSEEN} if is_refused else set())


def test_a_further_forward_after_a_batchs_backward_may_give_anything() -> None:
    """There is no batch then whose samples could be looked for."""
    module = nn.Linear(2, 1)
    micro = MicroBatches(2, Traced(0), Report())  # type: ignore[arg-type]
    result = micro.call(module, module, lambda: pytest.fail("compiled"), (torch.ones(4, 2),), {})
    assert result.shape == (4, 1)


@pytest.mark.mpi(2, timeout=600)
def test_compiled_models_are_shared_out_with_the_same_updates(num_ranks: int) -> None:
    """Of global batches of 16 samples: 4 and 12, in one and three micro-batches."""
    # Last batches have 6 samples on each rank with 236 rows, 4 with 232, 2 with 228. In place, validation is compiled as well.
    commands = {
        "shapes.py compile_model": 1,
        "shapes.py compile_short": 1,
        "shapes.py compile_in_place": 2,
        "compiled.py": 1,
        "compiled.py --returns dict --rows 232": 1,
        "compiled.py --returns logits --rows 228": 1,
        # Of 12 samples no rank gets less than a micro-batch. Beside a mean nothing can be filled up: the last batches of 2 stay.
        "compiled.py --rows 236": 1,
        "compiled.py --rows 228": 2,
    }
    counts: list[int] = []
    results, engine = run_both(
        list(commands), num_ranks, shares="1,3", micro_batch_size=4, seen=lambda values: counts.append(values["num_compilations"])
    )
    for command, (trained, fractions), count in zip(commands, results, counts, strict=True):
        assert not trained[-1].reasons and trained[-1].num_shared and any(fractions), (command, trained[-1].reasons)
        assert count == commands[command], (command, count)
    assert any("LanguageModel, compiled, was called with 4 samples at a time" in line for line in engine.report.lines())


@pytest.mark.mpi(2, timeout=300)
def test_what_cannot_be_put_together_keeps_equal_shares_and_says_why(num_ranks: int) -> None:
    commands = {
        "compiled.py --returns table": Reason.MICRO_RESULT,
        "compiled.py --centered": Reason.MIXED,
        "compiled.py --lists": Reason.UNSEEN,
        "shapes.py compile_step": Reason.COMPILED,
    }
    results, engine = run_both(list(commands), num_ranks, rtol=0.0, shares="1,3", micro_batch_size=4)
    for (command, reason), (trained, fractions) in zip(commands.items(), results, strict=True):
        assert reason in trained[-1].reasons and not any(fractions), (command, trained[-1].reasons)
    assert any("no compiled model of the script's" in line for line in engine.report.lines())


def test_ranks_of_unequal_speed_compile_once(run_job: Any, tmp_path: Path) -> None:
    """Shares follow the measured speeds, and change on the way; steps take a time that follows the samples."""
    command = [sys.executable, "-m", "hvd_adaptive", "run", "-np", "2", "--slowdown", "1,4", "--interval", "5"]
    command += ["--micro-batch-size", "2", str(SCRIPTS / "compiled.py"), "--norm", "--sleep", "0.002", "--epochs", "3"]
    job = run_job(command, timeout=300)
    assert job.returncode == 0, job.describe()
    found = {int(rank): (int(count), sizes) for rank, count, sizes in re.findall(
        r"rank (\d): (\d+) compilations, batches of \[(.*?)\]", job.stdout)}
    # Not the script's own size alone, and whole micro-batches.
    sizes = [[int(size) for size in of.split(", ")] for _, of in found.values()]
    assert sorted(found) == [0, 1] and all(count == 1 for count, _ in found.values()), job.stdout
    assert all(len(of) > 1 and all(size % 2 == 0 for size in of) for of in sizes), sizes
    assert "LanguageModel, compiled, was called with 2 samples at a time" in job.stderr
    assert "BatchNorm normalizes over micro-batches of 2 samples" in job.stderr
