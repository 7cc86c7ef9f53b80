"""Options of a command from the fields of configuration dataclasses."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hvd_adaptive.cli.arguments import Parser
from hvd_adaptive.cli.option_groups import PLACEHOLDERS, PLACEHOLDERS_BY_TYPE
from hvd_adaptive.config import Config
from hvd_adaptive.validation import field_type

Groups = Mapping[str, tuple[str, ...]]


def fields_of(*classes: type) -> dict[str, type]:
    """Returns the dataclass of each field."""
    return {name: cls for cls in classes for name in cls.__dataclass_fields__}  # type: ignore[attr-defined]


def add_options(
    parser: Parser, fields: Mapping[str, type], shown: Groups, more: Groups, texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Adds options for configurations' fields; what is not given stays out of the parsed options.

    Args:
        parser: the command's.
        fields: the dataclass of each, whose fields' metadata hold ``help`` and ``choices``.
        shown: by title what the help shows.
        more: by title what ``--help-all`` shows beside it; names that are none of the fields, or shown, are left out.
        texts: other help than the fields' own, by name.
    """
    group: Any
    for title, names in shown.items():
        group = parser.add_argument_group(title)
        for name in names:
            add_field(group, fields[name], name, texts)
    others = fields.keys() - {name for names in shown.values() for name in names}
    for title, names in more.items():
        rest = [name for name in names if name in others]
        group = parser.add_more_group(title) if rest else None
        for name in rest:
            add_field(group, fields[name], name, texts)


def add_field(group: Any, cls: type, name: str, texts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Adds an option for a field of a configuration to a parser or a group of one, as :func:`add_options`."""
    item = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    kind = field_type(cls, name)
    help_text = texts.get(name, item.metadata["help"])
    default = ("on" if item.default else "off") if kind is bool else item.default
    says_so = item.default is None or "default" in help_text
    text = help_text.replace("%", "%%") + ("" if says_so else f" (default: {default})")
    options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if kind is not bool:
        choices = "|".join(item.metadata["choices"])
        options = {"metavar": PLACEHOLDERS.get(name) or choices or PLACEHOLDERS_BY_TYPE[kind]}
    group.add_argument("--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS, help=text, **options)


def add_backend(group: Any) -> None:
    """Adds Config's option for what carries tensors, for a command that takes no others of Config."""
    add_field(group, Config, "backend")
