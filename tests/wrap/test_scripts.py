"""Scripts in the shape of Horovod's examples, plain and wrapped in the same ranks: the same final parameters.

Each test runs all its scripts plain, then intercepts, then runs them again: starting ranks costs more than the scripts do.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_adaptive.wrap.options import RunConfig
from hvd_adaptive.wrap.reasons import Reason

SCRIPTS = Path(__file__).parent / "scripts"


def run(command: str) -> dict[str, Any]:
    """Runs a script as ``python`` would; returns its globals."""
    name, *arguments = command.split()
    sys.argv, sys.path[0] = [str(SCRIPTS / name), *arguments], str(SCRIPTS)
    return runpy.run_path(sys.argv[0], run_name="__main__")


def weights(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in values["model"].state_dict().items()}


def run_both(
    commands: list[str], num_ranks: int, rtol: float = 1e-9
) -> tuple[list[tuple[list[Any], list[Any]]], Any]:
    """Runs scripts plain and wrapped with unequal shares, and compares their weights.

    Returns:
        For each script the loaders that it trained from and the shares of all its loaders at the end; and the engine.
    """
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    plain = [weights(run(command)) for command in commands]
    shares = ",".join(str(rank + 1) for rank in range(num_ranks))
    engine = intercept(RunConfig(shares=shares, interval=5))
    results = []
    for command, expected in zip(commands, plain, strict=True):
        before = len(engine.report.loaders)
        values = run(command)
        for name, value in weights(values).items():
            assert torch.allclose(value, expected[name], rtol=rtol, atol=1e-12 * rtol), (command, name)
        loaders = engine.report.loaders[before:]
        # The next script's hvd.init() forgets the shares.
        results.append(([loader for loader in loaders if loader.num_steps], [loader.fractions for loader in loaders]))
    return results, engine


@pytest.mark.mpi(2, 3, timeout=600)
def test_shared_batches_give_the_scripts_own_weights(num_ranks: int) -> None:
    commands = [
        "mnist.py",
        "mnist.py --op Sum --wrap-late --groups 2",
        "mnist.py --drop-last --gradient-predivide-factor 2 --batch-size 7",
        "mnist.py --num-workers 2 --persistent --epochs 3",
        "amp.py",
        "accumulate.py",
        "own_batches.py",
        "own_batches.py --sparse --num-workers 1",
        "own_batches.py --sparse --sparse-as-dense",
        "odd.py own_mean",
        "odd.py eval_inside",
    ]
    results, _ = run_both(commands, num_ranks)
    expected = [2 * (rank + 1) / num_ranks / (num_ranks + 1) for rank in range(num_ranks)]
    for command, (trained, fractions) in zip(commands, results, strict=True):
        (train,) = trained
        assert not train.reasons and train.is_traced, (command, train.reasons)
        used = [shares for shares in fractions if shares is not None]
        assert len(used) == 1 and used[0] == pytest.approx(expected), command


PLAIN = {
    "imagenet.py": Reason.SUB_BATCHES,
    "imagenet.py --batches-per-allreduce 2": Reason.SUB_BATCHES,
    "odd.py iterable": Reason.ITERABLE,
    "odd.py unsplit": Reason.NO_SAMPLER,
    "odd.py ahead": Reason.FETCHED_AHEAD,
    "odd.py pairs": Reason.INTERLEAVED,
    "odd.py sum": Reason.SUM_LOSS,
    "odd.py class_weights": Reason.WEIGHTED_LOSS,
    "odd.py hidden": Reason.OTHER_INPUT,
}


@pytest.mark.mpi(2, timeout=600)
def test_what_cannot_be_shared_runs_as_it_is_and_says_why(num_ranks: int) -> None:
    results, _ = run_both(list(PLAIN), num_ranks, rtol=0.0)
    for (command, reason), (trained, fractions) in zip(PLAIN.items(), results, strict=True):
        assert trained and all(reason in loader.reasons for loader in trained), (command, trained)
        assert not any(fractions)


@pytest.mark.mpi(2, timeout=600)
def test_ranks_with_more_batches_than_others(num_ranks: int) -> None:
    """Horovod's join: the ranks that go on are told by the rows that stay empty, and nobody waits for one that has joined."""
    _, engine = run_both(["odd.py join"], num_ranks)
    assert any(Reason.JOIN.value in line for line in engine.report.lines())


@pytest.mark.mpi(2, timeout=600)
def test_adasum_and_elastic_scripts_run_as_they_are(num_ranks: int) -> None:
    results, engine = run_both(["odd.py adasum", "odd.py elastic"], num_ranks)
    lines = engine.report.lines()
    assert all(any(reason.value in line for line in lines) for reason in (Reason.ADASUM, Reason.ELASTIC))
    assert not any(any(fractions) for _, fractions in results)


@pytest.mark.mpi(2, timeout=600)
def test_a_batch_of_a_wrong_size_later_on_is_an_error_and_not_a_wrong_weight(num_ranks: int) -> None:
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    intercept(RunConfig(shares="1,3", interval=5))
    with pytest.raises(RuntimeError, match="a forward of Net got tensors of shape"):
        run("odd.py late_cut")
