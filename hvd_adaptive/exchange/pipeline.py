"""Runs a chain of stages over chunks so that one chunk is on the wire while the next is encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Stage = Callable[[int, Any], Any]


def run_pipeline(num_chunks: int, stages: Sequence[Stage]) -> None:
    """Takes every chunk through all stages, each stage of a chunk after the same stage of the chunk before.

    While a stage waits for its chunk's collective, the collective of the next chunk is under way already. The order is the
    same on all ranks, so stages may call collectives.

    Args:
        num_chunks: number of chunks.
        stages: called with the chunk's number and what the stage before it returned (None for the first).
    """
    results: dict[int, Any] = {}
    for tick in range(num_chunks + len(stages) - 1):
        for depth, stage in enumerate(stages):
            chunk = tick - depth
            if 0 <= chunk < num_chunks:
                results[chunk] = stage(chunk, results.pop(chunk, None))
