"""Outlying progress is left out of merges, by whole model and by fragment, and the merged delta has a largest norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hvd_adaptive.algorithm.outliers import NormHistory, clip_factor
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.comm.threads import LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.strategies.local import LocalStrategy


@given(st.floats(0.1, 1e6), st.integers(1, 40), st.lists(st.floats(0.8, 1.2), min_size=10, max_size=60))
def test_usual_norms_pass_and_a_large_one_does_not(scale: float, work: int, factors: list[float]) -> None:
    history = NormHistory(5.0)
    assert not any(history.is_outlier(scale * factor * work**0.5, work) for factor in factors)
    assert history.is_outlier(20 * scale * work**0.5, work)
    # Not twice as large with four times as many updates.
    assert not history.is_outlier(2 * scale * work**0.5, 4 * work)


def test_norms_that_have_grown_for_good_are_let_in_again_and_the_first_ones_are_never_judged() -> None:
    history = NormHistory(3.0)
    assert not any(history.is_outlier(norm, 1.0) for norm in (1.0, 100.0, 1.0, 1.0, 100.0, 1.0))
    steady = NormHistory(3.0)
    judged = [steady.is_outlier(1.0 if number < 20 else 1.6, 1.0) for number in range(120)]
    assert judged[20] and not any(judged[:20]) and not any(judged[60:])


def test_a_history_begins_again_after_as_many_outliers_as_it_takes_to_judge(caplog: pytest.LogCaptureFixture) -> None:
    history = NormHistory(3.0, "rank 2")
    judged = [history.is_outlier(1e-9 if number < 20 else 1e-3, 1.0) for number in range(60)]
    assert judged == 20 * [False] + 8 * [True] + 32 * [False]
    assert caplog.text.count("rank 2: the progress was an outlier in 8 merges in a row") == 1
    # It is judged again, and single outliers never are enough.
    assert [history.is_outlier(norm, 1.0) for norm in 20 * (1.0, 1e-3)] == 20 * [True, False]


def test_norms_of_zero_and_no_work_do_not_count() -> None:
    history = NormHistory(3.0)
    assert not any(history.is_outlier(norm, work) for norm, work in 20 * [(0.0, 1.0), (0.0, 0.0)])
    assert history.state_dict() == NormHistory(3.0).state_dict()
    assert not any(history.is_outlier(1.0, 1.0) for _ in range(20))


def test_a_history_goes_on_from_its_state() -> None:
    one, two = NormHistory(3.0), NormHistory(3.0)
    for norm in np.linspace(1, 2, 20):
        one.is_outlier(float(norm), 2.0)
    two.load_state_dict(one.state_dict())
    judged = [[history.is_outlier(norm, 2.0) for norm in (2.0, 9.0, 2.0)] for history in (one, two)]
    assert judged[0] == judged[1] == [False, True, False]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=8), st.floats(0.1, 50))
def test_a_clipped_delta_is_at_most_so_long(ranks: list[tuple[float, float]], largest: float) -> None:
    weights, norms = (np.array(column) for column in zip(*ranks, strict=True))
    factor = clip_factor(weights, norms, largest)
    assert 0 < factor <= 1 and factor * (weights * norms).sum() <= largest * (1 + 1e-12)
    assert factor == 1 or (weights * norms).sum() > largest


def progress_of(rank: int, number: int) -> Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(50 * number + rank), dtype=torch.float64)


def drift(
    transport: Transport, *, large: Callable[[int, int], float] = lambda rank, number: 1.0, **options: Any
) -> dict[str, Any]:
    """14 rounds of known progress, which is ``large(rank, round)`` times as long."""
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 5, bias=False)).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    config = Config(merge_weights="uniform", outer_step="none", **options)
    strategy = LocalStrategy(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport)
    overlap, moves, weights = strategy.merge.overlap, [], []

    def flat() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()

    for number in range(14):
        before = flat()
        if overlap is not None:
            overlap.start_round_(work=2.0)
        with torch.no_grad():
            for p, part in zip(model.parameters(), progress_of(transport.rank, number).split(20), strict=True):
                p += large(transport.rank, number) * part.view(p.shape)
        if overlap is not None:
            overlap.reach_(1.0, 1.0)
        _, weight, _ = strategy.end_round(RoundStats(batch_size=1, num_updates=1, num_samples=1))
        weights.append(weight)
        moves.append(flat() - before)
    strategy.drain()
    return {"final": flat(), "moves": moves, "weights": weights}


KINDS: list[dict[str, Any]] = [
    {}, {"merge_fragments": 2}, {"merge_fragments": 2, "compression": "maxmin:8"},
]


@pytest.mark.parametrize("options", KINDS)
def test_outlying_progress_of_a_rank_is_left_out(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    def large(rank: int, number: int) -> float:
        return 50.0 if (rank, number) == (1, 10) else 1.0

    results = LocalWorld(2).run(lambda t: drift(t, large=large, outlier_limit=5.0, **options))
    assert torch.equal(results[0]["final"], results[1]["final"])
    expected = 1.0 + sum(
        progress_of(0, n) if n == 10 else (progress_of(0, n) + progress_of(1, n)) / 2 for n in range(14)
    )
    assert torch.allclose(results[0]["final"], expected, atol=0.2 if "compression" in options else 1e-10)
    num_named = 2 if "merge_fragments" in options else 1
    assert caplog.text.count("ranks [1]: their progress") == num_named
    plain = LocalWorld(2).run(lambda t: drift(t, large=large, **options))
    assert not torch.allclose(plain[0]["final"], expected, atol=3.0)


@pytest.mark.parametrize("options", KINDS[:2])
def test_who_has_made_no_progress_yet_is_let_in(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """As a layer that is thawed later, or a warm-up that begins at a learning rate of 0."""

    def large(rank: int, number: int) -> float:
        return float(number >= 9)

    ours = LocalWorld(2).run(lambda t: drift(t, large=large, outlier_limit=8.0, **options))
    plain = LocalWorld(2).run(lambda t: drift(t, large=large, **options))
    assert torch.equal(ours[0]["final"], plain[0]["final"]) and not caplog.text


@pytest.mark.parametrize("options", KINDS[:2])
def test_where_nothing_is_unusual_nothing_changes(options: dict[str, Any]) -> None:
    ours = LocalWorld(3).run(lambda t: drift(t, outlier_limit=8.0, clip_delta=1e6, **options))
    plain = LocalWorld(3).run(lambda t: drift(t, **options))
    assert torch.equal(ours[0]["final"], plain[0]["final"])


def test_if_all_are_outliers_none_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def large(rank: int, number: int) -> float:
        return 50.0 if number == 10 else 1.0

    results = LocalWorld(2).run(lambda t: drift(t, large=large, outlier_limit=5.0))
    assert results[0]["weights"][10].tolist() == [0.5, 0.5] and not caplog.text


@pytest.mark.parametrize("options", KINDS[:2])
def test_a_merge_moves_the_model_by_a_largest_norm(options: dict[str, Any]) -> None:
    ours = LocalWorld(2).run(lambda t: drift(t, clip_delta=0.5, **options))
    assert torch.equal(ours[0]["final"], ours[1]["final"])
    longest = 0.5 * (2**0.5 if "merge_fragments" in options else 1)
    norms = [float(move.norm()) for move in ours[0]["moves"]]
    assert max(norms) <= longest * (1 + 1e-9) and max(norms) > 0.2
    if not options:
        assert ours[0]["weights"][0].sum() < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outlier_limit": -1.0}, "outlier_limit must be >= 0, got -1.0"),
        ({"clip_delta": 1.0, "merge_weights": "fisher-rows"}, "clip_delta 1.0 needs merge_weights paper or .*'fisher-rows'"),
        ({"outlier_limit": 3.0, "sparse_merge": "always"}, "outlier_limit 3.0 needs sparse_merge auto or never, got 'always'"),
        ({"outlier_limit": 3.0, "strategy": "sync"}, "outlier_limit 3.0 needs strategy local, got 'sync'"),
        ({"logical_ranks": 2, "clip_delta": 1.0}, "logical_ranks needs clip_delta 0.0, got 1.0"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**options)
