"""Scripts that use gradients of the rank's own batch by themselves keep equal shares; what looks like that does not."""

from __future__ import annotations

import pytest
from wrapped_scripts import run_both

from hvd_adaptive.wrap.reasons import Reason

EQUAL = {
    "by_hand": Reason.UNEXCHANGED,
    "reduced_by_hand": Reason.UNEXCHANGED,
    "sparse_by_hand": Reason.UNEXCHANGED,
    "second_optimizer": Reason.UNEXCHANGED,
    "not_reduced_at_all": Reason.UNEXCHANGED,
    "sharpness": Reason.OWN_GRADIENTS,
    "fgm": Reason.OWN_GRADIENTS,
    "functional": Reason.OWN_GRADIENTS,
    "by_gradient": Reason.MIXED,
    "x_grad": Reason.MIXED,
    "bank": Reason.HELD,
    "queue": Reason.HELD,
}
SHARED = ["unused_head", "two_losses", "normalized", "perturbed", "of_sum", "counted"]


@pytest.mark.mpi(2, timeout=300)
def test_own_gradients_keep_equal_shares(num_ranks: int) -> None:
    results, _ = run_both([f"own_use.py {mode}" for mode in EQUAL], num_ranks, rtol=0.0)
    for (mode, reason), (trained, fractions) in zip(EQUAL.items(), results, strict=True):
        assert trained and all(loader.reasons == {reason} for loader in trained), (mode, trained[0].reasons)
        assert not any(fractions), mode


@pytest.mark.mpi(2, timeout=300)
def test_what_only_looks_like_it_is_shared_out(num_ranks: int) -> None:
    results, _ = run_both([f"own_use.py {mode}" for mode in SHARED], num_ranks)
    for mode, (trained, fractions) in zip(SHARED, results, strict=True):
        assert not trained[0].reasons and any(fractions), (mode, trained[0].reasons)
