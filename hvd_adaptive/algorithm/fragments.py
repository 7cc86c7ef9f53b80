"""Which layers of a model are merged together, and when in a round (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """What becomes of a fragment at a place of each round.

    Attributes:
        position: the part of the round's work that has been claimed by then, in (0, 1].
        fragment: which one, from 0.
        arrives: its sum is taken in; else its progress is sent.
    """

    position: float
    fragment: int
    arrives: bool


def phases(num_fragments: int, delay: float) -> list[Phase]:
    """Returns the phases of a round in their order, the same for every round.

    Fragments are sent at equal distances, the last one at the end of the round. A sum that arrives after the end of a round
    does so in the next one.

    Args:
        num_fragments: F, >= 1.
        delay: from sending to taking in, as a part of a round, in [0, 1]: a fragment's sum arrives before it is sent again.
    """
    found: list[tuple[tuple[float, int], Phase]] = []
    delay = round(delay, 6)
    for fragment in range(num_fragments):
        # Rounded, so that what comes at one place compares equal.
        sent = round((fragment + 1) / num_fragments, 9)
        arrives = round(sent + delay, 9) if round(sent + delay, 9) <= 1 else round(sent + delay - 1, 9)
        found.append(((sent, 1), Phase(sent, fragment, False)))
        # Without a delay right after it was sent; else before what is sent at the same place, which may be itself.
        found.append(((arrives, 0 if delay else 2), Phase(arrives, fragment, True)))
    return [phase for _, phase in sorted(found)]


def phases_beside_steps(num_merges: int, num_fragments: int) -> list[Phase]:
    """Returns the phases of a round in which the whole model is sent several times, one fragment after the other.

    All are sent at the round's end, and before it each at equal distances. A sum is taken in before its fragment is sent again,
    the last ones at once.

    Args:
        num_merges: of a round, >= 1.
        num_fragments: F, >= 1.
    """
    # A little before, so that the batch that begins there comes after it.
    early = range(1, (num_merges - 1) * num_fragments + 1)
    places = [(number / num_merges / num_fragments - 1e-9, (number - 1) % num_fragments) for number in early]
    places += [(1.0, fragment) for fragment in range(num_fragments)]
    found = [Phase(place, fragment, arrives) for place, fragment in places for arrives in (True, False)]
    return found + [Phase(1.0, fragment, True) for fragment in range(num_fragments)]


def cut_layers(names: Sequence[str], sizes: Sequence[int], num_fragments: int) -> list[range]:
    """Returns each fragment's parameters: runs of whole layers with about equally many elements.

    A layer is what shares a name up to its first number (``blocks.3``), or else its module's (``head``).

    Args:
        names: of the parameters, in the model's order.
        sizes: their elements.
        num_fragments: F, >= 1.

    Raises:
        ValueError: if there are fewer layers than fragments.
    """
    edges = [i for i in range(1, len(names)) if _layer(names[i]) != _layer(names[i - 1])]
    if len(edges) + 1 < num_fragments:
        raise ValueError(
            f"merge_fragments must be <= the model's number of layers, got {num_fragments} > {len(edges) + 1}: a fragment has "
            "at least one layer. Lower merge_fragments"
        )
    ends = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for fragment in range(1, num_fragments):
        # As many edges as there are fragments behind this one must be left.
        usable = [e for e in edges[: len(edges) - (num_fragments - 1 - fragment)] if e > cuts[-1]]
        target = ends[-1] * fragment / num_fragments
        cuts.append(min(usable, key=lambda edge: abs(ends[edge] - target)))
    return [range(a, b) for a, b in itertools.pairwise([*cuts, len(names)])]


def _layer(name: str) -> str:
    numbered = re.match(r"(.*?(?:^|\.)\d+)(?:\.|$)", name)
    return numbered[1] if numbered else name.rpartition(".")[0]
