"""Whether all ranks hold the same data set: a checksum of what it holds, without reading a sample of it.

Reading samples would draw random numbers (augmentation) and cost time. What a data set keeps in memory tells as much: lists
of files or texts, tensors, ranges, the indices of a subset. A script that splits its data at random, without a seed, or by
rank, has other ones on every rank. Plain texts are left out, as folders often differ between ranks that hold the same files.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAX_DEPTH = 5
_NUM_PROBES = 64


def fingerprint(dataset: Any) -> int:
    """Returns a checksum below 2**32, equal for data sets that hold the same; never fails.

    Args:
        dataset: any object; its attributes are looked at, at evenly spread places where they are long.
    """
    try:
        return _object(dataset, 0, 0)
    except Exception:
        # A property or an element of a stranger's class may raise anything.
        return 0


def contents(dataset: Any) -> int:
    """Returns a checksum of the tensors and arrays of a data set alone, which a script may have written to; never fails.

    Counters and the like may differ by what a rank has read.
    """
    checksum = 0
    with suppress(Exception):
        for name, attribute in sorted(vars(dataset).items()):
            for value in attribute if isinstance(attribute, (list, tuple)) else [attribute]:
                if isinstance(value, (Tensor, np.ndarray)):
                    checksum = _value(value, checksum, 0)
            if name == "dataset":
                checksum = zlib.crc32(repr(contents(attribute)).encode(), checksum)
    return checksum


def _object(value: Any, checksum: int, depth: int) -> int:
    for name in sorted(getattr(value, "__dict__", {})):
        attribute = vars(value)[name]
        # Hugging Face's data sets name their content so.
        if not isinstance(attribute, str) or name == "_fingerprint":
            checksum = _value(attribute, checksum, depth + 1)
    return checksum


def _value(value: Any, checksum: int, depth: int) -> int:
    if depth > _MAX_DEPTH or callable(value):
        return checksum
    if isinstance(value, (bool, int, float, str, bytes, range, type(None))):
        return zlib.crc32(repr(value).encode(), checksum)
    if isinstance(value, (Tensor, np.ndarray)):
        is_dense = not isinstance(value, Tensor) or value.layout == torch.strided
        flat = value.reshape(-1) if is_dense else torch.empty(0)
        probes = flat[:: max(1, len(flat) // _NUM_PROBES)].tolist()
        return zlib.crc32(repr((tuple(value.shape), probes)).encode(), checksum)
    if hasattr(value, "iloc") and hasattr(value, "shape"):
        # A table of pandas, or one of its columns.
        rows = [np.asarray(value.iloc[index]).tolist() for index in _places(len(value))]
        return zlib.crc32(repr((value.shape, rows)).encode(), checksum)
    if isinstance(value, (list, tuple)):
        checksum = zlib.crc32(str(len(value)).encode(), checksum)
        for index in _places(len(value)):
            checksum = _value(value[index], checksum, depth + 1)
        return checksum
    if isinstance(value, Mapping):
        checksum = zlib.crc32(str(len(value)).encode(), checksum)
        for key in sorted(map(str, value))[:_NUM_PROBES]:
            checksum = zlib.crc32(key.encode(), checksum)
        return checksum
    if hasattr(value, "__getitem__") or hasattr(value, "__len__"):
        return _object(value, checksum, depth)
    return checksum


def _places(length: int) -> range:
    return range(0, length, max(1, length // _NUM_PROBES))
