"""What ranks tell each other about losses that are means over targets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.wrap.target_means import Layout, Targets

LAYOUTS = st.builds(Layout, st.lists(st.integers(0, 63), min_size=1, max_size=6).map(tuple).filter(any), st.booleans())


@given(LAYOUTS, st.sets(st.integers(0, 6)))
def test_a_layout_goes_through_one_number_of_the_exchange(layout: Layout, collectives_at: set[int]) -> None:
    here, there = Targets(), Targets()
    here.learn(layout, are_weighted=True, collectives_at=collectives_at)
    there.agree(int(float(here.code)), are_weighted=True)
    assert there.agreed == layout and there.collectives_at == collectives_at
    there.agree(here.code, are_weighted=False)
    assert there.agreed is None


@given(LAYOUTS, st.one_of(st.none(), LAYOUTS))
def test_batches_that_differ_have_none(layout: Layout, other: Layout | None) -> None:
    targets = Targets()
    for found in (layout, other):
        targets.learn(found, are_weighted=True, collectives_at=set())
    assert (targets.code > 0) == (layout == other)


def test_too_many_losses_have_none() -> None:
    for means in ((1,) * 7, (64,)):
        targets = Targets()
        targets.learn(Layout(means, are_smoothed=False), are_weighted=True, collectives_at=set())
        assert targets.code == 0
