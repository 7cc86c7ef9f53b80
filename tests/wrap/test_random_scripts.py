"""Scripts put together at random, and those that reviewers wrote, as plain Horovod trains them."""

from __future__ import annotations

from random_scripts import by_hand_campaign, drawn_campaign


def test_scripts_drawn_at_random() -> None:
    """Among them one that trains on lists of batches after one whose workers stay: its last weight must not stay, too."""
    ends = drawn_campaign(first=50, count=24, num_ranks=2)
    assert not ends.keys() - {"shared", "equal", "own statistics", "invalid"}, ends
    assert ends["shared"] >= 6 and ends["invalid"] <= 2, ends


def test_scripts_that_need_the_whole_batch_and_those_that_only_seem_to() -> None:
    wrong = by_hand_campaign(num_ranks=2)
    assert not wrong, "\n".join(wrong.values())
