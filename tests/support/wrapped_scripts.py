"""Runs scripts of tests/wrap/scripts in this rank, plain and wrapped, and compares their weights."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hvd_adaptive.wrap.run_options import RunConfig

SCRIPTS = Path(__file__).resolve().parents[1] / "wrap" / "scripts"


def run(command: str) -> dict[str, Any]:
    """Runs a script as ``python`` would; returns its globals."""
    import horovod.torch as hvd

    # Its hvd.init() shall be a start: it forgets the shares of the script before.
    hvd.shutdown()
    name, *arguments = command.split()
    sys.argv, sys.path[0] = [str(SCRIPTS / name), *arguments], str(SCRIPTS)
    values = runpy.run_path(sys.argv[0], run_name="__main__")
    for value in values.values():
        if isinstance(value, DataLoader) and (iterator := value._iterator) is not None:
            # Workers that stay would end with the script's process. The garbage collector finds their queues ended before it
            # ends them, and then waits 5 s for each one.
            iterator._shutdown_workers()
    return values


def weights(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in values["model"].state_dict().items()}


def reconfigure(engine: Any, **options: Any) -> None:
    """Gives the next script other options; an interception is for good, and starting ranks is dear."""
    engine.config = engine._shares.config = engine._local._config = engine._encoded._config = RunConfig(**options)


def run_both(
    commands: list[str],
    num_ranks: int,
    rtol: float = 1e-9,
    seen: Callable[[dict[str, Any]], None] = lambda values: None,
    **options: Any,
) -> tuple[list[tuple[list[Any], list[Any]]], Any]:
    """Runs scripts plain and wrapped with unequal shares, or as options say, and compares their weights.

    Args:
        commands: scripts and their arguments.
        num_ranks: number of ranks.
        rtol: relative difference that weights may have.
        seen: gets each wrapped script's globals.
        options: of `RunConfig`.

    Returns:
        For each script the loaders that it trained from and the shares of all its loaders at the end; and the engine.
    """
    from hvd_adaptive.cli.run import make_engine
    from hvd_adaptive.wrap.script import start_world

    start_world()
    plain = [weights(run(command)) for command in commands]
    shares = ",".join(str(2**rank) for rank in range(num_ranks))
    engine = make_engine(RunConfig(**{"shares": shares, "interval": 5, **options}), None)
    results = []
    for command, expected in zip(commands, plain, strict=True):
        before = len(engine.report.loaders)
        values = run(command)
        seen(values)
        for name, value in weights(values).items():
            assert torch.allclose(value, expected[name], rtol=rtol, atol=1e-12 * rtol), (command, name)
        loaders = engine.report.loaders[before:]
        # The next script's start forgets the shares.
        results.append(([loader for loader in loaders if loader.num_steps], [loader.fractions for loader in loaders]))
    return results, engine
