"""What lies in a cache's directory, and how it gets there from a source.

meta.json                  format version, sizes, fingerprints; written last
{train,test}.{array}.npy   the arrays of SparseDataset
{label,feature}_names.txt  one name a line, where the source has names
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adaptive.xmc.data import embedded, reader
from hvd_adaptive.xmc.data.array_file import ArrayWriter, write_text
from hvd_adaptive.xmc.data.chunk import CsrChunk, SplitShape
from hvd_adaptive.xmc.data.source import DataSource
from hvd_adaptive.xmc.data.sparse import read_names

FORMAT_VERSION = 1
SPLITS = ("train", "test")
ARRAY_DTYPES = {
    "x_indptr": "<i8",
    "x_indices": "<i4",
    "x_values": "<f4",
    "y_indptr": "<i8",
    "y_indices": "<i4",
}


def write_content(source: DataSource, directory: Path) -> None:
    """Read and check a source and write everything of its cache into an empty directory.

    Raises:
        ValueError: the source's content is not legal, or its parts do not fit each other.
        RuntimeError: the embedded file is damaged.
        OSError: a file cannot be read or written.
    """
    splits: dict[str, Any] = {}
    names: dict[str, list[str] | None]
    if source.train is None or source.test is None:
        data = embedded.unpack(embedded.EMBEDDED_PATH.read_bytes())
        for split in SPLITS:
            shape = embedded.shape_of(data, split)
            splits[split] = _write_split(directory, split, shape, [embedded.to_chunk(data, split)])
        names = {"label_names": data.label_names, "feature_names": data.feature_names}
    else:
        paths = {"train": source.train, "test": source.test}
        shapes = {split: reader.read_shape(path) for split, path in paths.items()}
        _require_equal_columns(paths, shapes)
        names = {
            "label_names": _checked_names(source.label_names, "num_labels", shapes["train"].num_labels),
            "feature_names": _checked_names(
                source.feature_names, "num_features", shapes["train"].num_features
            ),
        }
        for split, path in paths.items():
            splits[split] = _write_split(directory, split, shapes[split], reader.read_chunks(path))
            # A test file without labels will do for predictions.
            if split == "train" and not splits[split]["lengths"]["y_indices"]:
                raise ValueError(
                    f"{path}: no sample has a label, so there is nothing to learn; labels come first in a line, before a space"
                )
    for key, values in names.items():
        if values is not None:
            write_text(directory / f"{key}.txt", "".join(f"{value}\n" for value in values))
    meta = {
        "format_version": FORMAT_VERSION,
        "name": source.name,
        "source_files": [str(path) for path in source.files],
        "splits": splits,
        "has_label_names": names["label_names"] is not None,
        "has_feature_names": names["feature_names"] is not None,
        "files": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
    }
    write_text(directory / "meta.json", json.dumps(meta, indent=1) + "\n")


def _write_split(
    directory: Path, split: str, shape: SplitShape, chunks: Iterable[CsrChunk]
) -> dict[str, Any]:
    """Write a split's arrays and return its part of meta.json."""
    with ExitStack() as stack:
        writers = {
            array: stack.enter_context(ArrayWriter(directory / f"{split}.{array}.npy", dtype))
            for array, dtype in ARRAY_DTYPES.items()
        }
        for letter in "xy":
            writers[f"{letter}_indptr"].append(np.zeros(1, dtype=np.int64))
        for chunk in chunks:
            for letter, lengths in (("x", chunk.x_lengths), ("y", chunk.y_lengths)):
                indices = writers[f"{letter}_indices"]
                writers[f"{letter}_indptr"].append(np.cumsum(lengths) + indices.length)
            writers["x_indices"].append(chunk.x_indices)
            writers["x_values"].append(chunk.x_values)
            writers["y_indices"].append(chunk.y_indices)
    checksums = {array: writer.sha256 for array, writer in writers.items()}
    content = json.dumps([shape, sorted(checksums.items())])
    return {
        **shape._asdict(),
        "fingerprint": hashlib.sha256(content.encode()).hexdigest(),
        "lengths": {array: writer.length for array, writer in writers.items()},
    }


def _require_equal_columns(paths: dict[str, Path], shapes: dict[str, SplitShape]) -> None:
    train, test = shapes["train"], shapes["test"]
    for field in ("num_features", "num_labels"):
        if getattr(train, field) != getattr(test, field):
            raise ValueError(
                f"{paths['test']}:1: {field} must be that of the training file {paths['train']}, "
                f"{getattr(train, field)}, got {getattr(test, field)}; correct line 1 of one of them"
            )


def _checked_names(path: Path | None, field: str, expected: int) -> list[str] | None:
    if path is None:
        return None
    names = read_names(path)
    if len(names) != expected:
        raise ValueError(
            f"{path}:{len(names)}: {len(names)} names, but the data have {field} = {expected}; "
            "correct the file, or rename it to do without names"
        )
    return names
