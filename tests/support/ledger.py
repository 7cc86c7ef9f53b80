"""Reads from a run's recording which samples its rounds consumed."""

from __future__ import annotations

import json
from pathlib import Path

from hvd_adaptive.engine.replay import read_recording


def check_ledger(run: Path, *, dataset_size: int, num_epochs: int) -> None:
    """Every sample of every epoch was consumed exactly once.

    The rounds of an epoch take one piece of its order after the other, and within a round the claims of the ranks overlap
    nowhere and leave no gap, which the reader of recordings checks.

    Args:
        run: directory of a run with ``--record``.
        dataset_size: samples of an epoch.
        num_epochs: that it was to train.
    """
    _, rounds = read_recording(run)
    assert sorted(rounds) == list(range(len(rounds)))
    cursor, ends = 0, set()
    for number in range(len(rounds)):
        entry = rounds[number]
        assert max(claim[1] for rank in entry.claims for claim in rank) == entry.num_samples
        cursor += entry.num_samples
        ends.add(cursor)
    assert cursor == num_epochs * dataset_size
    # No round goes over an epoch's end.
    assert {epoch * dataset_size for epoch in range(1, num_epochs + 1)} <= ends
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == sorted(rounds)
    assert all(sum(line["ranks"]["samples"]) == rounds[line["round"]].num_samples for line in lines)
