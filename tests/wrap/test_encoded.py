"""Scripts whose gradients cross the wire encoded: frozen layers, several optimizers, and what stays Horovod's own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from wrapped_scripts import SCRIPTS, reconfigure, run, run_both, weights

from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import RunConfig

# All machinery, and nothing lost.
EXACT = "maxmin:4; *=none"


def check_same_on_all_ranks(command: str) -> None:
    import horovod.torch as hvd

    bits = hvd.allgather_object([value.numpy().tobytes() for value in weights(run(command)).values()])
    assert bits[0] == bits[1], command


@pytest.mark.mpi(2, timeout=600)
def test_encoded_gradients_of_scripts_that_freeze_layers_or_have_several_optimizers(num_ranks: int) -> None:
    commands = ["thawed.py thaws", "thawed.py freezes", "thawed.py more_passes", "gan.py"]
    results, engine = run_both(commands, num_ranks, compression=EXACT)
    for command, (trained, fractions) in zip(commands, results, strict=True):
        # Our own hooks on gradients are not taken for the script's. Another loss is one with another layer.
        changes_layers = command in ("thawed.py thaws", "thawed.py freezes")
        assert trained[-1].num_shared and any(fractions) is not changes_layers, (command, trained[-1].reasons)
        assert trained[-1].reasons == ({Reason.OTHER_LOSS} if changes_layers else set()), command
    lines = engine.report.lines()
    sent = [line for line in lines if "encoded as" in line]
    assert len(sent) == 1 and "for a step of each of 5 optimizers in place of" in sent[0], sent
    model_bytes = {"Net": 8 * (65 * 32 + 33 * 10), "gan": 8 * (65 * 16 + 17 * 64 + 129 * 16 + 17)}
    assert f"in place of {(3 * model_bytes['Net'] + model_bytes['gan']) / 1e6:.3g} MB" in sent[0], sent
    assert not any("drift apart" in line for line in lines), lines
    # A rule for one optimizer of several, in both strategies.
    for options in ({"shares": "1,1"}, {"strategy": "local", "mega_batch": 64}):
        reconfigure(engine, compression="maxmin:4; critic*=none", **options)
        check_same_on_all_ranks("gan.py")
    reconfigure(engine, shares="1,1", compression="maxmin:4; no.such*=none")
    with pytest.raises(SystemExit, match=r"no tensor's name matches 'no.such\*'; the names are fc1.weight"):
        run("gan.py")


@pytest.mark.mpi(2, timeout=600)
def test_what_is_not_encoded_or_not_exchanged_is_told(num_ranks: int) -> None:
    from hvd_adaptive.wrap.script import intercept, start_world

    start_world()
    engine = intercept(RunConfig(shares="1,1", compression="maxmin:8"))
    # Horovod leaves such a layer to each rank.
    first = run("thawed.py frozen_before")
    lines = engine.report.lines()
    assert any("does not exchange the gradients of 2 parameters (fc1.weight, fc1.bias)" in line for line in lines), lines
    assert torch.isfinite(weights(first)["fc1.weight"]).all()
    run("odd.py adasum")
    reconfigure(engine, strategy="local", compression="maxmin:2")
    run("mnist.py --epochs 1")
    lines = engine.report.lines()
    assert "  not intercepted: DistributedOptimizer (SGD, op=Adasum)" in lines, lines
    for spec, op in (("maxmin:8", "Adasum"), ("maxmin:2", "Average")):
        said = f"  note: compression {spec!r} is not used by DistributedOptimizer (SGD, op={op}): {Reason.ADASUM.value}"
        assert said in lines, lines


def test_a_misspelt_pattern_is_a_bad_option(run_job: Any) -> None:
    command = [sys.executable, "-m", "hvd_adaptive", "run", "-np", "2", "--compression", "maxmin:4; fc9*=none"]
    job = run_job([*command, str(SCRIPTS / "mnist.py")], timeout=200)
    assert job.returncode == 2, job.describe()
    assert "compression: no tensor's name matches 'fc9*'; the names are fc1.weight" in job.stderr, job.describe()
    assert "Traceback" not in job.stderr, job.describe()
