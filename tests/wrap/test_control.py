"""What follows from the ranks' numbers, without ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_adaptive.algorithm.shares import integer_shares
from hvd_adaptive.combinations import check_elastic_script
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import RunConfig, parse_shares
from hvd_adaptive.wrap.share_rules import Controller, Window, judge, pack, unpack


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
        ([window(rates=5), window(rates=6)], Reason.RATES),
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
    rules = RunConfig(strategy="local", merge_period="auto", merge_share=0.1, outer_step="momentum", outer_momentum=0.5)
    assert (rules.merging().merge_share, rules.merging().outer_momentum) == (0.1, 0.5)
    with pytest.raises(ValueError, match=r"merge_share 0\.1 needs merge_period auto, got None"):
        RunConfig(strategy="local", merge_share=0.1)


def test_options_are_checked() -> None:
    assert parse_shares("1, 2.5") == (1.0, 2.5) and parse_shares("equal", 3) == (1.0, 1.0, 1.0)
    check_elastic_script(RunConfig(shares="equal"))
    for values, message in [
        ({"interval": 0}, "interval must be > 0"),
        ({"shares": "a"}, "one number > 0 a rank"),
        ({"strategy": "async"}, "strategy must be one of sync, local"),
        ({"mega_batch": 64}, "mega_batch 64 needs strategy local, got 'sync'"),
        ({"strategy": "local", "mega_batch": -1}, "mega_batch must be > 0"),
        ({"strategy": "local", "merge_share": 1.5}, "merge_share must be in"),
        ({"strategy": "local", "reducer": "hierarchical"}, "reducer must be one of sra, allreduce, got"),
        ({"stall_limit_s": 0.5}, "must be >= 1"),
        ({"strategy": "local", "merge_weights": "samples"}, "merge_weights 'samples' needs lr_rule 'none', got 'linear'"),
        ({"strategy": "local", "merge_weights": "samples", "lr_rule": "sqrt"}, "needs lr_rule 'none', got 'sqrt'"),
        ({"max_batch_size": -1}, "max_batch_size must be > 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            RunConfig(**values)  # type: ignore[arg-type]


def play(controller: Controller, step_s: Any, looks: int, seed: int = 0, batch: int = 64) -> list[float]:
    """Two ranks, their seconds by samples and by the wall clock from a function; returns rank 0's parts at each look."""
    generator, history, parts = np.random.default_rng(seed), [], np.ones(2) / 2
    for look in range(looks):
        used, parts = parts, (controller.proposal if controller.proposal.any() else np.ones(2) / 2)
        sizes = np.array(integer_shares(used.tolist(), batch))
        steps = 4 if look < 4 else 25
        seconds, wall = step_s(sizes, steps, generator)
        rows = [
            window(
                timed_steps=steps, timed_samples=int(n) * steps, timed_global_samples=batch * steps, compute_s=s.sum(),
                compute_sq=(s**2).sum(), wall_steps=steps, wall_s=wall.sum(),
            )
            for n, s in zip(sizes, seconds, strict=True)
        ]  # fmt: skip
        controller.propose(exchange(rows)[0], None)
        history.append(float(used[0]))
    return history


def shared_cores(sizes: Any, steps: int, generator: Any) -> Any:
    """Equal ranks on shared cores: whoever has less to do seems faster by the clock of its own, and nothing is gained."""
    noise = np.where(generator.random((2, steps)) < 0.3, 1.6, 1.0) * generator.normal(1.0, 0.05, (2, steps))
    seconds = 0.01 * (sizes[:, None] / 32) ** np.array([[1.0], [0.8]]) * noise
    return seconds, seconds.max(0) + 0.004


def test_on_equal_ranks_shares_stay_near_equal_or_go_back() -> None:
    for seed in range(20):
        history = play(Controller(2, pinned=None), shared_cores, 30, seed)
        assert np.mean([abs(part - 0.5) for part in history]) < 0.03, (seed, history)


def test_shares_that_do_not_make_steps_shorter_are_given_up_for_longer_and_longer() -> None:
    def misleading(sizes: Any, steps: int, generator: Any) -> Any:
        # Rank 1 looks three times as slow, but the step takes as long as the larger batch, as where one core serves both.
        seconds = np.outer(sizes * np.array([1.0, 3.0]), np.full(steps, 1e-4))
        return seconds, np.full(steps, 1e-4 * (64 + abs(int(sizes[0] - sizes[1]))))

    history = play(Controller(2, pinned=None), misleading, 60)
    is_equal = [abs(part - 0.5) < 0.01 for part in history]
    assert not all(is_equal) and sum(is_equal) > 40 and sum(is_equal[30:]) >= sum(is_equal[:30])


def test_shares_that_make_steps_shorter_stay() -> None:
    def honest(sizes: Any, steps: int, generator: Any) -> Any:
        seconds = np.outer(sizes / np.array([3.0, 1.0]), generator.normal(1e-3, 5e-5, steps))
        return seconds, seconds.max(0) + 1e-3

    for seed in range(10):
        assert all(part == pytest.approx(0.75, abs=0.05) for part in play(Controller(2, pinned=None), honest, 30, seed)[8:])


@pytest.mark.parametrize("ratio", [1.25, 1.4, 1.6])
def test_ranks_that_differ_a_little_have_unequal_shares_but_for_trials(ratio: float) -> None:
    """Several looks in a row are enough, and after a trial of equal shares the look that it took."""
    def honest(sizes: Any, steps: int, generator: Any) -> Any:
        seconds = np.outer(sizes / np.array([ratio, 1.0]), generator.normal(1e-3, 2e-5, steps))
        return seconds, seconds.max(0)

    for seed in range(5):
        history = play(Controller(2, pinned=None), honest, 60, seed)[14:]
        unequal = [part for part in history if part != 0.5]
        assert len(unequal) >= len(history) - 4 and unequal == pytest.approx([ratio / (1 + ratio)] * len(unequal), abs=0.03)


@pytest.mark.parametrize(
    ("ratio", "reason"),
    [(1.4, "equal ones are tried for a look"), (1.7, "another look must confirm that the ranks' speeds differ")],
)
def test_shares_that_are_equal_for_a_look_say_why(ratio: float, reason: str) -> None:
    controller, reasons = Controller(2, pinned=None), []

    def honest(sizes: Any, steps: int, generator: Any) -> Any:
        reasons.append(controller.why_equal)
        seconds = np.outer(sizes / np.array([ratio, 1.0]), np.full(steps, 1e-3))
        return seconds, seconds.max(0)

    play(controller, honest, 30)
    assert reasons.count(reason) in (1, 2, 3) and "the ranks' speeds do not differ by more than noise" not in reasons[20:]
