"""What a source of data hands to the cache: the sizes of a split, then its rows in chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_ID = np.iinfo(np.int32).max
"""The largest feature or label id that the int32 arrays of the cache can hold."""


class SplitShape(NamedTuple):
    """The sizes of one split.

    Attributes:
        num_samples: rows, >= 1.
        num_features: feature ids are 0..num_features - 1.
        num_labels: label ids are 0..num_labels - 1.
    """

    num_samples: int
    num_features: int
    num_labels: int


class CsrChunk(NamedTuple):
    """Consecutive rows of a split, features and labels as two CSR matrices without their index pointers.

    Attributes:
        x_lengths: features of each row, int64, shape (rows,).
        x_indices: feature ids, strictly ascending within a row, int32, shape (x_lengths.sum(),).
        x_values: finite feature values, float32, shape (x_lengths.sum(),).
        y_lengths: labels of each row, int64, shape (rows,).
        y_indices: label ids, strictly ascending within a row, int32, shape (y_lengths.sum(),).
    """

    x_lengths: npt.NDArray[np.int64]
    x_indices: npt.NDArray[np.int32]
    x_values: npt.NDArray[np.float32]
    y_lengths: npt.NDArray[np.int64]
    y_indices: npt.NDArray[np.int32]
