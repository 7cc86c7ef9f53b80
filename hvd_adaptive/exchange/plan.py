"""Who reduces what: a flat tensor in chunks, each chunk in pieces with one owner. Pure functions of sizes, equal on all ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """Elements start to stop of a flat tensor."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def chunks(num_elements: int, *, chunk_elements: int, granularity: int, num_pieces: int) -> list[Span]:
    """Cuts a tensor into chunks of about equal size, whose pieces begin at multiples of the granularity.

    Args:
        num_elements: of the tensor, >= 0.
        chunk_elements: the most elements of a chunk, rounded up to a whole number of granules for each piece.
        granularity: of the codec.
        num_pieces: into how many pieces each chunk will be cut.
    """
    if not num_elements:
        return []
    step = granularity * num_pieces
    num_chunks = -(-num_elements // max(chunk_elements, step))
    size = -(-num_elements // (num_chunks * step)) * step
    return [Span(start, min(start + size, num_elements)) for start in range(0, num_elements, size)]


def pieces(span: Span, *, num_pieces: int, granularity: int) -> list[Span]:
    """Cuts a span into as many pieces, in order, of equal whole granules; those at the end may be shorter or empty."""
    size = -(-span.size // (num_pieces * granularity)) * granularity
    edges = [min(span.start + index * size, span.stop) for index in range(num_pieces + 1)]
    return [Span(*pair) for pair in pairwise(edges)]
