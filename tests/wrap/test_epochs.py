"""What scripts do with whole epochs: the report names what they reduce after one, and batches that they skip stay skipped."""

from __future__ import annotations

from typing import Any

import pytest
from wrapped_scripts import run_both

from hvd_adaptive.wrap.reasons import Reason


@pytest.mark.mpi(2, timeout=300)
def test_what_is_reduced_after_an_epoch_is_named(num_ranks: int) -> None:
    results, engine = run_both(["epochs.py metric"], num_ranks)
    assert results[0][0][0].num_shared
    (line,) = [line for line in engine.report.lines() if "counts each rank alike" in line]
    assert "what it exchanges after training passes (allreduce 'train_loss') counts each rank alike" in line, line
    assert "a schedule or an early stop that follows it may decide otherwise" in line


@pytest.mark.mpi(2, timeout=300)
def test_of_loaders_that_are_made_anew_one_with_unequal_shares_speaks(num_ranks: int) -> None:
    results, engine = run_both(["epochs.py folds"], num_ranks)
    trained, _ = results[0]
    assert [loader.num_steps for loader in trained] == [12, 11, 3]
    assert trained[0].num_shared and trained[1].num_shared and not trained[2].num_shared
    lines = engine.report.lines()
    # Five and eleven samples of 16.
    assert any("shares: 31.2, 68.8 % of each global batch; 33.3, 66.7 % were asked for" in line for line in lines), lines
    num_shared = sum(loader.num_shared for loader in trained)
    (line,) = [line for line in lines if "made anew" in line]
    assert f"made anew 2 times; 26 steps in all, {num_shared} of them with unequal shares" in line, line


@pytest.mark.mpi(3, timeout=300)
def test_the_first_batches_of_a_pass_stay_skipped(num_ranks: int) -> None:
    """By unequal shares: rank 1's have the script's own size, and it must change back at the same batch."""
    counts: list[Any] = []
    seen = lambda values: counts.extend(values["counts"])  # noqa: E731
    results, engine = run_both(["epochs.py resume"], num_ranks, seen=seen, shares="1,2,3")
    assert counts == [10, 10, 10]
    (loader,) = results[0][0]
    assert loader.reasons == {Reason.SKIPPED} and loader.num_steps == 25 and loader.num_shared and not loader.num_repeated
    lines = engine.report.lines()
    assert any(Reason.SKIPPED.value in line for line in lines) and not any("a second time" in line for line in lines), lines
