"""The data set that comes with the package: words of Debian package descriptions -> the packages needed.

``debian-depends.npz.xz`` is a NumPy .npz without pickled objects, compressed by xz. For each split it holds
``{split}_x_lengths`` (uint16, one a row), ``{split}_x_gaps`` (uint16: word ids of each row, ascending, as
differences, the first one from 0), and the same with ``y`` for label ids; ``label_names`` and
``feature_names`` are UTF-8 bytes, one name a line. Word ids are sorted by falling frequency, which keeps the
gaps small; label ids alphabetically, so that ties to the lowest id favour no frequent label.

Only which words occur is stored. Values are computed here: tf-idf with binary term frequency and
scikit-learn's smooth idf of the training rows, each row scaled to Euclidean length 1.
"""

from __future__ import annotations

import io
import lzma
import math
import tokenize
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_adaptive.xmc.data.chunk import CsrChunk, SplitShape

EMBEDDED_NAME = "debian-depends"
EMBEDDED_PATH = Path(__file__).with_name("debian-depends.npz.xz")

_IDF_UNIT = 4096
"""idf is rounded to 1/4096: sums of squares are then exact, and all machines agree on all bits."""


class IdRows(NamedTuple):
    """Ascending ids of each row, concatenated.

    Attributes:
        lengths: ids of each row, integer, shape (rows,).
        ids: integer, shape (lengths.sum(),).
    """

    lengths: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]


class EmbeddedData(NamedTuple):
    """The stored content, before values are computed.

    Attributes:
        words: split ("train", "test") -> word ids.
        labels: split -> label ids.
        feature_names: the words, in the order of their ids.
        label_names: the packages, in the order of their ids.
    """

    words: dict[str, IdRows]
    labels: dict[str, IdRows]
    feature_names: list[str]
    label_names: list[str]


def pack(data: EmbeddedData) -> bytes:
    """Return the content of the file for ``data``; equal data give equal bytes with the same xz library.

    Raises:
        ValueError: a row has more than 65535 ids, or an id is larger.
    """
    arrays: dict[str, npt.NDArray[np.uint16] | npt.NDArray[np.uint8]] = {}
    for letter, splits in (("x", data.words), ("y", data.labels)):
        for split, rows in splits.items():
            arrays[f"{split}_{letter}_lengths"] = _to_uint16(rows.lengths)
            arrays[f"{split}_{letter}_gaps"] = _to_uint16(_gaps(rows))
    for key, names in (("label_names", data.label_names), ("feature_names", data.feature_names)):
        arrays[key] = np.frombuffer("\n".join(names).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpack(content: bytes) -> EmbeddedData:
    """Return what `pack` was given.

    Raises:
        RuntimeError: the content is damaged.
    """
    try:
        with np.load(io.BytesIO(lzma.decompress(content)), allow_pickle=False) as arrays:
            words, labels = (
                {
                    split: _from_gaps(arrays[f"{split}_{letter}_lengths"], arrays[f"{split}_{letter}_gaps"])
                    for split in ("train", "test")
                }
                for letter in ("x", "y")
            )
            label_names = arrays["label_names"].tobytes().decode().split("\n")
            feature_names = arrays["feature_names"].tobytes().decode().split("\n")
    except (
        lzma.LZMAError, EOFError, KeyError, ValueError, OSError, AttributeError, zipfile.BadZipFile, tokenize.TokenError,
    ) as error:  # fmt: skip
        raise RuntimeError(
            f"{EMBEDDED_PATH} is damaged ({error}); install the package again, or make the file anew by "
            "scripts/make_embedded_data.py"
        ) from error
    return EmbeddedData(words, labels, feature_names, label_names)


def shape_of(data: EmbeddedData, split: str) -> SplitShape:
    """Return the sizes of a split."""
    return SplitShape(len(data.words[split].lengths), len(data.feature_names), len(data.label_names))


def to_chunk(data: EmbeddedData, split: str) -> CsrChunk:
    """Compute the values of a split and return all its rows.

    Values have the same bits on every machine (see _IDF_UNIT).
    """
    idf = _inverse_document_frequencies(data)
    rows = data.words[split]
    weights = idf[rows.ids]
    row_of = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
    # Integers below 2**53 in float64: exact whatever the order of summation.
    squares = np.bincount(row_of, weights=(weights * weights).astype(np.float64), minlength=len(rows.lengths))
    values = weights / np.sqrt(squares)[row_of]
    labels = data.labels[split]
    return CsrChunk(
        rows.lengths,
        rows.ids.astype(np.int32),
        values.astype(np.float32),
        labels.lengths,
        labels.ids.astype(np.int32),
    )


def _inverse_document_frequencies(data: EmbeddedData) -> npt.NDArray[np.int64]:
    """Return ln((1 + n) / (1 + df)) + 1 over the training rows in units of 1/4096, shape (num_features,)."""
    train = data.words["train"]
    frequencies = np.bincount(train.ids, minlength=len(data.feature_names))
    num_rows = len(train.lengths)
    return np.array(
        [round(_IDF_UNIT * (math.log((1 + num_rows) / (1 + df)) + 1)) for df in frequencies.tolist()],
        dtype=np.int64,
    )


def _gaps(rows: IdRows) -> npt.NDArray[np.int64]:
    starts = (np.cumsum(rows.lengths) - rows.lengths)[rows.lengths > 0]
    gaps = np.diff(rows.ids, prepend=0)
    gaps[starts] = rows.ids[starts]
    return gaps


def _from_gaps(lengths: npt.NDArray[np.uint16], gaps: npt.NDArray[np.uint16]) -> IdRows:
    row_lengths = lengths.astype(np.int64)
    totals = np.cumsum(gaps.astype(np.int64))
    starts = np.cumsum(row_lengths) - row_lengths
    before = np.concatenate([[0], totals])[starts]
    return IdRows(row_lengths, totals - np.repeat(before, row_lengths))


def _to_uint16(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    if values.size and not 0 <= values.min() <= values.max() <= np.iinfo(np.uint16).max:
        raise ValueError(f"ids and lengths must lie in [0, 65535], got {values.min()}..{values.max()}")
    return values.astype("<u2")
