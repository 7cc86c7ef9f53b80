"""One-dimensional .npy files written piece by piece, with a running checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adaptive.state.disk import sync_file

_PLACEHOLDER_LENGTH = 1 << 60


class ArrayWriter:
    """Write a .npy file whose length is known only at the end; leaving the context completes the file.

    Afterwards ``length`` (elements) and ``sha256`` (hex, of the elements) describe what is on the disk.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        """Create the file.

        Args:
            path: must not exist.
            dtype: a NumPy type string with byte order, such as "<i4".

        Raises:
            OSError: the file cannot be created.
        """
        self.length = 0
        self.sha256 = ""
        self._dtype = np.dtype(dtype)
        self._digest = hashlib.sha256()
        self._stream = path.open("xb")
        self._header_bytes = self._write_header(_PLACEHOLDER_LENGTH)

    def append(self, values: npt.NDArray[Any]) -> None:
        """Append values, shape (any,), converted to the file's dtype."""
        content = np.ascontiguousarray(values, dtype=self._dtype)
        self._digest.update(content.data)
        self._stream.write(content.data)
        self.length += len(content)

    def __enter__(self) -> ArrayWriter:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Complete the file and force it to the disk, unless an exception is under way."""
        with self._stream as stream:
            if error is not None:
                return
            stream.seek(0)
            # NumPy pads headers to a multiple of 64 bytes: the true length fits in the placeholder's room.
            if self._write_header(self.length) != self._header_bytes:
                raise RuntimeError("NumPy wrote .npy headers of two sizes for one-dimensional arrays")
            sync_file(stream)
        self.sha256 = self._digest.hexdigest()

    def _write_header(self, length: int) -> int:
        np.lib.format.write_array_header_1_0(
            self._stream, {"descr": self._dtype.str, "fortran_order": False, "shape": (length,)}
        )
        return self._stream.tell()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file and force it to the disk."""
    with path.open("x", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        sync_file(stream)
