"""From sample rows to a batch on the device, fetched while the one before computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

Rows = NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """What a rank trains on next.

    Attributes:
        x: the samples' inputs, on the session's device.
        y: the samples' targets; None for a data set whose samples are not pairs.
        rows: the samples' positions in the data set, int64, shape (num_samples,).
        work: cost of the samples, in the unit that the cursor counts.
        loss: set it to this batch's mean loss, a 0-dim tensor or a number, to have it in the round's record.
        number: of this rank's batches, from 1; 0 for one that no session gave.
    """

    x: Any
    y: Any
    rows: Rows
    work: int
    loss: Any = None
    number: int = 0

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return len(self.rows)


def to_device(value: Any, device: torch.device) -> Any:
    """Moves tensors, whatever has ``to``, and lists, tuples and dicts of them."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(v, device) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    return value


class BatchSource:
    """Makes batches from rows of a map-style data set.

    Args:
        dataset: has ``__len__`` and one of: ``get_batch(rows) -> (x, y)``, torch's ``__getitems__(list)``, ``__getitem__(row)``.
        device: where x and y go.
        collate: makes a batch from a list of samples; torch's ``default_collate`` by default. Not used with ``get_batch``.
            What it returns is (x, y) if it is a tuple of two, and otherwise x alone. ``default_collate`` makes lists of tuples;
            there the samples decide, which are (x, y) if they are tuples of two.

    Raises:
        TypeError: for a data set that has no length or cannot be indexed, such as an IterableDataset.
    """

    def __init__(
        self, dataset: Any, device: torch.device, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        indexable = any(hasattr(dataset, name) for name in ("get_batch", "__getitems__", "__getitem__"))
        if not hasattr(dataset, "__len__") or not indexable:
            raise TypeError(
                f"dataset must have __len__ and __getitem__ (a map-style data set), got {type(dataset).__name__}: "
                "dispatch hands out rows by number, so a stream cannot be shared that way"
            )
        if len(dataset) == 0:
            raise ValueError("dataset must have at least one sample, got none")
        self._dataset = dataset
        self._device = device
        self._collate = collate or default_collate

    def __len__(self) -> int:
        return len(self._dataset)

    def load(self, rows: Rows, work: int) -> Batch:
        """Returns the batch of these rows."""
        dataset = self._dataset
        data = dataset.get_batch(rows) if hasattr(dataset, "get_batch") else self._collated(rows.tolist())
        x, y = data if _is_pair(data) else (data, None)
        return Batch(x=to_device(x, self._device), y=to_device(y, self._device), rows=rows, work=work)

    def _collated(self, indices: list[int]) -> Any:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        samples = fetch_many(indices) if fetch_many else [self._dataset[i] for i in indices]
        data = self._collate(samples)
        if not (isinstance(data, list) and len(data) == 2 and _is_pair(samples[0])):
            return data
        if self._collate is default_collate:
            return tuple(data)
        if len(samples) != 2:
            raise TypeError(
                f"collate must return a tuple (x, y) for samples that are (x, y), got a list of 2 for {len(samples)} samples: a "
                "list may as well be of samples. Return tuple(...), or a list in a tuple, ([a, b], None), if all of it is input"
            )
        return data


def _is_pair(value: Any) -> bool:
    # A list or a string of length two may be two samples.
    return isinstance(value, tuple) and len(value) == 2


def prefetched(fetch: Callable[[int], Batch | None], on_wait: Callable[[], Any]) -> Iterator[Batch]:
    """Yields ``fetch(pending_work)`` until it returns None, calling it in a thread while the caller computes.

    Args:
        fetch: gets the work that this rank holds and has not computed yet.
        on_wait: returns a context manager for the time that the caller waits for a batch.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hvd_adaptive-fetch") as executor:
        future = executor.submit(fetch, 0)
        while True:
            with on_wait():
                batch = future.result()
            if batch is None:
                return
            future = executor.submit(fetch, batch.work)
            yield batch
