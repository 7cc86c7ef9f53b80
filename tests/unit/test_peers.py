"""benchmarks/peers.py: what it reads from curves, what it names a case, and that nothing of a run outlives its limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def result(curve: list[tuple[int, float, float]], **case: Any) -> dict[str, Any]:
    known = {
        "stage": "run", "method": "DDP", "link": "100mbit", "speeds": "1:1", "lr": 0.003, "seed": 1, "samples": 400,
        "most_samples": 800, "target": None,
    }  # fmt: skip
    return {"case": {**known, **case}, "curve": curve, "sent_mb": [1.0, 2.0]}


def test_seconds_and_losses_between_two_looks() -> None:
    from peers_record import loss_at, seconds_to

    found = result([(200, 10.0, 3.0), (400, 20.0, 2.0), (600, 30.0, 1.5), (600, 31.0, 1.4)])
    assert seconds_to(found, 2.5) == pytest.approx(15.0)
    assert seconds_to(found, 3.5) == 10.0
    assert seconds_to(found, 1.0) is None
    assert loss_at(found, 300) == pytest.approx(2.5)
    # Two looks at one place: the later one has what was on the way.
    assert loss_at(found, 600) == 1.4
    assert loss_at(found, 601) is None


def test_the_table_has_ratios_by_seed() -> None:
    from peers_record import table

    plain = [result([(400, 40.0 + seed, 2.0)], method="Horovod fp32", seed=seed) for seed in (1, 2)]
    sooner = [result([(200, 5.0, 3.0), (400, 10.0, 2.0), (800, 20.0, 1.9)], method="ours local", seed=seed) for seed in (1, 2)]
    never = [result([(800, 20.0, 2.1)], method="DDP", seed=1)]
    rows = {line.split("|")[1].strip(): line for line in table([*plain, *sooner, *never], ["Horovod fp32", "DDP", "ours local"])}
    assert "4.15x (4.10 to 4.20)" in rows["**ours local**"]
    assert "+0.0000 (+0.0000 to +0.0000)" in rows["**ours local**"]
    assert "never in 800 samples: 1 of 1" in rows["DDP"]


def test_a_run_that_hangs_ends_at_its_limit_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import peers
    from peers_task import Case

    # A rank that leaves its session, as hivemind's and torchft's servers do.
    hang = "import os, sys, time; os.setsid() if os.fork() == 0 else None; time.sleep(300)"
    monkeypatch.setattr(peers, "ranks_command", lambda ranks, program: ([sys.executable, "-c", hang], dict(peers.os.environ)))
    folders = []
    seen = peers.processes_of
    monkeypatch.setattr(peers, "processes_of", lambda folder: folders.append(folder) or seen(folder))
    case = Case(
        stage="run", method="DDP", link="loopback", speeds="1:1", lr=0.003, seed=1, samples=400, most_samples=400, target=None
    )
    found = peers.run_case(case, limit_s=1.5)
    assert found["error"] == "took longer than 1.5 s"
    assert seen(folders[0]) == []


def test_an_unknown_method_is_refused() -> None:
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "tune", "--methods", "ours locl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent, timeout=120)
    assert done.returncode == 2
    assert "got 'ours locl'" in done.stderr


def test_a_case_is_known_again_whatever_its_target(tmp_path: Path) -> None:
    import peers

    lines = [result([(400, 1.0, 2.0)], target=None), result([(400, 1.0, 1.9)], target=2.1), result([(400, 1.0, 1.8)], seed=2)]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [found["curve"][-1][2] for found in peers.read(tmp_path / "runs.jsonl")] == [1.9, 1.8]
