"""Every optimizer in every strategy over real ranks; merges by mass, compressed and resumed; early stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import half
from runs import read_run

from hvd_adaptive.engine.optimizers import OPTIMIZERS

COMMON = ["--no-calibration", "--batch-size", "16", "--mega-batch", "500", "--eval-rounds", "1", "--hash-interval", "1"]
STRATEGIES, GRADIENTS = ["local", "sync", "horovod"], ["sparse", "dense"]


@pytest.mark.mpi(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_every_optimizer_learns_in_every_strategy(
    train: Any, shared_tmp_path: Path, strategy: str, gradients: str
) -> None:
    # Local steps learn a little less, and what each rank takes is another matter each time.
    epochs = "2" if strategy == "local" else "1"
    # The other optimizers have the other kind of gradients in this strategy.
    for name in half(OPTIMIZERS, STRATEGIES.index(strategy), GRADIENTS.index(gradients)):
        options = ["--optimizer", name, "--strategy", strategy, "--input-gradients", gradients, "--epochs", epochs]
        train(*COMMON, *options, out=name)
        summary, rounds = read_run(shared_tmp_path / name)
        assert summary["ranks_agreed"] is True, name
        assert rounds[-1]["loss"] < 0.95 * rounds[0]["loss"], name


@pytest.mark.mpi(1, 3)
def test_weights_by_mass_go_with_every_way_of_merging(train: Any, shared_tmp_path: Path) -> None:
    ways: dict[str, list[str]] = {
        "rows": ["--sparse-merge", "always"],
        "dense": ["--sparse-merge", "never"],
        "encoded": ["--compression", "maxmin:4"],
        "adagrad": ["--optimizer", "adagrad", "--outer-step", "nesterov", "--outer-momentum", "0.5"],
    }
    for name, options in ways.items():
        train(*COMMON, "--merge-weights", "fisher-rows", "--epochs", "1", *options, out=name)
        summary, rounds = read_run(shared_tmp_path / name)
        assert summary["ranks_agreed"] is True and summary["samples"] == 2000, name
        assert rounds[-1]["loss"] < 0.95 * rounds[0]["loss"], name


@pytest.mark.mpi(2)
def test_a_resumed_run_of_equal_parts_has_the_bits_of_a_whole_one(train: Any, shared_tmp_path: Path) -> None:
    options = [*COMMON, "--merge-weights", "fisher-rows", "--dispatch", "equal", "--checkpoint-interval", "1"]
    train(*options, "--epochs", "2", out="whole")
    train(*options, "--epochs", "1", out="parts")
    train(*options, "--epochs", "2", "--resume", "auto", out="parts")
    (whole, _), (parts, _) = read_run(shared_tmp_path / "whole"), read_run(shared_tmp_path / "parts")
    assert parts["model_hash"] == whole["model_hash"] and parts["best_epoch"] == whole["best_epoch"]


@pytest.mark.mpi(2)
def test_patience_ends_a_run_that_gets_no_better(train: Any, command: Any, shared_tmp_path: Path) -> None:
    # Too small a rate to change any prediction after the first evaluation.
    train(*COMMON, "--patience", "2", "--optimizer", "sgd", "--lr", "1e-9")
    summary, rounds = read_run(shared_tmp_path / "run")
    assert len(rounds) == 3 and summary["best_epoch"] == rounds[0]["epoch"] == 0.25 and summary["epochs"] == 0.75
    # Nothing set: four evaluations an epoch, and the same end after ten without a better one.
    train("--no-calibration", "--batch-size", "16", "--optimizer", "sgd", "--lr", "1e-9", out="defaults")
    summary, rounds = read_run(shared_tmp_path / "defaults")
    scored = [r for r in rounds if r["eval"]]
    # Rounds end with whole batches where ranks are alike.
    assert len(scored) == 11 and summary["epochs"] == pytest.approx(2.75, abs=0.05)
