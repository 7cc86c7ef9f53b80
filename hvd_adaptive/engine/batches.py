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

from hvd_adaptive.engine.device_clock import Moment
from hvd_adaptive.engine.device_copies import CopyStream, to_device
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.records import RoundStats

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


class BatchSource:
    """Makes batches from rows of a map-style data set.

    Args:
        dataset: has ``__len__`` and one of: ``get_batch(rows) -> (x, y)``, torch's ``__getitems__(list)``, ``__getitem__(row)``.
        device: where x and y go.
        collate: makes a batch from a list of samples; torch's ``default_collate`` by default. Not used with ``get_batch``.
            What it returns is (x, y) if it is a tuple of two, and otherwise x alone. ``default_collate`` makes lists of tuples;
            there the samples decide, which are (x, y) if they are tuples of two.
        times: of the steps that compute the batches; by default those of a device that is this process.

    Attributes:
        times: as given.

    Raises:
        TypeError: for a data set that has no length or cannot be indexed, such as an IterableDataset.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        collate: Callable[[list[Any]], Any] | None = None,
        times: DeviceTimes | None = None,
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
        self._stream = CopyStream(device)
        self._collate = collate or default_collate
        self.times = times or DeviceTimes()

    def __len__(self) -> int:
        return len(self._dataset)

    def load(self, rows: Rows, work: int) -> Batch:
        """Returns the batch of these rows, for the present stream."""
        dataset = self._dataset
        data = dataset.get_batch(rows) if hasattr(dataset, "get_batch") else self._collated(rows.tolist())
        x, y = data if _is_pair(data) else (data, None)
        return Batch(x=to_device(x, self._device), y=to_device(y, self._device), rows=rows, work=work)

    def prefetched(self, fetch: Callable[[int], Batch | None], stats: RoundStats) -> Iterator[Batch]:
        """Yields ``fetch(pending_work)`` until it returns None, calling it in a thread while the device computes.

        A batch is fetched when the step but one before it is over on the device. On a GPU, ``fetch`` runs on a stream of its own.

        Args:
            fetch: gets the work that this rank holds and has not computed yet.
            stats: gets the seconds spent waiting for batches.
        """
        times = self.times

        def fetch_after(step: Moment | None, pending_work: int) -> Batch | None:
            times.wait(step)
            with self._stream.copying():
                return fetch(pending_work)

        self._stream.begin()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hvd_adaptive-fetch") as executor:
            future = executor.submit(fetch_after, None, 0)
            while True:
                with times.waiting(stats):
                    batch = future.result()
                if batch is None:
                    return
                self._stream.hand_over(batch.x, batch.y)
                future = executor.submit(fetch_after, times.last_step, batch.work)
                yield batch

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
