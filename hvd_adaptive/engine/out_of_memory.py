"""A batch that does not fit into memory: how to know it, what to free, and how to cut it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Generator, Sequence

import numpy as np
import torch

from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.records import RoundStats

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


def even_sizes(num_samples: int, *, most: int) -> list[int]:
    """Returns the sizes of the fewest nearly equal parts of a batch of which none has more than ``most`` samples."""
    num_parts = -(-num_samples // most)
    edges = [num_samples * part // num_parts for part in range(num_parts + 1)]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def cut(rows: Rows, work: int, sizes: Sequence[int]) -> list[tuple[Rows, int]]:
    """Cuts a batch into parts.

    Args:
        rows: its rows, shape (num_samples,).
        work: their work, divided among the parts by length.
        sizes: samples of each part, summing to num_samples.

    Returns:
        Each part's rows and work: rows in their order, work summing to ``work``.

    Raises:
        ValueError: if the sizes do not make up the batch.
    """
    edges = [0, *itertools.accumulate(sizes)]
    if edges[-1] != len(rows) or min(sizes) < 1:
        raise ValueError(f"parts of {', '.join(map(str, sizes))} samples do not make up a batch of {len(rows)}")
    shares = [work * edge // len(rows) for edge in edges]
    return [
        (rows[start:stop], shares[part + 1] - shares[part])
        for part, (start, stop) in enumerate(itertools.pairwise(edges))
    ]


class MemoryCeiling:
    """The samples that fit into a rank's memory, as far as is known, and the batches that did not.

    Args:
        device: where batches are computed.

    Attributes:
        samples: of the largest batch that may be tried, infinite until one has failed.
    """

    def __init__(self, device: torch.device) -> None:
        self.samples = np.inf
        self._device = device
        self._failed = False
        self._returned: list[tuple[Rows, int]] = []

    def take_back(self, batch: Batch) -> None:
        """Takes a batch that failed, to give it again in halves; half its size is the ceiling from now on."""
        self.samples = min(self.samples, batch.num_samples // 2)
        self._returned.append((batch.rows, batch.work))
        self._failed = True

    def batches(
        self,
        batch: Batch,
        sizes: Sequence[int],
        source: BatchSource,
        stats: RoundStats,
    ) -> Generator[Batch, None, list[int]]:
        """Yields a batch, or its parts until all of its samples have been computed.

        Args:
            batch: to be computed.
            sizes: samples of the parts to cut it into at once, as a replay does; empty for the whole, if it fits.
            source: makes batches of rows.
            stats: gets the seconds of making parts.

        Returns:
            Samples of each part that was computed; empty for the whole.
        """
        if sizes:
            self._returned += reversed(cut(batch.rows, batch.work, sizes))
        elif batch.num_samples <= self.samples:
            yield batch
        else:
            # Claimed before the ceiling was known.
            self._returned.append((batch.rows, batch.work))
        computed = []
        while self._returned:
            if self._failed:
                free_cached(self._device)
                self._failed = False
            rows, work = self._returned.pop()
            parts = even_sizes(len(rows), most=int(min(self.samples, len(rows))))
            if len(parts) > 1:
                self._returned += reversed(cut(rows, work, parts))
                continue
            with source.times.waiting(stats):
                part = source.load(rows, work)
            part._place = batch._place
            yield part
            if not self._failed:
                computed.append(len(rows))
        return computed
