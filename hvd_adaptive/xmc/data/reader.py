"""Reader for the XMC repository's text format, plain or gzip, in chunks of lines.

Line 1 is ``num_samples num_features num_labels``; every further line is one sample,
``l1,l2,... f1:v1 f2:v2 ...`` with ids from 0. Labels may be missing (the line then starts with a feature,
usually after a space), features may be missing, and an empty line has neither.

scikit-learn's svmlight reader does the parsing. It drops empty lines, takes nan, inf, any label, comments
and qid columns, and knows no line numbers; so each chunk is checked as a whole, and a chunk that fails a
check is parsed again line by line by `_parse_line`, which defines what is legal and names what is not.

Decisions where the format says nothing: a feature id twice in a row is an error (sum or last would be a
guess); a label twice is one label; ids may come in any order, which makes reading slower; stored zeros stay.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvd_adaptive.xmc.data.chunk import MAX_ID, CsrChunk, SplitShape
from hvd_adaptive.xmc.data.lines import Block, read_blocks, read_first_line

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 << 20
_LEGAL_BYTES = b"0123456789,:.+-eE \t\r\n"
_LABEL_AFTER_SPACE = re.compile(rb"\n[ \t]+[^\s:]+\s")
_ODD_LABEL = re.compile(rb"\n[0-9,]*[.eE+-][^\s:]*\s")
_UNSIGNED = re.compile(rb"[0-9]+")
_VALUE = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read_shape(path: Path) -> SplitShape:
    """Read the header of an XMC file.

    Raises:
        ValueError: the file is empty, or line 1 is not three whole numbers of legal size.
        OSError: the file cannot be read.
    """
    line = read_first_line(path)
    if not line:
        raise ValueError(
            f"{path}:1: the file is empty; an XMC file starts with num_samples num_features num_labels"
        )
    fields = line.split()
    if len(fields) != 3 or not all(_UNSIGNED.fullmatch(field) for field in fields):
        if any(byte < 9 or 13 < byte < 32 for byte in line):
            raise ValueError(
                f"{path}:1: this is not text: an XMC file is text or gzip, and starts with num_samples num_features num_labels"
            )
        raise ValueError(
            f"{path}:1: the header must be three whole numbers, num_samples num_features num_labels, "
            f"got {_show(line)}; for a file without it, add that line"
        )
    shape = SplitShape(*map(int, fields))
    for field, value, limit in zip(shape._fields, shape, (1 << 62, MAX_ID, MAX_ID), strict=True):
        if not 1 <= value <= limit:
            wanted = "at least 1" if value < 1 else f"at most {limit}"
            raise ValueError(f"{path}:1: {field} in the header must be {wanted}, got {value}")
    return shape


def read_chunks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[CsrChunk]:
    """Read the samples of an XMC file, exactly as many as its header announces.

    Args:
        path: the file; gzip is recognized by its content, not its name.
        block_bytes: bytes of text to parse at once; peak memory is about 30 times that.

    Yields:
        The rows in the order of the file, validated.

    Raises:
        ValueError: the content is not legal; the message starts with ``path:line:``.
        OSError: the file cannot be read.
    """
    shape = read_shape(path)
    num_rows = 0
    last_line = 1
    is_slow = False
    for block in read_blocks(path, block_bytes):
        last_line = block.first_line + block.num_lines - 1
        surplus = num_rows + block.num_lines - shape.num_samples
        if surplus > 0:
            block = _without_surplus(path, block, surplus, shape)
        if not block.num_lines:
            continue
        num_rows += block.num_lines
        chunk = None
        if not _is_suspicious(block.text):
            chunk = _parse_fast(block, shape) or _parse_fast(_with_sorted_features(block), shape)
        if chunk is None:
            chunk = _parse_line_by_line(path, block, shape)
            if not is_slow:
                logger.warning(
                    "%s: unusual spellings of ids (such as +4) make reading about 9 times slower",
                    path,
                )
            is_slow = True
        yield chunk
    if num_rows < shape.num_samples:
        raise ValueError(
            f"{path}:{last_line}: the file ends after {num_rows} samples but line 1 announces num_samples = "
            f"{shape.num_samples}; fetch the file again if it was cut, else correct line 1"
        )


def _without_surplus(path: Path, block: Block, surplus: int, shape: SplitShape) -> Block:
    """Drop blank lines behind the last sample; anything else there is an error."""
    lines = block.lines()
    num_kept = max(0, block.num_lines - surplus)
    for number, line in enumerate(lines[num_kept:], start=block.first_line + num_kept):
        if line.strip():
            raise ValueError(
                f"{path}:{number}: one line more than the num_samples = {shape.num_samples} of line 1; "
                "correct line 1 (an empty line counts as a sample without labels and features)"
            )
    return Block(b"".join(line + b"\n" for line in lines[:num_kept]), block.first_line, num_kept)


def _is_suspicious(text: bytes) -> bool:
    """Tell whether text holds what scikit-learn would take or drop without a word."""
    if text.translate(None, _LEGAL_BYTES):
        return True
    if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
        return True
    # A line that starts with a space has no labels; scikit-learn would take "  7 1:2" as label 7.
    # And "1.0" or "1e1" as a label.
    framed = b"\n" + text + b"\n"
    return _LABEL_AFTER_SPACE.search(framed) is not None or _ODD_LABEL.search(framed) is not None


def _parse_fast(block: Block, shape: SplitShape) -> CsrChunk | None:
    """Parse by scikit-learn; None means that the block must be read line by line."""
    # Imported late: it takes a second, and only the one rank that builds the cache needs it.
    from sklearn.datasets import load_svmlight_file

    if not block.text.strip():
        return _blank_rows(block.num_lines)
    try:
        x, labels = load_svmlight_file(
            io.BytesIO(block.text),
            n_features=shape.num_features,
            dtype=np.float32,
            multilabel=True,
            zero_based=True,
        )
    except (ValueError, OverflowError):
        return None
    y_lengths = np.fromiter(map(len, labels), np.int64, len(labels))
    y_floats = np.fromiter(chain.from_iterable(labels), np.float64, int(y_lengths.sum()))
    if not np.isfinite(x.data).all():
        return None
    if not ((y_floats >= 0) & (y_floats < shape.num_labels) & (y_floats == np.floor(y_floats))).all():
        return None
    y_indices = y_floats.astype(np.int32)
    x_lengths = np.diff(x.indptr).astype(np.int64)
    y_rows = np.repeat(np.arange(len(labels)), y_lengths)
    is_repeat = np.zeros(len(y_indices), dtype=np.bool_)
    is_repeat[1:] = (y_indices[1:] == y_indices[:-1]) & (y_rows[1:] == y_rows[:-1])
    if is_repeat.any():
        y_indices = y_indices[~is_repeat]
        y_lengths = np.bincount(y_rows[~is_repeat], minlength=len(labels)).astype(np.int64)
    if len(labels) < block.num_lines:
        lines = block.lines()
        present = np.flatnonzero(np.fromiter(map(bool, map(bytes.strip, lines)), np.bool_, len(lines)))
        x_lengths = _spread(x_lengths, present, block.num_lines)
        y_lengths = _spread(y_lengths, present, block.num_lines)
    return CsrChunk(x_lengths, x.indices.astype(np.int32), x.data, y_lengths, y_indices)


def _with_sorted_features(block: Block) -> Block:
    """Sort the features of each line, as scikit-learn refuses other orders; a faulty block stays as it is."""
    lines = []
    for line in block.lines():
        tokens = line.split()
        num_labels = 1 if tokens and b":" not in tokens[0] else 0
        try:
            features = sorted(tokens[num_labels:], key=_feature_id)
        except ValueError:
            return block
        lines.append(b" ".join(tokens[:num_labels] + features))
    return block._replace(text=b"\n".join(lines) + b"\n")


def _feature_id(token: bytes) -> int:
    return int(token[: token.index(b":")])


def _parse_line_by_line(path: Path, block: Block, shape: SplitShape) -> CsrChunk:
    rows: list[tuple[list[int], list[int], list[float]]] = []
    lines = block.lines()
    for number, line in enumerate(lines, start=block.first_line):
        try:
            labels, features = _parse_line(line.removesuffix(b"\r"), shape)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        rows.append((labels, list(features), list(features.values())))
    return CsrChunk(
        np.array([len(row[1]) for row in rows], dtype=np.int64),
        np.array([index for row in rows for index in row[1]], dtype=np.int32),
        np.array([value for row in rows for value in row[2]], dtype=np.float32),
        np.array([len(row[0]) for row in rows], dtype=np.int64),
        np.array([label for row in rows for label in row[0]], dtype=np.int32),
    )


def _parse_line(line: bytes, shape: SplitShape) -> tuple[list[int], dict[int, float]]:
    """Parse one sample: ascending labels, and feature id -> value in ascending order of id.

    Raises:
        ValueError: the line is not legal; says why.
    """
    if b"\r" in line:
        raise ValueError("a carriage return inside a line; end lines by LF or CR LF")
    tokens = line.split()
    labels: set[int] = set()
    if tokens and b":" not in tokens[0]:
        if line[:1].isspace():
            raise ValueError(
                f"a line that starts with a space has no labels, but {_show(tokens[0])} is no feature; "
                "remove the space, or write the feature as id:value"
            )
        labels = {_parse_id(field, "label", shape.num_labels) for field in tokens.pop(0).split(b",")}
    features: dict[int, float] = {}
    for token in tokens:
        index_text, colon, value_text = token.partition(b":")
        if not colon:
            raise ValueError(
                f"expected a feature as id:value, got {_show(token)}; "
                "labels are joined by commas without spaces"
            )
        index = _parse_id(index_text, "feature", shape.num_features)
        if index in features:
            raise ValueError(f"feature {index} occurs twice; add up or remove the duplicates")
        features[index] = _parse_value(value_text, index)
    return sorted(labels), dict(sorted(features.items()))


def _parse_id(text: bytes, kind: str, limit: int) -> int:
    digits = text[1:] if text[:1] in (b"+", b"-") else text
    if not _UNSIGNED.fullmatch(digits):
        raise ValueError(f"a {kind} id must be a whole number, got {_show(text)}")
    # Twenty digits hold any int64; int() of a million digits would take its time.
    significant = digits.lstrip(b"0") or b"0"
    is_negative = text[:1] == b"-" and significant != b"0"
    if is_negative or len(significant) > 20 or int(significant) >= limit:
        raise ValueError(
            f"{kind} id {_show(text)} is out of range: line 1 allows 0 to {limit - 1} (ids count from 0); "
            "correct the id or line 1"
        )
    return int(significant)


def _parse_value(text: bytes, index: int) -> float:
    if text.lower().lstrip(b"+-") in (b"nan", b"inf", b"infinity"):
        raise ValueError(
            f"feature {index} has the non-finite value {_show(text)}; replace it or remove the sample"
        )
    if not _VALUE.fullmatch(text):
        raise ValueError(f"feature {index} must have a decimal number as value, got {_show(text)}")
    with np.errstate(over="ignore"):
        value = float(np.float32(float(text)))
    if not math.isfinite(value):
        raise ValueError(f"feature {index} has the value {_show(text)}, which float32 cannot hold; scale it")
    return value


def _blank_rows(num_rows: int) -> CsrChunk:
    zeros = np.zeros(num_rows, dtype=np.int64)
    return CsrChunk(zeros, np.empty(0, np.int32), np.empty(0, np.float32), zeros, np.empty(0, np.int32))


def _spread(
    lengths: npt.NDArray[np.int64], present: npt.NDArray[np.int64], num_rows: int
) -> npt.NDArray[np.int64]:
    """Put the lengths of the rows ``present`` back among num_rows rows; the others are empty."""
    spread = np.zeros(num_rows, dtype=np.int64)
    spread[present] = lengths
    return spread


def _show(text: bytes) -> str:
    """Quote the start of some bytes for a message."""
    return repr(text[:60].decode("ascii", "backslashreplace")) + ("..." if len(text) > 60 else "")
