"""Scripts in the shape of Horovod's examples, plain and wrapped in the same ranks: the same final parameters.

Each test runs all its scripts plain, then intercepts, then runs them again: starting ranks costs more than the scripts do.
"""

from __future__ import annotations

import pytest
import torch
from wrapped_scripts import reconfigure, run, run_both, weights

from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import RunConfig

SHARED = [
    "mnist.py",
    "mnist.py --op Sum --wrap-late --groups 2",
    "mnist.py --drop-last --gradient-predivide-factor 2 --batch-size 7",
    "mnist.py --num-workers 2 --persistent --epochs 3",
    "amp.py",
    "accumulate.py",
    "own_batches.py",
    "own_batches.py --sparse --num-workers 1",
    "own_batches.py --sparse --sparse-as-dense",
    "own_batches.py --unpadded",
    "gan.py",
    "odd.py own_mean",
    "odd.py sum",
    "odd.py eval_inside",
    "odd.py class_weights",
    *(f"targets.py {mode}" for mode in ("classes", "inside", "pixels", "smooth", "few", "beside", "passes", "two_losses")),
    *(f"targets.py {mode}" for mode in ("mask", "mask_inside", "by_count", "logged", "listed", "sorted_words")),
    *(f"targets.py {mode}" for mode in ("chosen", "chosen_flat", "chosen_mean", "chosen_sum", "chosen_both")),
]
# With three ranks, once each: a sampler, batches of the script's own with sparse gradients, accumulation, two optimizers, and
# means over targets.
SHARED_BY_THREE = ["mnist.py", "own_batches.py --sparse --num-workers 1", "accumulate.py", "gan.py", "targets.py pixels"]


@pytest.mark.mpi(2, 3, timeout=600)
def test_shared_batches_give_the_scripts_own_weights(num_ranks: int) -> None:
    commands = SHARED if num_ranks == 2 else SHARED_BY_THREE
    results, engine = run_both(commands, num_ranks)
    # Speeds of 1:2, and of 1:2:4.
    expected = [2**rank / (2**num_ranks - 1) for rank in range(num_ranks)]
    for command, (trained, fractions) in zip(commands, results, strict=True):
        (train,) = trained
        assert not train.reasons and train.is_traced, (command, train.reasons)
        used = [shares for shares in fractions if shares is not None]
        assert len(used) == 1 and used[0] == pytest.approx(expected), command
    # Every synchronize was of a loader's batch, also the GAN's that has no gradients of its own.
    assert not any(Reason.NO_LOADER.value in line for line in engine.report.lines())


PLAIN = {
    "imagenet.py": Reason.SUB_BATCHES,
    "imagenet.py --batches-per-allreduce 2": Reason.SUB_BATCHES,
    "odd.py iterable": Reason.ITERABLE,
    "odd.py unsplit": Reason.NO_SAMPLER,
    "odd.py ahead": Reason.FETCHED_AHEAD,
    "odd.py pairs": Reason.INTERLEAVED,
    "targets.py sorted": Reason.WEIGHTED_LOSS,
    "targets.py topped": Reason.WEIGHTED_LOSS,
    "targets.py by_places": Reason.WEIGHTED_LOSS,
    "targets.py learned": Reason.WEIGHTED_LOSS,
    "targets.py constant": Reason.WEIGHTED_LOSS,
    "targets.py twice": Reason.WEIGHTED_LOSS,
    "targets.py after_step": Reason.WEIGHTED_LOSS,
    "targets.py smooth_beside_sharp": Reason.WEIGHTED_LOSS,
    "odd.py mixup": Reason.MIXED,
    "odd.py hidden": Reason.OTHER_INPUT,
    "odd.py fixed": Reason.OTHER_INPUT,
    "own_batches.py --by-length": Reason.UNEVEN,
}


@pytest.mark.mpi(2, timeout=600)
def test_what_cannot_be_shared_runs_as_it_is_and_says_why(num_ranks: int) -> None:
    results, _ = run_both(list(PLAIN), num_ranks, rtol=0.0)
    for (command, reason), (trained, fractions) in zip(PLAIN.items(), results, strict=True):
        assert trained and all(reason in loader.reasons for loader in trained), (command, trained)
        assert not any(fractions)


@pytest.mark.mpi(2, timeout=120)
def test_a_rank_without_a_loss_holds_up_no_other(num_ranks: int) -> None:
    """Its share has no targets, and its script then has another loss, or no backward, and calls a collective before the step."""
    modes = dict.fromkeys(("guarded", "nothing_to_lose"), Reason.OTHER_LOSS)
    modes |= dict.fromkeys(("no_backward", "no_backward_later"), Reason.FETCHED_AHEAD)
    results, _ = run_both([f"targets.py {mode}" for mode in modes], num_ranks)
    for (trained, _), (mode, reason) in zip(results, modes.items(), strict=True):
        loader = trained[-1]
        assert loader.reasons == {reason} and loader.num_shared < 15, (mode, loader.reasons, loader.num_shared)


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


@pytest.mark.mpi(1, timeout=600)
def test_one_rank_alone(num_ranks: int) -> None:
    commands = [command for command in SHARED if "num-workers" not in command]
    commands += ["imagenet.py --batches-per-allreduce 2", "odd.py adasum", "odd.py join", "synthetic.py"]
    _, engine = run_both(commands, num_ranks, rtol=0.0)
    assert any("there is one rank" in line for line in engine.report.lines())
    commands = ["mnist.py", "accumulate.py", "own_batches.py --sparse"]
    plain = [weights(run(command)) for command in commands]
    # Without an outer step there is nothing to merge; with one that changes nothing, every merge gives the rank's own model.
    for options in ({}, {"outer_step": "momentum", "outer_momentum": 0.0, "mega_batch": 48}):
        reconfigure(engine, strategy="local", **options)
        for command, expected in zip(commands, plain, strict=True):
            for name, value in weights(run(command)).items():
                assert torch.allclose(value, expected[name], rtol=1e-9 if options else 0.0, atol=1e-12), (command, name)
    assert sum("merges" in line for line in engine.report.lines()) == len(commands) + 1  # accumulate.py makes two optimizers


@pytest.mark.mpi(2, timeout=600)
def test_local_steps_that_are_merged_at_once_are_the_scripts_own(num_ranks: int) -> None:
    """With the learning rate in proportion to the share, and every step merged, plain SGD's mean over samples comes out."""
    commands = [
        "mnist.py --momentum 0 --op Sum --wrap-late --groups 2",
        "accumulate.py --momentum 0",
        "own_batches.py --sparse",
        "habits.py two_optimizers",
        # Shares stay equal, so momentum meets as its mean as well.
        "own_batches.py --by-length",
        "imagenet.py --batches-per-allreduce 2",
        "odd.py pairs",
        "synthetic.py --same-data",
        # Not local at all.
        "odd.py adasum",
        "odd.py elastic",
    ]
    results, engine = run_both(commands, num_ranks, strategy="local", mega_batch=1)
    for command, (trained, fractions) in list(zip(commands, results, strict=True))[:4]:
        assert [shares for shares in fractions if shares] == [pytest.approx((1 / 3, 2 / 3))], (command, trained)
    lines = engine.report.lines()
    # accumulate.py makes two optimizers, and so does "two_optimizers".
    assert sum("local steps: " in line for line in lines) == len(commands) - 2 + 2, lines


@pytest.mark.mpi(3, timeout=600)
def test_merged_models_have_the_same_bits_on_all_ranks(num_ranks: int) -> None:
    import horovod.torch as hvd

    from hvd_adaptive.wrap.script import intercept, start_world

    world = start_world()
    engine = intercept(RunConfig(shares="1,2,3", strategy="local"), comm=world)
    common = {"strategy": "local", "shares": "1,2,3", "mega_batch": 150, "hash_interval": 1}
    for command, options in {
        "mnist.py --wrap-late": {"outer_step": "nesterov", "optimizer_state": "average"},
        "mnist.py --batch-norm": {"compression": "maxmin:4", "merge_weights": "samples", "lr_rule": "none"},
        "accumulate.py": {"optimizer_state": "reset", "merge_period": "auto"},
        "own_batches.py --sparse": {"merge_weights": "samples", "lr_rule": "none"},
        # A mean that weighs samples does for a rank's own steps.
        "odd.py class_weights": {},
        "shapes.py late_ignored": {},
    }.items():
        reconfigure(engine, **common, **options)
        before = len(engine._local._logs)
        model = weights(run(command))
        bits = hvd.allgather_object([value.numpy().tobytes() for value in model.values()])
        assert bits[0] == bits[1] == bits[2], command
        num_merges = [log.num_merges for log in engine._local._logs[before:]]
        assert all(num >= 2 for num in num_merges) and num_merges, (command, num_merges)
        train = [loader for loader in engine.report.loaders if loader.num_steps][-1]
        assert train.num_shared and not train.reasons, (command, train.reasons)
    # Where a script validates or saves between merges, on all ranks or not.
    reconfigure(engine, **{**common, "mega_batch": 10_000})
    assert run("mid_epoch.py")["found"] == {"validated": True, "left early": True, "epoch": True}
    lines = engine.report.lines()
    assert any("state_dict() between merges on some ranks only" in line for line in lines) == (hvd.rank() == 0), lines
    assert any("state_dict() at every step" in line for line in lines), lines
    # The first step, eval(), the early end, and the end of the second epoch.
    assert engine._local._logs[-1].num_merges == 4, engine._local._logs[-1]
    # Strategy sync with encoded gradients: the same bits as well, near to those of full precision, but not those.
    exact = {"shares": "1,2,3", "interval": 5}
    for command, encoded in {
        "mnist.py --wrap-late --op Sum --groups 2": True,
        "accumulate.py": True,
        # Sparse gradients, and what has few values, go as they are.
        "own_batches.py --sparse": False,
    }.items():
        reconfigure(engine, **exact)
        plain = weights(run(command))
        reconfigure(engine, **exact, compression="maxmin:8")
        model = weights(run(command))
        bits = hvd.allgather_object([value.numpy().tobytes() for value in model.values()])
        assert bits[0] == bits[1] == bits[2], command
        error = max(float((value - plain[name]).norm() / plain[name].norm()) for name, value in model.items())
        assert (1e-5 < error < 0.05) if encoded else error < 1e-9, (command, error)
    lines = engine.report.lines()
    assert any("encoded as 'maxmin:8'" in line for line in lines), lines


@pytest.mark.mpi(2, timeout=300)
def test_one_rank_stands_where_another_one_merges(num_ranks: int) -> None:
    """It validates, as its GradScaler has left the step out, and the other one waits in the merge; or it saves."""
    from hvd_adaptive.wrap.script import intercept, start_world

    world = start_world()
    engine = intercept(RunConfig(strategy="local", mega_batch=10_000), comm=world)
    values = run("skipped_step.py")
    assert values["same"] and values["stood_s"] < 20 and values["ended_s"] < 20, (values["stood_s"], values["ended_s"])
    # The first step, and the end of the pass.
    assert engine._local._logs[-1].num_merges == 2
