"""Merge weights: convex rules sum to 1, all follow permutations, ranks that are not finite count nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.algorithm.merge_weights import labels_are_rare, merge_weights
from hvd_adaptive.config import Config
from hvd_adaptive.research.heterogpu import add_rules

RULES = ("paper", "heterogpu", "uniform", "updates", "samples")
add_rules()

worlds = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.5, 50), min_size=n, max_size=n),
        st.lists(st.integers(1, 256), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)


def weights_of(rule: str, updates: Any, sizes: Any, finite: Any = None, norms: Any = None) -> np.ndarray:
    """By the rule, perturbed where the models' norms are given."""
    updates, sizes = np.asarray(updates, float), np.asarray(sizes, float)
    return merge_weights(
        Config(merge_weights=rule, perturbation=norms is not None),
        num_updates=updates,
        num_samples=updates * sizes,
        batch_sizes=sizes,
        finite=np.ones(len(updates), bool) if finite is None else np.asarray(finite),
        norm_per_parameter=np.zeros(len(updates)) if norms is None else norms,
    )


@pytest.mark.parametrize(
    ("rule", "perturbed"), [*((rule, False) for rule in RULES), ("paper", True), ("heterogpu", True)]
)
@given(world=worlds)
def test_properties_of_every_rule(rule: str, perturbed: bool, world: Any) -> None:
    updates, sizes, finite, order = map(np.array, world)
    if not finite.any():
        finite[0] = True
    norms = np.full(len(updates), 0.01) if perturbed else None
    weights = weights_of(rule, updates, sizes, finite, norms)
    assert weights.dtype == np.float64 and (weights >= 0).all()
    assert (weights[~finite] == 0).all() and (weights[finite] > 0).all()
    # Perturbed, heterogpu's make the merge a longer or shorter step.
    if rule != "heterogpu":
        assert weights.sum() == pytest.approx(1, abs=1e-12)
    # With a tie for most or fewest updates the perturbation picks the first, which depends on the order.
    if not perturbed or len(set(updates)) == len(updates):
        assert weights_of(rule, updates[order], sizes[order], finite[order], norms) == pytest.approx(weights[order])


@pytest.mark.parametrize("rule", RULES)
def test_one_rank_counts_whole(rule: str) -> None:
    assert weights_of(rule, [7.0], [64]).tolist() == [1.0]


def test_rules_by_hand() -> None:
    updates, sizes = [1.0, 1, 2, 4], [64, 64, 64, 64]
    assert weights_of("updates", updates, sizes) == pytest.approx([0.125, 0.125, 0.25, 0.5])
    assert weights_of("paper", updates, sizes) == pytest.approx([0.125, 0.125, 0.25, 0.5])
    assert weights_of("uniform", updates, sizes) == pytest.approx([0.25] * 4)
    assert weights_of("samples", [1.0, 1], [64, 192]) == pytest.approx([0.25, 0.75])
    assert weights_of("paper", [5.0, 5.5], [64, 192]) == pytest.approx([0.25, 0.75])


def test_the_perturbation_by_hand() -> None:
    small, large = np.array([0.01, 0.02]), np.array([0.01, 0.2])
    assert weights_of("heterogpu", [1.0, 3], [8, 8], norms=small) == pytest.approx([0.225, 0.825])
    assert weights_of("heterogpu", [1.0, 3], [8, 8], norms=small).sum() == pytest.approx(1 + 0.1 * (0.75 - 0.25))
    assert weights_of("paper", [1.0, 3], [8, 8], norms=small) == pytest.approx(np.array([0.225, 0.825]) / 1.05)
    assert weights_of("heterogpu", [1.0, 3], [8, 8], norms=large) == pytest.approx([0.25, 0.75])
    # Nobody made most or fewest updates.
    for rule in ("heterogpu", "paper"):
        assert weights_of(rule, [2.0, 2], [8, 8], norms=small).tolist() == [0.5, 0.5]


def test_a_rank_without_updates_counts_nothing() -> None:
    for rule in RULES:
        assert weights_of(rule, [0.0, 2, 2], [8, 8, 8])[0] == 0


def test_no_finite_rank_stops_the_run() -> None:
    with pytest.raises(RuntimeError, match="ALL ranks hold NaN or Inf"):
        weights_of("updates", [1.0, 1], [8, 8], [False, False])
    with pytest.raises(RuntimeError, match="no finite rank made an update"):
        weights_of("updates", [0.0, 1], [8, 8], [True, False])
    with pytest.raises(ValueError, match="got 'best'"):
        weights_of("best", [1.0], [8])


def test_labels_are_rare_where_most_occur_on_one_rank() -> None:
    # YSO-Finna-EN, the embedded set, and Bibtex at the defaults of train.
    assert labels_are_rare(2.9, 20_575, 3_200)
    assert not labels_are_rare(4.4, 6_215, 3_200) and not labels_are_rare(2.4, 159, 610)
