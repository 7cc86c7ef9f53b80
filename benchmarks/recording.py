"""What all records have in common: title, date, command, machine and versions; and where they go."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path

from hvd_adaptive import __version__
from hvd_adaptive.doctor.machine import cpu_model

_PACKAGES = {"NumPy": "numpy", "torch": "torch", "Horovod": "horovod"}


def header(title: str, *notes: str) -> list[str]:
    """Returns the first lines of a record, in Markdown.

    Args:
        title: what was measured, on what.
        notes: lines about how, which go below.
    """
    packages = {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()}
    # Ranks on a borrowed machine import it from its folder.
    versions = ", ".join(f"{name} {version}" for name, version in {**packages, "hvd_adaptive": __version__}.items())
    return [
        f"# {title}",
        "",
        f"Date: {datetime.date.today()}. Command: `{shlex.join(['python', *sys.argv])}`.",
        f"Machine: {os.cpu_count()} cores, {cpu_model()}, shared with other work. "
        f"Versions: Python {platform.python_version()}, {versions}.",
        *notes,
        "",
    ]


def publish(lines: list[str], path: Path | None) -> None:
    """Prints a record; also writes it to a file, if one is named."""
    text = "\n".join(lines) + "\n"
    print(text)
    if path:
        path.write_text(text)
