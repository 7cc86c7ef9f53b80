"""Blocks of whole lines, with their line numbers, from a plain or gzip file of any size."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MAX_LINE_BYTES = 256 << 20
"""A longer line is refused: a binary file without line ends must not fill the memory."""

_MAX_FIRST_LINE_BYTES = 1024
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_FAULTS = (EOFError, gzip.BadGzipFile, zlib.error)


class Block(NamedTuple):
    """Complete lines of a file.

    Attributes:
        text: the lines with their ends; the last line of a file may lack its end.
        first_line: number of the first line; a file's first line is 1.
        num_lines: lines in text, >= 0.
    """

    text: bytes
    first_line: int
    num_lines: int

    def lines(self) -> list[bytes]:
        """Split into num_lines lines without their LF."""
        return self.text.split(b"\n")[: self.num_lines]


def read_first_line(path: Path) -> bytes:
    """Read line 1, at most 1024 bytes of it; empty for an empty file.

    Raises:
        ValueError: a damaged gzip file.
        OSError: the file cannot be read.
    """
    with _open(path) as stream, _gzip_errors(path, 1):
        return stream.readline(_MAX_FIRST_LINE_BYTES)


def read_blocks(path: Path, block_bytes: int) -> Iterator[Block]:
    """Read all lines but the first.

    Args:
        path: the file; gzip is recognized by its content, not its name.
        block_bytes: bytes of text to aim at; a block grows to hold at least one line.

    Yields:
        Blocks that follow each other without a gap.

    Raises:
        ValueError: a damaged gzip file or a line longer than MAX_LINE_BYTES, once everything before has been
            yielded; the message starts with ``path:line:``.
        OSError: the file cannot be read.
    """
    with _open(path) as stream:
        with _gzip_errors(path, 1):
            stream.readline(_MAX_FIRST_LINE_BYTES)
        next_line = 2
        carry = b""
        is_complete = False
        while not is_complete:
            pieces = [carry]
            size = 0
            fault: Exception | None = None
            while size < block_bytes and not is_complete:
                try:
                    # Not read(): its exception would lose what came before the damage.
                    piece = stream.read1(block_bytes)
                except _GZIP_FAULTS as error:
                    fault = error
                    break
                is_complete = not piece
                size += len(piece)
                pieces.append(piece)
            text = b"".join(pieces)
            cut = len(text) if is_complete else text.rfind(b"\n") + 1
            carry = text[cut:]
            if len(carry) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}:{next_line}: no line end within {MAX_LINE_BYTES} bytes; is this a text file?"
                )
            if cut:
                num_lines = text.count(b"\n") + (is_complete and not text.endswith(b"\n"))
                yield Block(text[:cut], next_line, num_lines)
                next_line += num_lines
            if fault is not None:
                with _gzip_errors(path, next_line):
                    raise fault


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    with path.open("rb") as stream:
        is_gzip = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(path, "rb") if is_gzip else path.open("rb")


@contextmanager
def _gzip_errors(path: Path, line: int) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise ValueError(
            f"{path}:{line}: the gzip file is cut off within this line; fetch it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{line}: the gzip file is damaged here ({error}); fetch it again") from None
