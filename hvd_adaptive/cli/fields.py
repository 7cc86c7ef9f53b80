"""Options of a command from the fields of a configuration dataclass."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from hvd_adaptive.cli.option_groups import PLACEHOLDERS, PLACEHOLDERS_BY_TYPE
from hvd_adaptive.validation import field_type


def add_fields(group: Any, cls: type, names: Sequence[str] | None = None) -> None:
    """Adds options for a configuration's fields; what is not given stays out of the parsed options.

    Args:
        group: a parser or a group of one.
        cls: a dataclass whose fields' metadata hold ``help`` and ``choices``.
        names: the fields to add; None: all.
    """
    for item in dataclasses.fields(cls):
        if names is not None and item.name not in names:
            continue
        kind = field_type(cls, item.name)
        default = ("on" if item.default else "off") if kind is bool else item.default
        says_so = item.default is None or "default" in item.metadata["help"]
        text = item.metadata["help"].replace("%", "%%") + ("" if says_so else f" (default: {default})")
        flag = "--" + item.name.replace("_", "-")
        if kind is bool:
            group.add_argument(
                flag, dest=item.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            choices = item.metadata["choices"]
            metavar = "|".join(choices) if choices else PLACEHOLDERS.get(item.name) or PLACEHOLDERS_BY_TYPE[kind]
            group.add_argument(flag, dest=item.name, metavar=metavar, default=argparse.SUPPRESS, help=text)
