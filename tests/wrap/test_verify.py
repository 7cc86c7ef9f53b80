"""``run --verify``: two runs of a script compared, and the verdict on them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.cli.verify import judge
from hvd_adaptive.wrap.verification import _sketch

RUN = [sys.executable, "-m", "hvd_adaptive", "run"]
SCRIPT = Path(__file__).parent / "scripts" / "verified.py"


def _kept(sketches: Any, first_unequal: int = 4, draws: bool = False) -> dict[str, Any]:
    return {"sketches": sketches, "are_unequal": np.arange(len(sketches)) >= first_unequal, "draws": np.array(draws)}


def _gradients(num_steps: int = 20) -> Any:
    return np.random.default_rng(0).normal(size=(num_steps, 64))


def test_equal_gradients_are_the_same() -> None:
    gradients = _gradients()
    is_same, lines = judge(_kept(gradients), _kept(gradients * (1 + 1e-6)))
    assert is_same and "the same gradients, up to rounding: 20 steps, 16 of them with unequal batches" in lines[0]


def test_a_step_with_other_gradients_is_named() -> None:
    gradients = _gradients()
    other = gradients.copy()
    other[9:] *= 1.05
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert not is_same and lines[0].startswith("DIFFERENT: step 10 has other gradients, by 4.8%")
    is_same, lines = judge(_kept(gradients), _kept(other, draws=True))
    assert not is_same and "cannot be seen: step 10" in lines[0]


def test_differences_before_shares_change_are_the_scripts_own() -> None:
    gradients = _gradients()
    other = gradients.copy()
    other[1] *= 1.05
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert not is_same and "cannot be seen: step 2 has other gradients" in lines[0] and "seeds" in lines[0]


def test_differences_that_grow_slowly_are_no_verdict() -> None:
    gradients = _gradients()
    other = gradients * (1 + 1e-6 * np.where(np.arange(20) < 4, 0, 2.0 ** np.arange(20)))[:, None]
    is_same, lines = judge(_kept(gradients), _kept(other))
    assert not is_same and "grow slowly" in lines[0]


def test_shares_that_stay_equal_are_no_fault() -> None:
    gradients = _gradients()
    is_same, lines = judge(_kept(gradients), _kept(gradients, first_unequal=99))
    assert is_same and "shares stay equal in all 20 steps" in lines[0]


def test_fewer_steps_are_told() -> None:
    gradients = _gradients()
    is_same, lines = judge(_kept(gradients), _kept(gradients[:15]))
    assert not is_same and lines[0] == "the script made 20 steps with equal batches, and 15 with unequal ones"


def test_numbers_that_are_not_finite_in_both_are_no_difference() -> None:
    gradients, other = _gradients(), _gradients()
    gradients[10:] = other[10:] = np.nan
    assert judge(_kept(gradients), _kept(other))[0]
    other[10:] = 1.0
    assert not judge(_kept(gradients), _kept(other))[0]


@pytest.mark.parametrize("shapes", [[(3,), (5, 4096), (70000,)], [(10,)] * 30])
def test_a_sketch_keeps_distances(shapes: list[tuple[int, ...]]) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(20):
        one, other = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
        distance = sum(float((a - b).pow(2).sum()) for a, b in zip(one, other, strict=True)) ** 0.5
        ratios.append(float((_sketch(one) - _sketch(other)).norm()) / distance)
    assert min(ratios) > 0.8 and max(ratios) < 1.2 and 0.97 < sum(ratios) / len(ratios) < 1.03


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("plain", 0, r"verify: the same gradients, up to rounding: 40 steps, 3\d of them with unequal batches"),
        ("flooding", 1, r"verify: DIFFERENT: step 1\d has other gradients"),
        ("pairs", 0, r"verify: shares stay equal in all 40 steps"),
        ("draws", 1, r"verify: cannot be seen: step \d has other gradients.*draws random numbers"),
        ("unseeded", 1, r"verify: cannot be seen: step 1 has other gradients .* even with the same batches"),
        ("stops", 3, r"verify: run 2, with shares 1,2, ended with exit code 3"),
    ],
)
def test_two_runs_are_compared(mode: str, code: int, said: str, run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", "--verify", "100", str(SCRIPT), mode], timeout=200)
    assert job.returncode == code and re.search(said, job.stderr), job.describe()


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
