"""A batch that does not fit into memory: how to know it, what to free, and how to cut it."""

from __future__ import annotations

import gc
import itertools

import torch

from hvd_adaptive.train.batches import Rows

# What torch and its libraries say where they raise no OutOfMemoryError.
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory, the device's or the host's, did not suffice."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
    )


def begun_step_error(rank: int, num_samples: int) -> RuntimeError:
    """Returns the error for a batch that cannot be computed again, as its optimizer step may have changed parameters."""
    return RuntimeError(
        f"rank {rank} ran out of memory with a batch of {num_samples} samples after optimizer.step had begun: "
        "parameters may have been changed, so the batch cannot be computed again. Set max_batch_size below "
        f"{num_samples}, or use an optimizer with less state."
    )


def free_cached(device: torch.device) -> None:
    """Gives back what a failed step held. Call it after the ``with`` block whose error it was: while that error is handled,
    its traceback holds the step's tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cut(rows: Rows, work: int, *, most: int) -> list[tuple[Rows, int]]:
    """Cuts a batch into parts of nearly equal length.

    Args:
        rows: its rows, shape (num_samples,).
        work: their work, divided among the parts by length.
        most: samples of the longest part, >= 1.

    Returns:
        Each part's rows and work: rows in their order, work summing to ``work``.
    """
    num_parts = -(-len(rows) // most)
    edges = [len(rows) * part // num_parts for part in range(num_parts + 1)]
    shares = [work * edge // max(1, len(rows)) for edge in edges]
    return [
        (rows[start:stop], shares[part + 1] - shares[part])
        for part, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
