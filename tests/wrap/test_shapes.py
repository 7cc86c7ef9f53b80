"""Loops as people write them, plain and wrapped: shared out and exact, or bit for bit with equal shares, and why."""

from __future__ import annotations

import pytest
from wrapped_scripts import run, run_both

from hvd_adaptive.wrap.reasons import Reason

# What looks odd, and can be shared out all the same.
SHARED = ["plain", "smoothing", "sum_by_size", "sum_by_len", "mask", "mask_mean", "checkpoint", "trace_first", "script_after"]
EQUAL = {
    "compile_model": Reason.COMPILED,
    "compile_in_place": Reason.COMPILED,
    "compile_step": Reason.COMPILED,
    "script": Reason.SCRIPTED,
    "skip_size": Reason.SIZE_DECIDES,
    "skip_shape": Reason.SIZE_DECIDES,
    "skip_len": Reason.SIZE_DECIDES,
    "skip_endless": Reason.SIZE_DECIDES,
    "assert": Reason.SIZE_DECIDES,
    "count_size": Reason.SIZE_DECIDES,
    "count_validate": Reason.SIZE_DECIDES,
    "count_modulo": Reason.SIZE_DECIDES,
    "count_stop": Reason.SIZE_DECIDES,
    "gather_metric": Reason.GATHERED,
    "reduce_metric": Reason.GATHERED,
    "gather_loss": Reason.GATHERED,
    "gather_gradient": Reason.GATHERED,
    "clip": Reason.MIXED,
    "ohem": Reason.MIXED,
    "triplets": Reason.SELECTED,
    "rmse": Reason.MIXED,
}


@pytest.mark.mpi(2, timeout=600)
def test_shapes_that_can_be_shared_out(num_ranks: int) -> None:
    results, _ = run_both([f"shapes.py {mode}" for mode in SHARED], num_ranks)
    for mode, (trained, fractions) in zip(SHARED, results, strict=True):
        assert not trained[-1].reasons and trained[-1].is_traced, (mode, trained[-1].reasons)
        assert any(fractions), mode


@pytest.mark.mpi(2, timeout=600)
def test_shapes_that_keep_equal_shares_and_say_why(num_ranks: int) -> None:
    results, _ = run_both([f"shapes.py {mode} --epochs 1" for mode in EQUAL], num_ranks, rtol=0.0)
    for (mode, reason), (trained, fractions) in zip(EQUAL.items(), results, strict=True):
        assert any(reason in loader.reasons for loader in trained), (mode, [loader.reasons for loader in trained])
        assert not any(fractions), mode


@pytest.mark.mpi(2, timeout=300)
def test_samples_that_are_taken_by_their_number_are_there(num_ranks: int) -> None:
    """Of 16 samples a share of a third would be five."""
    results, _ = run_both(["shapes.py pick", "shapes.py pick_all", "shapes.py pick_last"], num_ranks)
    smallest = [trained[-1].smallest for trained, _ in results]
    assert smallest == [7, 1, 8] and all(any(fractions) for _, fractions in results[:2])
    assert not any(results[2][1]) and Reason.NUMBERED in results[2][0][-1].reasons


@pytest.mark.mpi(2, timeout=300)
def test_ranks_that_join_after_different_numbers_of_steps_meet_again_in_the_next_epoch(num_ranks: int) -> None:
    """With an exchange at the same count of each rank's own steps they wait for each other for ever."""
    _, engine = run_both(["shapes.py join --epochs 3", "shapes.py join_list --epochs 3"], num_ranks, rtol=0.0)
    assert any(Reason.JOIN.value in line for line in engine.report.lines())


@pytest.mark.mpi(2, timeout=300)
def test_another_loss_later_on_ends_unequal_shares_and_is_announced(num_ranks: int) -> None:
    from hvd_adaptive.wrap.run_options import RunConfig
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    engine = intercept(RunConfig(shares="1,3", interval=5))
    run("shapes.py late_ohem --epochs 3")
    loader = engine.report.loaders[-1]
    assert Reason.OTHER_LOSS in loader.reasons and loader.fractions is None, loader.reasons
    # Until the exchange after it, the 20th step's at the latest, and the batch that was on its way.
    assert 10 <= loader.num_shared <= 16, loader.num_shared
    lines = engine.report.lines()
    assert any(f"{loader.num_shared} with others" in line for line in lines), lines
    # Left out later: they are weighted from the exchange after it on.
    run("shapes.py late_ignored --epochs 3")
    loader = engine.report.loaders[-1]
    assert not loader.reasons and loader.fractions and loader.targets.agreed, loader.reasons
    assert any("began to leave out targets" in line for line in engine.report.lines())


@pytest.mark.mpi(2, timeout=300)
def test_a_pass_begins_with_a_batch_that_is_followed_again(num_ranks: int) -> None:
    """By its graph the loss is what it was. The third pass, in which it changes, is the first one behind step 20."""
    from hvd_adaptive.wrap.run_options import RunConfig
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    engine = intercept(RunConfig(shares="1,3", interval=5))
    for mode in ("late_scaled", "late_weights"):
        run(f"shapes.py {mode} --epochs 4")
        loader = engine.report.loaders[-1]
        assert loader.reasons == {Reason.MIXED} and loader.fractions is None, (mode, loader.reasons)
        # From the sixth batch to the exchange behind the followed one, which is equal itself.
        assert 25 <= loader.num_shared <= 30, (mode, loader.num_shared)
        lines = engine.report.lines()
        assert any(f"{loader.num_shared} with others" in line for line in lines), lines


@pytest.mark.mpi(2, timeout=300)
@pytest.mark.parametrize("interval", [5, 2])
def test_a_rank_that_steps_without_a_backward_where_a_pass_begins(interval: int, num_ranks: int) -> None:
    """That batch has the script's own size, and the next exchange ends unequal shares; in the second case it is in that step."""
    (((trained, fractions),), _) = run_both(["shapes.py no_backward --epochs 3"], num_ranks, interval=interval)
    assert trained[-1].reasons == {Reason.FETCHED_AHEAD} and fractions == [None], trained[-1].reasons
    assert trained[-1].num_steps == 75 and 15 <= trained[-1].num_shared <= 25, trained[-1].num_shared


@pytest.mark.mpi(2, timeout=300)
def test_a_rank_that_steps_without_a_backward_at_an_unequal_batch(num_ranks: int) -> None:
    """In step 16, which has an exchange, or after it."""
    from hvd_adaptive.wrap.run_options import RunConfig
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    engine = intercept(RunConfig(shares="1,3", interval=5))
    for script in ("shapes.py no_backward --at", "targets.py classes --leave-out"):
        for step in (15, 16):
            run(f"{script} {step}")
            loader = engine.report.loaders[-1]
            assert loader.reasons == {Reason.FETCHED_AHEAD} and loader.fractions is None, (script, step, loader.reasons)
            assert loader.num_steps >= 30 and loader.num_shared <= 17, (script, step, loader.num_shared)


@pytest.mark.mpi(2, timeout=300)
def test_what_is_not_foreseen_ends_with_equal_shares_or_says_what_helps(num_ranks: int) -> None:
    from horovod.common.exceptions import HorovodInternalError

    from hvd_adaptive.wrap.run_options import RunConfig
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    engine = intercept(RunConfig(shares="1,3", interval=5))
    values = run("shapes.py skip_hidden")
    (loader,) = engine.report.loaders
    # The one of another size was left out, and the one behind it, which was on its way; both came once more.
    assert loader.reasons == {Reason.SKIPPED} and values["num_steps"] == 28, (loader.reasons, values["num_steps"])
    assert any(f"{Reason.SKIPPED.value}; 2 of them came a second time" in line for line in engine.report.lines())
    with pytest.raises(HorovodInternalError, match=r"in allreduce 'correct' .* run the script with --shares equal"):
        run("shapes.py late_reduce")


@pytest.mark.mpi(2, timeout=300)
def test_frozen_teachers_and_backbones(num_ranks: int) -> None:
    """Their weights and statistics, as long as the batch, are no data of a fixed size; in evaluation mode nothing is random."""
    modes = ["teacher", "teacher_within", "head", "head_without_gradients"]
    results, engine = run_both([f"teachers.py {mode}" for mode in modes], num_ranks, rtol=1e-12)
    for mode, (trained, fractions) in zip(modes, results, strict=True):
        assert not trained[-1].reasons and any(fractions), (mode, trained[-1].reasons)
    assert not any("BatchNorm" in line for line in engine.report.lines())
    run("teachers.py head_with_batchnorm")
    said = "\n".join(engine.report.lines())
    assert engine.report.loaders[-1].fractions, said
    assert "BatchNorm normalizes" in said and "BatchNorm's running statistics are noisier" in said, said


@pytest.mark.mpi(2, timeout=300)
def test_sequences_that_are_as_long_as_the_batch_at_first(num_ranks: int) -> None:
    """Neither their length nor that of a packed sequence is taken for the batch's size, which would end the job later on."""
    results, _ = run_both(["sequences.py model", "sequences.py parts"], num_ranks, rtol=1e-12)
    assert not results[0][0][-1].reasons and any(results[0][1])
    assert results[1][0][-1].reasons == {Reason.UNSEEN} and not any(results[1][1])
