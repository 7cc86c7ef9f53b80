"""Further loops as people write them, plain and wrapped: shared out and exact, or bit for bit with equal shares, and why."""

from __future__ import annotations

import pytest
from wrapped_scripts import run, run_both

from hvd_adaptive.wrap.reasons import Reason, told

SHARED = [
    "own_hidden", "loss_inside", "rows_inside", "mask_inside", "pos_weight", "label_smoothing", "global_length", "global_sum",
    "global_ignored", "penalty", "validate_often", "synchronize", "two_optimizers", "dictionary", "turns", "accumulate",
    "adversarial", "scale_early", "evaluate_on_it", "late_optimizers", "hook_looks", "hook_looks_late",
]  # fmt: skip
EQUAL = {
    "fixed_view": Reason.FIXED_SIZE,
    "fixed_hidden": Reason.FIXED_SIZE,
    "assert_inside": Reason.SIZE_DECIDES,
    "gather_inside": Reason.GATHERED,
    "centred": Reason.MIXED,
    "loss_beside": Reason.MIXED,
    "own_pos_weight": Reason.MIXED,
    "global_constant": Reason.SUM_LOSS,
    "global_total": Reason.SUM_LOSS,
    "two_loaders": Reason.INTERLEAVED,
    "cycle": Reason.KEPT,
    "probed_cycle": Reason.KEPT,
    "kept": Reason.KEPT,
    "rate_by_size": Reason.SIZE_DECIDES,
    "rate_by_len": Reason.SIZE_DECIDES,
    "rate_by_words": Reason.SIZE_DECIDES,
    "clip_early": Reason.CLIPPED,
    "hook_clips": Reason.CLIPPED,
    "hook_clips_in_place": Reason.CLIPPED,
    "hook_clips_late": Reason.CLIPPED,
    "hook_of_module": Reason.CLIPPED,
    "damaged": Reason.DROPPED,
}


@pytest.mark.mpi(2, timeout=600)
def test_habits_that_can_be_shared_out(num_ranks: int) -> None:
    results, engine = run_both([f"habits.py {mode}" for mode in SHARED], num_ranks)
    for mode, (trained, fractions) in zip(SHARED, results, strict=True):
        assert not trained[-1].reasons and trained[-1].is_traced, (mode, trained[-1].reasons)
        assert any(fractions), mode
    assert not any(line.startswith("  note: ") for line in engine.report.lines())


@pytest.mark.mpi(2, timeout=600)
def test_habits_that_keep_equal_shares_and_say_why(num_ranks: int) -> None:
    results, _ = run_both([f"habits.py {mode} --epochs 1" for mode in EQUAL], num_ranks, rtol=0.0)
    for (mode, reason), (trained, fractions) in zip(EQUAL.items(), results, strict=True):
        assert any(reason in loader.reasons for loader in trained), (mode, [loader.reasons for loader in trained])
        assert not any(fractions), mode


@pytest.mark.mpi(2, timeout=300)
def test_batches_that_may_be_kept_are_not_shared_out_until_that_shows(num_ranks: int) -> None:
    """An exchange comes at the third batch of the loader in the cycle, and none until its batches come again."""
    results, _ = run_both(["habits.py late_cycle --epochs 1"], num_ranks, interval=1000)
    first, cycled = results[0][0]
    assert first.num_shared and not cycled.num_shared and not cycled.reasons, (first.num_shared, cycled.num_shared)


@pytest.mark.mpi(2, timeout=300)
def test_samples_that_a_batch_lacks_later_on_end_unequal_shares(num_ranks: int) -> None:
    from hvd_adaptive.wrap.run_options import RunConfig
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    engine = intercept(RunConfig(shares="1,3", interval=5))
    values = run("habits.py damaged_hidden --epochs 3")
    (loader,) = [loader for loader in engine.report.loaders if loader.num_steps]
    assert loader.reasons == {Reason.DROPPED} and loader.fractions is None, loader.reasons
    # 15 batches an epoch, the first samples that cannot be read in the 7th or thereafter.
    assert values["num_steps"] == 45 and 0 < loader.num_shared < 20, (values["num_steps"], loader.num_shared)
    lines = engine.report.lines()
    assert any(f"{loader.num_shared} with others" in line for line in lines), lines


@pytest.mark.mpi(2, timeout=300)
def test_a_step_with_a_closure_has_a_reason_of_its_own(num_ranks: int) -> None:
    from hvd_adaptive.wrap.run_options import RunConfig
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    engine = intercept(RunConfig(shares="1,3", interval=5))
    run("habits.py closure --epochs 1")
    (loader,) = [loader for loader in engine.report.loaders if loader.num_steps]
    assert told(loader.reasons) == [Reason.CLOSURE] and not loader.num_shared, loader.reasons
