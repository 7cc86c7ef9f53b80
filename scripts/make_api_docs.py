#!/usr/bin/env python
"""Writes docs/api.md from the docstrings of the public names; a test compares the file with what this would write.

python scripts/make_api_docs.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
# What people import, by module.
PUBLIC = {
    "hvd_adaptive": (
        *("Session", "Batch", "Config", "Checkpointer", "RoundsFile", "Compression", "bind_device", "catch_signals"),
        *("island_mesh", "EXIT_PREEMPTED"),
    ),
    "hvd_adaptive.torch": ("init",),
    "hvd_adaptive.engine.records": ("RoundRecord", "RoundStats"),
    "hvd_adaptive.engine.merge": ("MergeStats",),
    "hvd_adaptive.engine.replay": ("RecordingFile",),
    "hvd_adaptive.report.tensorboard": ("ScalarWriter",),
    "hvd_adaptive.xmc.data": ("resolve", "build", "open_splits", "SparseDataset", "DataSource", "SparseRows"),
    "hvd_adaptive.compress": ("parse_codec", "encode", "decode", "Codec", "ValueCodec", "TensorCodec"),
    "hvd_adaptive.exchange.exchange": ("Exchange",),
}
_HEAD = """# API reference

Made from the docstrings by `scripts/make_api_docs.py`. What is marked COLLECTIVE all ranks must call, in the same order.
"""
_SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Yields")


def render() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for name, members in PUBLIC.items():
        module = importlib.import_module(name)
        parts.append(f"## `{name}`\n")
        for member in members:
            parts += _describe(member, getattr(module, member))
    return "\n".join(parts).rstrip() + "\n"


def _describe(name: str, thing: Any) -> list[str]:
    if isinstance(thing, int):
        return [f"### `{name} = {thing}`\n"]
    if not callable(thing):
        return [f"### `{name}`\n", _docstring(type(thing)), *_members(name, type(thing))]
    if not inspect.isclass(thing):
        return [f"### `{name}{_signature(thing)}`\n", _docstring(thing)]
    signature = "" if dataclasses.is_dataclass(thing) else _signature(thing)
    parts = [f"### `class {name}{signature}`\n", _docstring(thing)]
    if dataclasses.is_dataclass(thing) and any("help" in item.metadata for item in dataclasses.fields(thing)):
        parts.append(_options(thing))
    return parts + _members(name, thing)


def _members(name: str, thing: type) -> list[str]:
    parts = []
    for key, value in vars(thing).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if key.startswith("_"):
            continue
        if isinstance(function, property):
            parts += [f"#### `{name}.{key}`\n", _docstring(function)]
        elif inspect.isfunction(function) and function.__doc__:
            parts += [f"#### `{name}.{key}{_signature(function)}`\n", _docstring(function)]
    return parts


def _signature(thing: Any) -> str:
    signature = inspect.signature(thing)
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _options(config: type) -> str:
    rows = ["| field | default | |", "| --- | --- | --- |"]
    for item in dataclasses.fields(config):
        text = item.metadata["help"].replace("|", "\\|")
        choices = item.metadata["choices"]
        if not all(choice in text for choice in choices):
            text += f" ({', '.join(choices)})"
        rows.append(f"| `{item.name}` | `{item.default}` | {text} |")
    return "\n".join(rows) + "\n"


def _docstring(thing: Any) -> str:
    text = re.sub(r":(?:class|meth|func|attr):`~?([^`]*)`", r"`\1`", inspect.getdoc(thing) or "").replace("``", "`")
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            section = line.rstrip(":")
            lines += [f"**{section}**", ""]
        elif section and line.startswith("    ") and not line.startswith("     "):
            item = re.match(r"([\w*, .]+?): (.*)", line.strip())
            listed = item and section != "Returns"
            lines.append(f"* `{item[1]}`: {item[2]}" if item and listed else line.strip())
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = section if not line else ""
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
