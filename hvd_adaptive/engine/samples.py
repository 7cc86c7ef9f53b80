"""Reads the samples of a batch from a data set, and makes a batch of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import default_collate

# Samples of a batch that cannot be made.
_MOST_NAMED = 64


class SampleReader:
    """A data set whose samples are read and collated at once, as torch's loader reads those that have ``__getitems__``.

    Args:
        dataset: see :class:`~hvd_adaptive.engine.batches.BatchSource`.
        collate: makes a batch from a list of samples.

    Attributes:
        dataset: as given.
        rank: this rank, for errors.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self._collate = collate
        self.rank = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> Any:
        """Returns the batch of these samples. What the data set or ``collate`` raises, is raised again with their numbers, as the
        same type if that takes a text, as torch's loader does it; else as a RuntimeError."""
        dataset, failed = self.dataset, rows
        fetch_many = getattr(dataset, "__getitems__", None)
        try:
            if hasattr(dataset, "get_batch"):
                return dataset.get_batch(np.array(rows, dtype=np.int64))
            if fetch_many:
                samples = fetch_many(rows)
            else:
                samples = []
                for row in rows:
                    failed = [row]
                    samples.append(dataset[row])
                failed = rows
            return self._collate(samples)
        except Exception as error:
            numbers = ", ".join(map(str, failed[:_MOST_NAMED])) + ", ..." * (len(failed) > _MOST_NAMED)
            text = f"rank {self.rank}: sample{'s' * (len(failed) > 1)} {numbers} of the data set: {error}"
            raise _same_type(error, text) from error


def _same_type(error: Exception, text: str) -> Exception:
    try:
        again = type(error)(text)
    except Exception:
        again = None
    # Some make a text of their own.
    return again if again is not None and again.args == (text,) else RuntimeError(f"{text} ({type(error).__name__})")


class Collate:
    """Makes a batch from a list of samples: a tuple (x, y), or anything else for x alone.

    Args:
        collate: see :class:`~hvd_adaptive.engine.batches.BatchSource`.

    Attributes:
        is_default: it is torch's ``default_collate``.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or default_collate
        self.is_default = self._collate is default_collate

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch."""
        data = self._collate(samples)
        if not (isinstance(data, list) and len(data) == 2 and is_pair(samples[0])):
            return data
        if self.is_default:
            return tuple(data)
        if len(samples) != 2:
            raise TypeError(
                f"collate must return a tuple (x, y) for samples that are (x, y), got a list of 2 for {len(samples)} samples: a "
                "list may as well be of samples. Return tuple(...), or a list in a tuple, ([a, b], None), if all of it is input"
            )
        return data


def is_pair(value: Any) -> bool:
    """Returns whether a batch is (x, y)."""
    # A list or a string of length two may be two samples.
    return isinstance(value, tuple) and len(value) == 2
