"""How every command reads its arguments and shows its help."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

NUM_RANKS = ("-np", "--num-ranks")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they are, and lines at a length that can be read."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, 112) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of ending the process, so that of many ranks one speaks; knows what was perhaps meant."""

    commands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the message, and what was perhaps meant."""
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        meant = _meant(wrong[1], self.commands) if wrong else ""
        raise ValueError(f"{message}{meant}; {self.prog} --help shows what there is")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the options as argparse does; raises ValueError for unknown arguments, too."""
        values, rest = self.parse_known_args(args, namespace)
        if rest:
            command = self.commands[values.command] if self.commands else self
            flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
            meant = _meant(flag, [name for action in command._actions for name in action.option_strings])
            # A subcommand's program name has the arguments before it.
            raise ValueError(f"unknown arguments {' '.join(rest)}{meant}; {command.prog} --help shows what there is")
        return values


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=2)
    return f": did you mean {' or '.join(near)}?" if near else ""


def without_options(arguments: Sequence[str], names: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """Returns a command's arguments without some options.

    Args:
        arguments: the command's.
        names: options that take a value, as ``--name VALUE`` or ``--name=VALUE``.
        flags: options that take none.
    """
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument not in flags and not argument.startswith(tuple(f"{name}=" for name in names)):
            kept.append(argument)
    return kept
