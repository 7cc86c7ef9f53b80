"""Options drawn at random: sessions end, take every sample, and leave one model; random_sessions.py runs more of them."""

from __future__ import annotations

import pytest
from random_sessions import Case

from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.session.session import Session

COUNT = 15
# These 30 draw as many of the values of options as any 30, and merge_fragments on several ranks.
FIRST = 65


@pytest.mark.parametrize("first", [FIRST, FIRST + COUNT])
def test_random_options_are_refused_clearly_or_train(first: int) -> None:
    refused = []
    for seed in range(first, first + COUNT):
        case = Case.draw(seed)
        try:
            refused.append(case.check())
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}") from error
    # Cases that are all refused test nothing.
    assert sum(not why for why in refused) > COUNT / 2, refused


@pytest.mark.parametrize(
    ("taken", "models", "why"),
    [([0, 0], {"a"}, "samples were taken 0 to 2 times"), ([*range(61)] * 3, {"a", "b"}, "models differ")],
)
def test_samples_left_out_and_models_that_differ_are_seen(
    taken: list[int], models: set[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case({}, 2, 1, 0, 61, 3, "SGD", has_norm=False, loads=False, breaks=False)
    monkeypatch.setattr(Case, "_train", lambda *_, **__: (taken, models))
    with pytest.raises(AssertionError, match=why):
        case.check()


@pytest.mark.parametrize("kind", [ValueError, TypeError, AgreedError])
def test_what_ranks_raise_while_they_train_is_no_refusal(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(session: Session) -> bool:
        raise kind("in a step")

    monkeypatch.setattr(Session, "synchronize", fail)
    with pytest.raises(kind, match="in a step"):
        Case({}, 2, 1, 0, 61, 3, "SGD", has_norm=False, loads=False, breaks=False).check()
