"""Record and replay of the command over real ranks, Horovod and MPI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import read_run

OPTIONS = [
    "--epochs", "1.5", "--hidden-size", "16", "--batch-size", "16", "--mega-batch", "400", "--hash-interval", "1",
    "--batch-size-rule", "paper", "--min-batch-size", "8", "--max-batch-size", "64", "--eval-rounds", "0",
    "--checkpoint-interval", "0",
]  # fmt: skip


def hashes(path: Path) -> tuple[str, list[str]]:
    summary, rounds = read_run(path)
    return summary["model_hash"], [r["model_hash"] for r in rounds]


def claims(path: Path) -> list[str]:
    return (path / "claims.jsonl").read_text().splitlines()


@pytest.mark.mpi(3, timeout=600)
def test_a_recorded_run_repeats_bit_for_bit(train: Any, shared_tmp_path: Path) -> None:
    from mpi4py import MPI

    rank, folder = MPI.COMM_WORLD.Get_rank(), shared_tmp_path
    first = folder / "first"
    answer = train(*OPTIONS, "--record", "--slowdown", "1,2,3", out="first")
    assert rank or "HOROVOD_FUSION_THRESHOLD=0" in answer.stderr, answer
    expected = hashes(first)
    assert len(set(expected[1])) == len(expected[1]) > 3 and expected[1][-1] == expected[0]

    again = ["--config", first / "config.json", "--replay", first]
    # The ranks' speeds are others each time; only the recording makes them claim the same.
    for name, slowdown in (("second", "1,1,1"), ("third", "3,2,1")):
        train(*again, "--slowdown", slowdown, out=name)
        assert hashes(folder / name) == expected
        assert claims(first)[1:] == claims(folder / name)[1:]

    half = [*again, "--slowdown", "2,1,1", "--checkpoint-interval", "1"]
    for more in (["--epochs", "0.8"], ["--resume", "auto"]):
        train(*half, *more, out="half")
    assert hashes(folder / "half") == expected, "a resumed replay is another run"
    assert [line for line in claims(folder / "half")[1:] if '"identity"' not in line] == claims(first)[1:]

    lines = claims(first)
    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        value = json.loads(lines[3])
        # A rank may have taken none; of a round of 400 samples, at most 64 a claim, one of three took three.
        most = max(value["claims"], key=len)
        most[0], most[1] = most[1], most[0]
        changed = [*lines[:3], json.dumps(value), *lines[4:]]
        (first / "claims.jsonl").write_text("\n".join(changed) + "\n")
    MPI.COMM_WORLD.Barrier()
    answer = train(*again, out="fourth", code=2)
    assert rank or "of round 2 is" in answer.stderr, answer
    answer = train(*again, "--slowdown", "1", out="fifth", code=2, alone=True)
    assert rank or "this run is not the recorded one" in answer.stderr, answer
