"""What follows from the ranks' numbers, without ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_adaptive.core.shares import integer_shares
from hvd_adaptive.wrap.control import Controller, Window, judge, pack, unpack
from hvd_adaptive.wrap.options import RunConfig, parse_shares
from hvd_adaptive.wrap.reasons import Reason


def window(**values: Any) -> Window:
    base = {"num_delivered": 3, "num_handed": 4, "checksum": 77, "num_samples": 24, "global_samples": 48}
    return Window(**{**base, **values})


def exchange(windows: list[Window | None], proposal: Any = None) -> tuple[dict[str, Any], Any]:
    """What Horovod's sum gives all ranks; None is a rank that has joined."""
    size = len(windows)
    given = np.zeros(size) if proposal is None else np.array(proposal)
    vectors = [pack(w, given, world_size=size, rank=r) for r, w in enumerate(windows) if w is not None]
    return unpack(np.sum(vectors, axis=0), world_size=size)


def test_every_rank_gets_every_row_and_rank_0s_proposal() -> None:
    gathered, proposal = exchange([window(compute_s=0.1), window(compute_s=0.3)], [0.7, 0.3])
    assert gathered["compute_s"].tolist() == [0.1, 0.3] and proposal.tolist() == [0.7, 0.3]
    assert judge(gathered) == set()


@pytest.mark.parametrize(
    ("windows", "reason"),
    [
        ([window(), None], Reason.JOIN),
        ([window(), window(checksum=78)], Reason.UNION),
        ([window(checksum=0), window(checksum=0)], Reason.UNION),
        ([window(), window(dataset=5)], Reason.DATASET),
        ([window(), window(num_delivered=4)], Reason.OUT_OF_STEP),
        ([window(), window(reasons=Reason.SUB_BATCHES.bit)], Reason.SUB_BATCHES),
    ],
)
def test_one_rank_with_a_reason_is_enough(windows: Any, reason: Reason) -> None:
    assert judge(exchange(windows)[0]) == {reason}


@pytest.mark.parametrize("other", [window(num_samples=25), window(num_samples=23, global_samples=47)])
def test_lost_samples_are_an_error(other: Window) -> None:
    with pytest.raises(RuntimeError, match="did not add up"):
        judge(exchange([window(), other])[0])


def test_shares_settle_at_the_speeds_and_stay() -> None:
    speeds, batch = np.array([1.0, 2.0, 4.0]), 210
    controller = Controller(3, pinned=None)
    assert not controller.proposal.any()
    history = []
    for _ in range(12):
        parts = controller.proposal if controller.proposal.any() else np.ones(3) / 3
        sizes = np.array(integer_shares(parts.tolist(), batch))
        rows = [
            window(timed_steps=5, timed_samples=int(5 * n), timed_global_samples=5 * batch, compute_s=5 * n / v)
            for n, v in zip(sizes, speeds, strict=True)
        ]
        controller.propose(exchange(rows)[0], None)
        history.append(controller.proposal)
    assert history[-1] == pytest.approx(speeds / speeds.sum(), abs=0.02)
    assert np.array_equal(history[-1], history[-2])


def test_noise_moves_few_shares() -> None:
    """Equal ranks, one step in five held up by the machine's other work: without the look at the noise the mean is 0.08."""
    largest = []
    for seed in range(40):
        generator, controller, off = np.random.default_rng(seed), Controller(2, pinned=None), [0.0]
        for steps in (1, 3, 4, 4, 4, *[25] * 8):
            windows = []
            for _ in range(2):
                seconds = 0.01 * np.where(generator.random(steps) < 0.2, 5.0, generator.normal(1.0, 0.05, steps))
                counts = {"timed_steps": steps, "timed_samples": 24 * steps, "timed_global_samples": 48 * steps}
                windows.append(window(**counts, compute_s=seconds.sum(), compute_sq=(seconds**2).sum()))
            controller.propose(exchange(windows)[0], None)
            off.append(abs(controller.proposal[0] - 0.5) if controller.proposal.any() else 0.0)
        largest.append(max(off))
    assert np.mean(largest) < 0.04


def test_a_bound_on_batches_is_kept() -> None:
    controller = Controller(2, pinned=None)
    for _ in range(10):
        rows = [
            window(timed_steps=5, timed_samples=80, timed_global_samples=160, compute_s=s) for s in (1.0, 9.0)
        ]
        controller.propose(exchange(rows)[0], 20)
    assert (controller.proposal * 32).max() <= 20 + 1e-9


def test_pinned_shares_are_proposed_from_the_start() -> None:
    controller = Controller(2, pinned=(1.0, 3.0))
    controller.propose(exchange([window(), window()])[0], None)
    assert controller.proposal.tolist() == [0.25, 0.75]


def test_the_merges_rules_are_those_of_train() -> None:
    rules = RunConfig(strategy="local", merge_period="auto-qsr", merge_share=0.1, outer_step="momentum", outer_momentum=0.5)
    assert (rules.merging().merge_share, rules.merging().outer_momentum) == (0.1, 0.5)
    with pytest.raises(ValueError, match=r"merge_share 0\.1 needs merge_period auto or auto-qsr, got 'fixed'"):
        RunConfig(strategy="local", merge_share=0.1)


def test_options_are_checked() -> None:
    assert parse_shares("1, 2.5") == (1.0, 2.5)
    for values, message in [
        ({"interval": 0}, "interval must be > 0"),
        ({"shares": "a"}, "one number > 0 a rank"),
        ({"strategy": "async"}, "strategy must be one of sync, local"),
        ({"mega_batch": 64}, "mega_batch needs strategy 'local'"),
        ({"strategy": "local", "mega_batch": -1}, "mega_batch must be > 0"),
        ({"strategy": "local", "merge_share": 1.5}, "merge_share must be in"),
        ({"strategy": "local", "reducer": "hierarchical"}, "reducer must be one of sra, allreduce, auto"),
        ({"stall_limit_s": 0.5}, "must be >= 1"),
        ({"strategy": "local", "merge_weights": "samples"}, "merge_weights 'samples' needs lr_rule 'none', got 'linear'"),
        ({"strategy": "local", "merge_weights": "fednova", "lr_rule": "sqrt"}, "needs lr_rule 'none', got 'sqrt'"),
        ({"max_batch_size": -1}, "max_batch_size must be > 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            RunConfig(**values)  # type: ignore[arg-type]
