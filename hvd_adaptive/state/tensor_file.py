"""Opens safetensors files, whatever their paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file for torch on the CPU, as ``safe_open`` does, which takes paths of valid UTF-8 only.

    Raises:
        OSError, SafetensorError: if it cannot be opened, or is none.
    """
    with contextlib.ExitStack() as stack:
        name = os.fspath(path)
        try:
            os.fsencode(name).decode("utf-8")
        except UnicodeDecodeError:
            name = f"/dev/fd/{stack.enter_context(path.open('rb')).fileno()}"
        yield stack.enter_context(safe_open(name, framework="pt", device="cpu"))
