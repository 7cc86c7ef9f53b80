"""benchmarks/peers.py: tasks, what it reads from curves, what it names a case, and that nothing of a run outlives its limit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_the_target_is_a_run_at_plain_horovods_own_rate(tmp_path: Path) -> None:
    import argparse

    import peers
    from peers_task import Case

    def plain(loss: float, **case: Any) -> dict[str, Any]:
        return result([(400, 40.0, loss)], method=peers.PLAIN, link="loopback", **case)

    out = tmp_path / "results.jsonl"
    found = [
        plain(2.2, stage="tune", lr=0.003),
        plain(2.0, stage="tune", lr=0.0015),
        # A longer one has a lower loss at any rate.
        plain(1.5, stage="tune", lr=0.006, samples=800),
        plain(2.1, lr=0.003),
        plain(1.9, lr=0.0015),
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in found))
    case = Case(**result([], lr=0.003)["case"])
    bench = peers.Bench(argparse.Namespace(methods=[], out=out), 0.0)
    assert peers.best_rate(found, peers.PLAIN, case) == 0.0015
    assert bench._target(case) == 1.9


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


def test_a_case_of_before_there_were_models_is_known_again() -> None:
    import peers

    older, newer = result([])["case"], result([], model="gpt-1m", decay=False)["case"]
    assert peers.key(older) == peers.key(newer)
    assert peers.key(older) != peers.key(result([], model="resnet")["case"])


def test_four_unequal_ranks_need_no_more_than_two_cores() -> None:
    from peers_task import Case

    case = Case(stage="run", method="DDP", link="100mbit", speeds="1:1:2:4", lr=0.003, seed=1, samples=400, most_samples=400)
    assert case.factors == [8.0, 8.0, 4.0, 2.0]
    assert sum(1 / factor for factor in case.factors) <= 2
    assert case.parts == [0.125, 0.125, 0.25, 0.5]


@pytest.mark.parametrize(("name", "millions"), [("gpt-1m", 1.03), ("gpt-4m", 4.03), ("gpt-10m", 10.8), ("resnet", 0.61)])
def test_tasks(name: str, millions: float) -> None:
    from peers_task import TASKS

    task = TASKS[name]
    torch.manual_seed(1)
    model = task.model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    (x, y), (test_x, test_y) = task.samples()
    assert len(x) == len(y) > 9600 and len(test_x) == len(test_y) > 256
    # What is held out is not trained on.
    assert {row.numpy().tobytes() for row in test_x[:50]}.isdisjoint(row.numpy().tobytes() for row in x)
    # An untrained model knows nothing: about as much as guessing.
    classes = 256 if name.startswith("gpt") else 10
    assert task.loss(model, x[:64], y[:64]).item() == pytest.approx(math.log(classes), rel=0.15)


def test_a_short_run_takes_the_losses_of_another_at_its_own_speed() -> None:
    from peers import stretched

    short = result([(200, 20.0, 2.9), (400, 40.0, 2.5)])
    long = stretched(short, [[400, 1.0, 2.6], [800, 2.0, 2.2]])
    assert long["curve"] == [(400, 40.0, 2.6), (800, 80.0, 2.2)]
    assert long["sent_mb"] == [2.0, 4.0] and long["measured_samples"] == 400


def test_losses_at_equal_samples_are_compared_seed_by_seed() -> None:
    from peers_record import equal_table

    runs = [result([(400, 1.0, 9.9)], method="Horovod fp32", seed=seed, stage="equal") for seed in (1, 2)]
    for lr in (0.002, 0.003):
        runs += [result([(400, 1.0, 9.9)], method="ours local", seed=seed, lr=lr, stage="equal") for seed in (1, 2)]
    for run, loss in zip(runs, [2.0, 2.5, 2.1, 2.7, 2.03, 2.51], strict=True):
        run["final_loss"] = loss
    row = next(line for line in equal_table(runs, ["Horovod fp32", "ours local"]) if "ours" in line)
    # Of the better rate; the seeds' own losses are half a nat apart, the distances are not.
    assert "| 0.003 | 2 | 2.2700 | +0.0200 ± 0.0100 | +0.0300, +0.0100 |" in row


def test_a_run_on_ranks_whose_rate_falls_to_0() -> None:
    import peers
    from peers_task import Case

    case = Case(
        stage="equal", method="ours local, 4 bits", link="loopback", speeds="1:1", lr=0.003, seed=1, samples=1200,
        most_samples=1200, model="resnet", decay=True,
    )  # fmt: skip
    found = peers.run_case(case, limit_s=300)
    assert "error" not in found, found["log"]
    # The last round begins before the end: how many samples it has depends on how long merges take.
    assert found["curve"][-2][0] < 1200 <= sum(found["rank_samples"]) == found["curve"][-1][0]
    # From guessing, log 10, over all held-out images. The last look is at the same images.
    assert found["final_loss"] == pytest.approx(found["curve"][-1][2], abs=1e-4) and found["final_loss"] < 2.0
    assert found["last_lr"] < 0.003 / 20
