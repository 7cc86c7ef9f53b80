"""One split of a data set over memory-mapped arrays.

Shapes: n = samples of the split, k = rows of a batch, nnz = non-zeros of that batch.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hvd_adaptive.xmc.rows import SparseRows

IntArray = npt.NDArray[np.int64]


class SparseDataset:
    """One split of a data set: two CSR matrices, features ``x`` and labels ``y``. Read-only.

    The arrays are usually memory maps that all ranks of a node share; nothing is read before it is asked for.

    Attributes:
        name: the data set's name, for people.
        split: "train" or "test".
        num_samples: n.
        num_features: columns of x.
        num_labels: columns of y.
        fingerprint: sha256 (hex) of sizes and arrays: equal on two nodes exactly if the data are equal.
        x_indptr: int64, shape (n + 1,).
        x_indices: int32, shape (x_indptr[-1],), strictly ascending within a row.
        x_values: float32, shape (x_indptr[-1],), finite.
        y_indptr: int64, shape (n + 1,).
        y_indices: int32, shape (y_indptr[-1],), strictly ascending within a row.
    """

    def __init__(
        self,
        *,
        name: str,
        split: str,
        num_features: int,
        num_labels: int,
        fingerprint: str,
        x_indptr: IntArray,
        x_indices: npt.NDArray[np.int32],
        x_values: npt.NDArray[np.float32],
        y_indptr: IntArray,
        y_indices: npt.NDArray[np.int32],
        label_names_path: Path | None = None,
        feature_names_path: Path | None = None,
    ) -> None:
        """Wrap arrays as described above; `open_splits` is the usual way to get one.

        Args:
            label_names_path: a UTF-8 file with one name a line, num_labels lines; read on first use.
            feature_names_path: likewise for features.
        """
        self.name = name
        self.split = split
        self.num_samples = len(x_indptr) - 1
        self.num_features = num_features
        self.num_labels = num_labels
        self.fingerprint = fingerprint
        # Plain views: indexing an np.memmap costs several microseconds more a call.
        self.x_indptr: IntArray = np.asarray(x_indptr)
        self.x_indices: npt.NDArray[np.int32] = np.asarray(x_indices)
        self.x_values: npt.NDArray[np.float32] = np.asarray(x_values)
        self.y_indptr: IntArray = np.asarray(y_indptr)
        self.y_indices: npt.NDArray[np.int32] = np.asarray(y_indices)
        self._label_names_path = label_names_path
        self._feature_names_path = feature_names_path

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def get_batch(self, rows: npt.ArrayLike) -> tuple[SparseRows, SparseRows]:
        """Gather rows into new tensors on the CPU.

        Args:
            rows: integers in [0, num_samples), shape (k,), in any order, repeats and k = 0 allowed.

        Returns:
            Features (with values) and labels (without), row i of each being sample rows[i].

        Raises:
            ValueError: rows is not one-dimensional, not of an integer type, or out of range.
        """
        wanted = np.asarray(rows)
        if wanted.size == 0 and wanted.ndim == 1:
            wanted = wanted.astype(np.int64)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise ValueError(
                "rows must be a one-dimensional array of integers, "
                f"got shape {wanted.shape} of {wanted.dtype}"
            )
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.num_samples):
            raise ValueError(
                f"rows must lie in [0, {self.num_samples}) for {self.name}/{self.split}, "
                f"got {wanted.min()}..{wanted.max()}"
            )
        x_offsets, x_positions = _positions(self.x_indptr, wanted)
        y_offsets, y_positions = _positions(self.y_indptr, wanted)
        features = SparseRows(
            torch.from_numpy(self.x_indices[x_positions].astype(np.int64)),
            torch.from_numpy(x_offsets),
            torch.from_numpy(self.x_values[x_positions]),
        )
        labels = SparseRows(
            torch.from_numpy(self.y_indices[y_positions].astype(np.int64)), torch.from_numpy(y_offsets), None
        )
        return features, labels

    def num_nonzeros(self) -> IntArray:
        """Return the number of features of each sample, int64, shape (n,): the work that a row is."""
        return np.diff(self.x_indptr)

    def label_counts(self) -> IntArray:
        """Return how many samples carry each label, int64, shape (num_labels,); reads all labels."""
        return np.bincount(self.y_indices, minlength=self.num_labels).astype(np.int64, copy=False)

    @cached_property
    def label_names(self) -> list[str] | None:
        """Names of the labels, num_labels of them, or None where the source has none."""
        return read_names(self._label_names_path) if self._label_names_path else None

    @cached_property
    def feature_names(self) -> list[str] | None:
        """Names of the features, num_features of them, or None where the source has none."""
        return read_names(self._feature_names_path) if self._feature_names_path else None


def read_names(path: Path) -> list[str]:
    """Read one name a line.

    Raises:
        ValueError: the file is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        # Only "\n" ends a name: splitlines() would also cut at U+2028 and the like.
        names = path.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: names must be UTF-8 text, one a line: {error}") from None
    return names[:-1] if names[-1] == "" else names


def _positions(indptr: IntArray, rows: npt.NDArray[np.integer]) -> tuple[IntArray, IntArray]:
    """Return offsets (k + 1,) of the gathered rows and the positions (nnz,) of their entries."""
    starts = indptr[rows]
    lengths = indptr[rows + 1] - starts
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    positions = np.repeat(starts - offsets[:-1], lengths)
    positions += np.arange(offsets[-1])
    return offsets, positions
