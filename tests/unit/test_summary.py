"""What a run adds up to, across resumes that change what is scored or measured."""

from __future__ import annotations

import logging
import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.engine.start_speeds import Speeds
from hvd_adaptive.xmc.summary import _SUMMED, Totals
from hvd_adaptive.xmc.train_config import TrainConfig

# A rank of an idle world could have computed all the time.
SESSION: Any = SimpleNamespace(slowdown=SimpleNamespace(capacity_s=lambda start_s, stop_s: np.array([stop_s - start_s])))


def make_totals(state: dict[str, Any] | None = None, *, speed: float | None = None, scored: str = "x", **train: Any) -> Totals:
    speeds = None if speed is None else Speeds(compute=np.array([speed]), wall=np.array([speed]))
    totals = Totals(Config(), TrainConfig(**train), LocalTransport(), speeds, scored=scored)
    if state is not None:
        totals.load_state_dict(state)
    return totals


def add_rounds(totals: Totals, *scores: float | None) -> Totals:
    """Adds rounds of 10 s and 100 samples each."""
    for p1 in scores:
        number = totals.num_samples // 100
        record = RoundRecord(
            round=number,
            epoch=0.1 * (number + 1),
            train_s=10.0 * (number + 1),
            num_samples=100 * (number + 1),
            loss=None,
            weight=np.ones(1),
            payload_bytes=0,
            stats={name: np.ones(1) for name in (*_SUMMED, "average_s", "preempted")},
        )
        totals.add_round(record, None if p1 is None else {"p1": p1}, SESSION)
    return totals


def summary(totals: Totals) -> dict[str, Any]:
    session: Any = SimpleNamespace(train_s=10.0, num_samples=totals.num_samples, inexact=[])
    return totals.summary(session, final={"p1": 0.0}, model_hash="", ranks_agreed=True)


def test_a_best_score_of_other_samples_is_not_compared_with(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = add_rounds(make_totals(scored="50 samples", target_p1=0.8), 0.9, 0.3, 0.4).state_dict()
    same = make_totals(state, scored="50 samples", target_p1=0.8)
    assert same.best == {"p1": 0.9} and same.num_without_better == 2 and summary(same)["target_train_s"] == 10.0
    assert not caplog.text
    other = make_totals(state, scored="2000 samples", target_p1=0.8)
    assert other.best is None and other.num_without_better == 0 and summary(other)["target_train_s"] is None
    assert "evaluations were of 50 samples and are of 2000 samples: " in caplog.text
    add_rounds(other, 0.5)
    assert not other.is_over({"p1": 0.5}, 1.0) and other.is_over({"p1": 0.9}, 1.0)
    assert caplog.messages[-1] == "the run ends: P@1 has reached 0.8"
    assert summary(other)["best"] == {"p1": 0.5} and summary(other)["best_train_s"] == 40.0


def test_older_checkpoints_go_on_with_their_best() -> None:
    state = add_rounds(make_totals(), 0.9, 0.3).state_dict()
    del state["scored"]
    assert make_totals(state).best == {"p1": 0.9}


def test_utilisation_is_of_the_rounds_whose_speeds_are_known() -> None:
    # 100 samples in 10 s, where 20 a second were possible. Under a supervisor nobody has measured that.
    elastic = add_rounds(make_totals(), None, None)
    assert summary(elastic)["utilisation"] is None
    alone = add_rounds(make_totals(elastic.state_dict(), speed=20.0), None)
    assert summary(alone)["utilisation"] == summary(alone)["utilisation_wall"] == pytest.approx(0.5)
    elastic_again = add_rounds(make_totals(alone.state_dict()), None)
    again = add_rounds(make_totals(elastic_again.state_dict(), speed=20.0), None)
    assert summary(again)["utilisation"] == pytest.approx(0.5) and summary(again)["samples"] == 500
    older = elastic.state_dict()
    del older["measured_samples"]
    assert summary(add_rounds(make_totals(older, speed=20.0), None))["utilisation"] == pytest.approx(0.5)


def test_the_evaluation_after_the_last_round_may_reach_the_target_first() -> None:
    totals = add_rounds(make_totals(target_p1=0.6), 0.5, None)
    assert totals.takes({"p1": 0.7}, 20.0) and summary(totals)["target_train_s"] == 20.0
    reached = add_rounds(make_totals(target_p1=0.6), 0.65, None)
    assert not reached.takes({"p1": 0.61}, 20.0) and summary(reached)["target_train_s"] == 10.0


def test_time_to_target_is_that_of_the_target_after_a_resume() -> None:
    state = add_rounds(make_totals(target_p1=0.5), 0.3, 0.55, 0.52).state_dict()
    times = {
        target: summary(make_totals(state, target_p1=target))["target_train_s"] for target in (0.5, 0.53, 0.4, 0.6, None)
    }
    assert times == {0.5: 20.0, 0.53: 20.0, 0.4: 20.0, 0.6: None, None: None}
    assert summary(add_rounds(make_totals(state, target_p1=0.6), 0.61))["target_train_s"] == 40.0
    del state["target_p1"]
    assert summary(make_totals(state, target_p1=0.5))["target_train_s"] == 20.0


def test_two_ranks_add_up_to_these_numbers() -> None:
    stats = {name: np.array([1.0, 3.0]) * (1 + place) for place, name in enumerate(_SUMMED)}
    stats |= {"wait_s": np.array([1.0, 3.0]), "merge_s": np.array([0.4, 0.25]), "preempted": np.zeros(2)}
    stats |= {"average_s": np.array([0.1, 0.0])}
    stats |= {"claim_s": np.array([0.0, 0.2]), "control_s": np.array([0.02, 0.04])}

    def run(transport: LocalTransport) -> dict[str, Any]:
        totals = Totals(Config(), TrainConfig(), transport, None, scored="x")
        for number in (1, 2):
            totals.add_round(
                RoundRecord(
                    round=number, epoch=0.5 * number, train_s=10.0 * number, num_samples=50 * number, loss=None,
                    weight=np.ones(2), payload_bytes=700, stats=stats,
                ),
                None,
                SESSION,
            )  # fmt: skip
        session: Any = SimpleNamespace(train_s=20.0, num_samples=100, inexact=[])
        return totals.summary(session, final={"p1": 0.25}, model_hash="", ranks_agreed=True)

    least_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for found in LocalWorld(2).run(run):
        # Of 20 s: the mean over ranks of what both rounds took.
        shares = {name: found[f"{name}_share"] for name in ("wait", "merge", "control", "claim")}
        assert shares == pytest.approx({"wait": 0.2, "merge": 0.0375, "control": 0.003, "claim": 0.01})
        assert found["samples"] == 100 and found["samples_per_s"] == 5.0
        merges = stats | {"merge_s": np.array([0.5, 0.25])}
        assert found["ranks"] == {name: (2 * values).tolist() for name, values in merges.items() if name in _SUMMED}
        most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert all(least_bytes <= peak <= most_bytes for peak in found["peak_memory_bytes"])
        assert len(found["peak_memory_bytes"]) == found["world_size"] == 2
        assert (found["rounds"], found["epochs"], found["payload_bytes"]) == (2, 1.0, 1400)
