"""Loaders that another thread reads than the one that trains: the script trains right."""

from __future__ import annotations

from typing import Any

import pytest
from wrapped_scripts import run, run_both

from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import RunConfig

COMMANDS = ["background.py 2", "background.py 1000", "background.py 2 workers", "background.py 2 thread"]


@pytest.mark.mpi(2, timeout=300)
@pytest.mark.parametrize("options", [{}, {"strategy": "local", "mega_batch": 1}], ids=["sync", "local"])
def test_a_whole_script_trains_right(options: dict[str, Any], num_ranks: int) -> None:
    """Local steps that are merged at once are the script's own."""
    results, _ = run_both(COMMANDS, num_ranks, rtol=1e-9 if options else 0.0, **options)
    for command, (trained, fractions) in zip(COMMANDS, results, strict=True):
        assert len(trained) == 1 and trained[0].num_steps == 45, command
        assert Reason.FETCHED_AHEAD in trained[0].reasons and not any(fractions), (command, trained[0].reasons)


@pytest.mark.mpi(2, timeout=300)
def test_a_thread_of_its_own_may_train(num_ranks: int) -> None:
    """It gets unequal shares as any other, from its second batch on."""
    results, _ = run_both(["background.py 0 thread"], num_ranks, shares="1,3")
    ((trained, fractions),) = results
    assert not trained[-1].reasons and trained[-1].num_shared and any(fractions), trained[-1].reasons


@pytest.mark.mpi(2, timeout=300)
def test_merges_come_by_count_and_before_validation(num_ranks: int) -> None:
    from hvd_adaptive.wrap.script import intercept, start_world

    world = start_world()
    engine = intercept(RunConfig(strategy="local", mega_batch=8 * num_ranks * 6), comm=world)
    for command in COMMANDS:
        losses = run(command)["losses"]
        assert all(len(set(of_ranks)) == 1 for of_ranks in losses) and losses[-1][0] < losses[0][0], (command, losses)
        log = engine._local._logs[-1]
        # At step 1, after each six, and before each validation, which begins to count anew.
        assert (log.num_merges, log.steps_per_merge) == (1 + 3 + 3 + 3, 6), (command, log)
