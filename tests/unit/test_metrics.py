"""P@k and PSP@k against a brute-force reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.xmc import evaluation, metrics
from hvd_adaptive.xmc.data import SparseDataset

KS = (1, 3, 5)
scores = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 1.0, math.inf, math.nan])


class Rows(NamedTuple):
    indices: Tensor
    offsets: Tensor
    values: None = None


def make_rows(lists: list[list[int]]) -> Rows:
    indices = torch.tensor([i for row in lists for i in row], dtype=torch.int64)
    return Rows(indices, torch.tensor([0, *np.cumsum([len(row) for row in lists])], dtype=torch.int64))


def rank_labels(row: list[float], k: int) -> list[int]:
    def key(label: int) -> tuple[bool, float, int]:
        score = row[label]
        return (math.isnan(score), 0.0 if math.isnan(score) else -score, label)

    return sorted(range(len(row)), key=key)[:k]


def brute_force(
    top: list[list[int]], labels: list[list[int]], inverse: np.ndarray, ks: tuple[int, ...]
) -> dict[str, float]:
    result = {}
    for k in ks:
        hits = gain = most = 0.0
        for predicted, true in zip(top, labels, strict=True):
            found = set(predicted[:k]) & set(true)
            hits += len(found)
            gain += sum(inverse[label] for label in found)
            most += sum(sorted((inverse[label] for label in set(true)), reverse=True)[:k])
        result[f"p{k}"] = hits / (k * len(top))
        result[f"psp{k}"] = gain / most if most else 0.0
    return result


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 12).flatmap(
        lambda width: st.lists(st.lists(scores, min_size=width, max_size=width), min_size=1, max_size=5)
    ),
    st.data(),
)
def test_top_k_labels_equals_sorting(rows: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rows[0])))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    logits = torch.tensor(rows, dtype=dtype)
    before = logits.clone()
    top = metrics.top_k_labels(logits, k)
    assert top.dtype == torch.int64
    assert top.tolist() == [rank_labels(row, k) for row in rows]
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def test_top_k_labels_of_many_labels_with_and_without_ties() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 3000)
    logits[::2] = logits[::2].mul(4).round()
    top = metrics.top_k_labels(logits, 5)
    assert top.tolist() == [rank_labels(row, 5) for row in logits.tolist()]
    assert metrics.top_k_labels(torch.full((2, 3000), math.nan), 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert metrics.top_k_labels(torch.zeros(0, 7), 5).shape == (0, 5)


@settings(deadline=None)
@given(
    st.integers(5, 12).flatmap(
        lambda num_labels: st.tuples(
            st.just(num_labels),
            st.lists(st.lists(st.integers(0, num_labels - 1), max_size=7), min_size=1, max_size=9),
        )
    ),
    st.integers(1, 4),
    st.integers(0, 2**16),
)
def test_blocks_add_up_to_the_brute_force_metrics(
    case: tuple[int, list[list[int]]], block_size: int, seed: int
) -> None:
    num_labels, lists = case
    rng = np.random.default_rng(seed)
    top = [rng.permutation(num_labels)[:5].tolist() for _ in lists]
    counts = np.bincount([label for row in lists for label in set(row)], minlength=num_labels)
    inverse = metrics.inverse_propensity(counts, 50)
    totals = np.zeros(1 + 3 * len(KS))
    for first in range(0, len(lists), block_size):
        block = slice(first, first + block_size)
        totals += metrics.block_scores(torch.tensor(top[block]), make_rows(lists[block]), inverse)
    result = metrics.finalize_scores(totals)
    assert result == pytest.approx(brute_force(top, lists, inverse, KS))
    assert list(result) == ["p1", "p3", "p5", "psp1", "psp3", "psp5"]
    assert all(0 <= value <= 1 + 1e-12 for value in result.values())


def test_perfect_predictions_have_psp_one_and_unlabelled_rows_lower_only_p() -> None:
    inverse = metrics.inverse_propensity(np.array([9, 1, 4, 2]), 16)
    best_first = np.argsort(-inverse)
    top = torch.from_numpy(np.stack([best_first, best_first]))
    labels = make_rows([[0, 1, 2, 3], []])
    result = metrics.finalize_scores(metrics.block_scores(top, labels, inverse, (1, 3)), (1, 3))
    assert result == pytest.approx({"p1": 0.5, "p3": 0.5, "psp1": 1, "psp3": 1})
    nothing = metrics.block_scores(top, make_rows([[], []]), inverse, (1, 3))
    assert set(metrics.finalize_scores(nothing, (1, 3)).values()) == {0.0}


def test_inverse_propensity_follows_the_formula() -> None:
    counts = np.array([0, 1, 50, 1000])
    c = (math.log(1000) - 1) * 2.5**0.55
    expected = [1 + c * math.exp(-0.55 * math.log(n + 1.5)) for n in counts]
    result = metrics.inverse_propensity(counts, 1000)
    assert result == pytest.approx(expected)
    assert (np.diff(result) < 0).all()
    assert metrics.inverse_propensity(np.array([0, 1]), 1).tolist() == [1, 1]


class LogitsByFeature(torch.nn.Embedding):
    def forward(self, x: Rows) -> Tensor:
        return super().forward(x.indices)


@pytest.mark.parametrize("num_samples", [None, 1, 6])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_score_each_row_once(world_size: int, num_samples: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "BLOCK_SIZE", 3)
    lists = [[row % 4, 4 + row % 3] for row in range(10)]
    test = SparseDataset(
        name="a", split="test", num_features=10, num_labels=7, fingerprint="",
        x_indptr=np.arange(11), x_indices=np.arange(10, dtype=np.int32), x_values=np.ones(10, np.float32),
        y_indptr=np.arange(0, 21, 2), y_indices=np.array(lists, np.int32).ravel(),
    )  # fmt: skip
    torch.manual_seed(0)
    model = LogitsByFeature(10, 7)
    inverse = metrics.inverse_propensity(test.label_counts(), 10)

    def score(transport: LocalTransport) -> dict[str, float]:
        return evaluation.Evaluator(test, inverse, transport).evaluate(model, num_samples)

    top = [rank_labels(row, 5) for row in model.weight.tolist()]
    expected = brute_force(top[:num_samples], lists[:num_samples], inverse, KS)
    assert LocalWorld(world_size).run(score) == [pytest.approx(expected)] * world_size
