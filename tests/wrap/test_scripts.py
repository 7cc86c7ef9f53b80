"""Scripts in the shape of Horovod's examples, plain and wrapped in the same ranks: the same final parameters.

Each test runs all its scripts plain, then intercepts, then runs them again: starting ranks costs more than the scripts do.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_adaptive.wrap.options import RunConfig

SCRIPTS = Path(__file__).parent / "scripts"


def run(command: str) -> dict[str, Any]:
    """Runs a script as ``python`` would; returns its globals."""
    name, *arguments = command.split()
    sys.argv, sys.path[0] = [str(SCRIPTS / name), *arguments], str(SCRIPTS)
    return runpy.run_path(sys.argv[0], run_name="__main__")


def weights(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in values["model"].state_dict().items()}


def run_both(commands: list[str], num_ranks: int) -> list[tuple[dict[str, Any], Any]]:
    """Runs scripts plain and wrapped with unequal shares; returns the wrapped globals and loaders, weights compared."""
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    plain = [weights(run(command)) for command in commands]
    shares = ",".join(str(rank + 1) for rank in range(num_ranks))
    engine = intercept(RunConfig(shares=shares), make_emulation=None, clock=time.perf_counter)
    results = []
    for command, expected in zip(commands, plain, strict=True):
        before = len(engine.report.loaders)
        values = run(command)
        for name, value in weights(values).items():
            assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-15), (command, name)
        results.append((values, engine.report.loaders[before:]))
    return results


@pytest.mark.mpi(2, 3, timeout=300)
def test_shared_batches_give_the_scripts_own_weights(num_ranks: int) -> None:
    commands = [
        "mnist.py",
        "mnist.py --op Sum --wrap-late --groups 2",
        "mnist.py --drop-last --gradient-predivide-factor 2 --batch-size 7",
    ]
    for _, loaders in run_both(commands, num_ranks):
        train, validation = loaders
        assert not train.reasons and train.num_steps >= 18
        assert train.fractions == pytest.approx(
            [2 * (rank + 1) / num_ranks / (num_ranks + 1) for rank in range(num_ranks)]
        )
        assert validation.num_steps == 0
