"""10,000 mutations of valid input to everything that reads what others wrote; benchmarks/fuzz.py runs more of them."""

from __future__ import annotations

import pickle
from pathlib import Path

import fuzz as fuzz_module
import pytest
from fuzz import Failure, Target, fuzz, make_targets, memory_limit, no_unpickling, quiet, run_case

SEED = 0
NUM_CASES = 10_000
_PICKLE = pickle.dumps(Path("x"))


@pytest.mark.slow
def test_mutations_are_refused_clearly_or_accepted(tmp_path: Path) -> None:
    targets = make_targets(tmp_path)
    with quiet(), memory_limit(), no_unpickling():
        counts = fuzz(targets, SEED, NUM_CASES)
    assert sum(counter.total() for counter in counts.values()) >= 0.99 * NUM_CASES
    # Mutations that all pass, or all fail at the first look, test nothing.
    assert all(counter["refused"] >= 5 for counter in counts.values()), counts
    assert all(counter["accepted"] >= 3 for name, counter in counts.items() if name != "embedded data"), counts


@pytest.mark.slow
def test_the_harness_sees_other_errors_hangs_and_large_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    # One that hangs computes for so long.
    monkeypatch.setattr(fuzz_module, "CASE_LIMIT_S", 1)

    def hang() -> None:
        while True:
            pass

    def allocate() -> None:
        bytearray(1 << 40)

    faults = {"traceback": lambda: {}["x"], "hang": hang, "allocation": allocate, "pickle": lambda: pickle.loads(_PICKLE)}
    for name, run in faults.items():
        with pytest.raises(Failure, match=f"target {name}, seed 1, case 0"), memory_limit(), no_unpickling():
            run_case(Target(name, 1, (ValueError,), lambda random, run=run: run()), 1, 0)
