"""Scripts put together at random, as plain Horovod trains them."""

from __future__ import annotations

from random_scripts import drawn_campaign


def test_scripts_drawn_at_random() -> None:
    """Among them one that trains on lists of batches after one whose workers stay: its last weight must not stay, too."""
    ends = drawn_campaign(first=50, count=24, num_ranks=2)
    assert not ends.keys() - {"shared", "equal", "own statistics", "invalid"}, ends
    assert ends["shared"] >= 6 and ends["invalid"] <= 2, ends
