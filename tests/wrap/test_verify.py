"""``run --verify``: two runs of a script compared, and the verdict on them."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive.cli.verify import judge
from hvd_adaptive.wrap.noise_by_sample import NoiseBySample
from hvd_adaptive.wrap.recorded_gradients import RecordedGradients
from hvd_adaptive.wrap.verification import _sketch
from hvd_adaptive.wrap.without_chance import _Seeded

RUN = [sys.executable, "-m", "hvd_adaptive", "run"]
SCRIPT = Path(__file__).parent / "scripts" / "verified.py"


def _kept(sketches: Any, *, first_unequal: int = 4, num_recorded: int = 0, **others: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("draws", "has_16_bits", "has_reasons"), False)
    are_unequal = np.arange(len(sketches)) >= first_unequal
    kept = {"sketches": sketches, "are_unequal": are_unequal, "optimizers": np.arange(len(sketches)) % 2}
    # Two optimizers take turns.
    kept["are_recorded"] = np.arange(len(sketches)) < num_recorded
    return {**kept, "names": np.array([["big", "small", ""], ["other", "", ""]]), **flags, **others}


def _gradients(num_steps: int = 20) -> Any:
    """Of three parameters, of which the second has a hundredth of the gradient, and the third one that is zero in theory."""
    values = np.random.default_rng(0).normal(size=(num_steps, 3, 64))
    return values * np.array([1.0, 1e-2, 1e-9])[:, None]


def test_equal_gradients_are_the_same() -> None:
    gradients = _gradients()
    other = gradients * (1 + 1e-6)
    other[:, 2] *= -1
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert is_same and "the same gradients, up to rounding: 20 steps, 16 of them with unequal batches" in lines[0]


@pytest.mark.parametrize(("step", "by"), [(4, 0.003), (9, 0.05), (19, 0.05)])
def test_a_step_with_another_gradient_is_named(step: int, by: float) -> None:
    gradients = _gradients()
    other = gradients.copy()
    other[step:, 1] *= 1 + by
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert not is_same
    name = "parameter 1 of optimizer 2" if step % 2 else "small"
    assert lines[0].startswith(f"DIFFERENT: at step {step + 1} the gradient of {name} differs by {by / (1 + by):.1%}")
    is_same, lines = judge(_kept(gradients), _kept(other, draws=True))
    assert not is_same and "cannot be seen: at step" in lines[0]


@pytest.mark.parametrize("step", [4, 9, 19])
def test_small_differences_are_named_where_weights_are_the_same(step: int) -> None:
    gradients = _gradients()
    other = gradients.copy()
    other[step:, 1] *= 1.003
    is_same, lines = judge(_kept(gradients), _kept(other, num_recorded=19))
    assert not is_same and lines[0].startswith(f"DIFFERENT: at step {step + 1} ")


def test_a_small_difference_that_stays_is_not_called_rounding() -> None:
    gradients = _gradients()
    other = gradients.copy()
    other[9:, 1] *= 1.009
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert not is_same and "cannot be seen" in lines[0]


def test_gradients_of_16_bits_may_differ_by_their_rounding() -> None:
    gradients = _gradients()
    later = (np.arange(20) >= 4)[:, None, None]
    assert judge(_kept(gradients), _kept(gradients * (1 + 0.01 * later), has_16_bits=True))[0]
    assert not judge(_kept(gradients), _kept(gradients * (1 + 0.1 * later), has_16_bits=True))[0]


def test_gradients_that_vanish_are_not_compared_by_their_rounding() -> None:
    gradients = _gradients() * (0.5 ** np.arange(20))[:, None, None]
    other = gradients + 1e-7 * np.random.default_rng(1).normal(size=gradients.shape) * (np.arange(20) >= 4)[:, None, None]
    assert judge(_kept(gradients), _kept(other))[0]


def test_differences_before_shares_change_are_the_scripts_own() -> None:
    gradients = _gradients()
    other = gradients.copy()
    other[1] *= 1.05
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert not is_same and "cannot be seen: step 2 has other gradients" in lines[0] and "seeds" in lines[0]


def test_differences_that_grow_slowly_are_no_verdict() -> None:
    gradients = _gradients()
    other = gradients * (1 + 1e-6 * np.where(np.arange(20) < 4, 0, 2.0 ** np.arange(20)))[:, None, None]
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert not is_same and "cannot be seen: differences grow from step to step" in lines[0]
    # Steps from the same weights are a proof, if there are some.
    other[:12] = gradients[:12]
    assert not judge(_kept(gradients), _kept(other, num_recorded=10))[0]
    is_same, lines = judge(_kept(gradients), _kept(other, num_recorded=11))
    assert is_same and "12 steps from the same weights, 8 of them with unequal batches (later differences grow" in lines[0]


def test_shares_that_stay_equal_are_no_fault_if_the_report_says_why() -> None:
    gradients = _gradients()
    is_same, lines = judge(_kept(gradients), _kept(gradients, first_unequal=99, has_reasons=True))
    assert is_same and "shares stay equal in all 20 steps" in lines[0]
    is_same, lines = judge(_kept(gradients), _kept(gradients, first_unequal=99))
    assert not is_same and "no batch of the 20 steps had unequal shares yet" in lines[0]


@pytest.mark.parametrize("count", [0, 3, 15])
def test_fewer_steps_are_told(count: int) -> None:
    gradients = _gradients()
    is_same, lines = judge(_kept(gradients), _kept(gradients[:count]))
    assert not is_same and f"made 20 steps with equal batches, and {count} in the second run" in lines[0]


def test_numbers_that_are_not_finite_in_both_are_no_difference() -> None:
    gradients, other = _gradients(), _gradients()
    gradients[10:] = other[10:] = np.nan
    assert judge(_kept(gradients), _kept(other))[0]
    other[10:] = 1.0
    assert not judge(_kept(gradients), _kept(other))[0]


@pytest.mark.parametrize("shape", [(3,), (5, 4096), (70000,)])
def test_a_sketch_keeps_distances(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(50):
        one, other = (torch.randn(shape, generator=generator) for _ in range(2))
        ratios.append(np.linalg.norm(_sketch(one, seed=5) - _sketch(other, seed=5)) / float((one - other).norm()))
    assert min(ratios) > 0.6 and max(ratios) < 1.5 and 0.95 < np.mean(ratios) < 1.05


def test_a_data_set_draws_the_same_for_a_sample_also_from_its_own_generators() -> None:
    class Noisy:
        def __init__(self) -> None:
            self.own = [np.random.RandomState(3), np.random.default_rng(3), random.Random(3), torch.Generator()]

        def __getitem__(self, index: int) -> list[float]:
            one, two, three, four = self.own
            return [one.rand(), two.random(), three.random(), float(torch.rand(1, generator=four)), random.random()]

    dataset = _Seeded(Noisy())
    assert dataset[1] == dataset[1] != dataset[2]


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> NoiseBySample:
    noise = NoiseBySample(lambda: None)
    for (owner, name), draw in noise.replacements().items():
        monkeypatch.setattr(owner, name, draw)
    return noise


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(len(x), 3), lambda x: torch.randn((len(x), 3)), lambda x: torch.randn(size=[len(x), 3]),
        lambda x: torch.randint(9, (len(x),)), lambda x: torch.randint(2, 90, size=(len(x), 2)), lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x), lambda x: torch.randint_like(x, 90), lambda x: torch.normal(x, 0.5),
        lambda x: torch.normal(0.0, 1.0, (len(x), 3)), lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.multinomial(x.exp(), 2), lambda x: torch.poisson(x.exp()),
        lambda x: torch.empty(len(x), 1, 1).bernoulli_(0.5), lambda x: torch.empty_like(x).exponential_(),
        lambda x: torch.rand(len(x)), lambda x: torch.randn(len(x), 3, generator=torch.Generator()),
        lambda x: torch.distributions.Gamma(x.exp(), x.exp()).rsample(),
        lambda x: torch.distributions.Normal(x, 1.0).rsample(), lambda x: torch.distributions.Uniform(x - 1, x).sample(),
        lambda x: torch.nn.functional.gumbel_softmax(x),
    ],
)  # fmt: skip
def test_a_sample_gets_the_same_noise_in_any_batch(draw: Any, noise: NoiseBySample) -> None:
    data = torch.linspace(-1, 1, 36).view(12, 3)

    def drawn(samples: list[int]) -> dict[int, Any]:
        torch.manual_seed(7)
        noise.begin(samples)
        rows = [draw(data[samples]) for _ in range(20)]
        noise.end()
        return {sample: torch.stack([part[row] for part in rows]) for row, sample in enumerate(samples)}

    whole, parts = drawn(list(range(12))), drawn([7, 3, 5]) | drawn([0, 11, 1, 2, 4, 9, 10])
    assert all(torch.equal(parts[sample], whole[sample]) for sample in parts)
    # Not the same ones each time, nor for all samples.
    assert not torch.equal(whole[0], whole[1]) and len(whole[0].unique(dim=0)) > 1


def test_rows_may_be_along_another_dimension(noise: NoiseBySample) -> None:
    def drawn(samples: list[int]) -> Any:
        torch.manual_seed(7)
        noise.begin(samples)
        return torch.stack([torch.randn(7, len(samples), 2), torch.zeros(7, len(samples), 2).normal_()])

    assert torch.equal(drawn([4, 9, 1, 0, 3])[:, :, 3], drawn([0, 8, 2])[:, :, 0])


def test_other_draws_are_left_alone_and_do_not_depend_on_the_batch(noise: NoiseBySample) -> None:
    def drawn() -> list[Any]:
        torch.manual_seed(3)
        return [torch.rand(()), torch.randn(5, 4), torch.randperm(4), torch.multinomial(torch.ones(9), 4)]

    def drawn_after(samples: list[int]) -> Any:
        torch.manual_seed(3)
        noise.begin(samples)
        torch.randn(len(samples), 2)
        return torch.rand(2)

    before = drawn()
    noise.begin([3, 1, 8, 4])
    # The last one is as long as the batch by chance.
    assert all(torch.equal(one, other) for one, other in zip(before, drawn(), strict=True))
    assert torch.equal(drawn_after([3, 1, 8, 4]), drawn_after(list(range(50))))


@pytest.mark.mpi(2)
def test_a_second_run_steps_with_the_gradients_of_the_first(shared_tmp_path: Path) -> None:
    import horovod.torch as hvd

    hvd.init()
    file = shared_tmp_path / "gradients"
    layouts = {
        "dense": torch.randn(3, 4), "single": torch.randn(()), "half": torch.randn(5).bfloat16(), "empty": torch.randn(0, 3),
        "columns": torch.randn(4, 3).t(), "complex": torch.randn(3, dtype=torch.complex64), "doubles": torch.randn(3).double(),
    }  # fmt: skip
    parameters = {name: torch.nn.Parameter(value) for name, value in layouts.items()}
    unused = torch.nn.Parameter(torch.zeros(2))
    everything = {"params": [*parameters.values(), unused]}
    optimizer = SimpleNamespace(param_groups=[everything], process_set=hvd.global_process_set)

    def filled(value: float) -> None:
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, value)

    first = RecordedGradients(file, writes=True, rank=hvd.rank())
    for step in range(2):
        filled(step + 1)
        assert first.record(optimizer)
    second = RecordedGradients(file, writes=False, rank=hvd.rank())
    for step in range(2):
        filled(-1.0 - hvd.rank())
        assert second.record(optimizer)
        assert all((parameter.grad == step + 1).all() for parameter in parameters.values()) and unused.grad is None
    filled(7.0)
    assert not second.record(optimizer) and not second.record(optimizer), "nothing is left"
    assert all((parameter.grad == 7).all() for parameter in parameters.values())
    # No space for another step, and nothing in the file of it.
    size = file.stat().st_size if hvd.rank() == 0 else 0
    full = RecordedGradients(file, writes=True, rank=hvd.rank())
    full._left = size // 2 - 1
    assert full.record(optimizer) == (hvd.rank() != 0)
    assert size == (file.stat().st_size if hvd.rank() == 0 else 0)
    # A model that has other gradients in the second run.
    third = RecordedGradients(file, writes=False, rank=hvd.rank())
    parameters["dense"].grad = None
    assert not third.record(optimizer)
    hvd.shutdown()


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("plain", 0, r"verify: the same gradients, up to rounding: 40 steps, 3\d of them with unequal batches"),
        ("flooding", 1, r"verify: DIFFERENT: at step 1\d the gradient of [\w.]+ differs"),
        ("noisy_gan.py", 0, r"verify: the same gradients, up to rounding: 100 steps, [2-8]\d of them with unequal batches"),
        ("draws", 1, r"verify: cannot be seen: at step \d the gradient.*draws random numbers"),
        ("collates", 1, r"verify: cannot be seen: at step \d the gradient.*draws random numbers in its steps or its collate_fn"),
        ("stops", None, r"verify: run 2, with shares 1,2, ended with exit code [13]"),
    ],
)
def test_two_runs_are_compared(mode: str, code: int | None, said: str, run_job: Any) -> None:
    script = [str(SCRIPT.with_name(mode))] if mode.endswith(".py") else [str(SCRIPT), mode]
    job = run_job([*RUN, "-np", "2", "--verify", "100", *script], timeout=200)
    # A rank that loses the other one may be the first to end.
    assert job.returncode == (code if code is not None else job.returncode or -1), job.describe()
    assert re.search(said, job.stderr), job.describe()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--verify", "20"], "give their number by -np"),
        (["-np", "1", "--verify", "20"], "give their number by -np"),
        (["-np", "2", "--verify", "3"], "--verify must be >= 8 steps, got 3"),
        (["-np", "2", "--verify", "20", "--dry-run"], "leave --dry-run out"),
        (["-np", "2", "--verify", "20", "--strategy", "local"], "leave --strategy local out"),
        (["-np", "2", "--verify", "20", "--shares", "equal"], "leave --shares equal out"),
        (["--elastic", "--max-np", "2", "--verify", "20"], "leave --elastic out"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], said: str, run_job: Any) -> None:
    job = run_job([*RUN, *options, str(SCRIPT), "plain"], timeout=60)
    assert job.returncode == 2 and said in job.stderr, job.describe()
