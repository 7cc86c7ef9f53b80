"""How every command reads its arguments and shows its help."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

NUM_RANKS = ("-np", "-n", "--num-ranks")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they are, and lines at a length that can be read."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=33, width=min(shutil.get_terminal_size().columns, 112) - 2)

    def add_argument(self, action: argparse.Action) -> None:
        """Adds an argument; makes room for the names of commands, which argparse indents and does not count."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of ending the process, so that of many ranks one speaks; knows what was perhaps meant.

    Its help shows the options that most people decide about; ``--help-all`` shows the groups of :meth:`add_more_group` too.
    """

    commands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})

    def __init__(self, *args: Any, **options: Any) -> None:
        # Whoever starts ranks takes options out of the command by name: none may be abbreviated.
        super().__init__(*args, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})
        self._more: list[Any] = []

    def add_more_group(self, title: str) -> Any:
        """Returns a new group of options that only ``--help-all`` shows."""
        if not self._more:
            self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")
        self._more.append(self.add_argument_group(title))
        return self._more[-1]

    def format_help(self) -> str:
        """Returns the help without the groups of :meth:`add_more_group`, but with their number of options."""
        groups, self._action_groups = self._action_groups, [g for g in self._action_groups if g not in self._more]
        try:
            text = super().format_help()
        finally:
            self._action_groups = groups
        count = sum(action.help != argparse.SUPPRESS for group in self._more for action in group._group_actions)
        return f"{text}\n{count} more options: {self.prog} --help-all\n" if count else text

    def format_help_all(self) -> str:
        """Returns the whole help."""
        return super().format_help()

    @property
    def where_to_look(self) -> str:
        """What shows the options, for an error."""
        return f"{self.prog} {'--help-all' if self._more else '--help'} shows what there is"

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the message, and what was perhaps meant."""
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        meant = _meant(wrong[1], self.commands) if wrong else ""
        raise ValueError(f"{message}{meant}; {self.where_to_look}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the options as argparse does; raises ValueError for unknown arguments, too."""
        values, rest = self.parse_known_args(args, namespace)
        if rest:
            command: Any = self.commands[values.command] if self.commands else self
            flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
            meant = _meant(flag, [name for action in command._actions for name in action.option_strings])
            script, name = next((word for word in rest if word.endswith(".py")), None), getattr(values, "command", None)
            if script and name in ("calibrate", "train"):
                meant = (
                    f": {name} is for the model that comes with hvd_adaptive, and takes no script. hvd-adaptive run {script} "
                    f"starts a Horovod script, run --dry-run {script} says what unequal shares would gain, and for a Session see "
                    '"Your own model" in docs/calibrate.md'
                )
            # A subcommand's program name has the arguments before it.
            raise ValueError(f"unknown arguments {' '.join(rest)}{meant}; {command.where_to_look}")
        return values


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_help_all(), end="")
        parser.exit()


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=2)
    return f": did you mean {' or '.join(near)}?" if near else ""


def without_options(arguments: Sequence[str], names: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """Returns a command's arguments without some options.

    Args:
        arguments: the command's.
        names: options that take a value, as ``--name VALUE`` or ``--name=VALUE``, and ``-nVALUE`` where they are one letter.
        flags: options that take none.
    """
    joined = tuple(name if len(name) == 2 else f"{name}=" for name in names)
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument not in flags and not argument.startswith(joined):
            kept.append(argument)
    return kept


def check_writable(option: str, path: Path) -> None:
    """Tries whether a file can be written, before the work whose result it shall hold; leaves it as it was.

    Args:
        option: that names it.
        path: the file.

    Raises:
        ValueError: if it cannot.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: {path.parent} is not there")
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written: {error.strerror}") from None
    if is_new:
        path.unlink()


def write_output(option: str, path: str, text: str) -> None:
    """Writes a file whole or not at all: where the disk is full, what was there before stays.

    Args:
        option: that names it.
        path: the file; written to as it is if it is a link or no file, such as /dev/stdout, or its folder takes no other one.
        text: what it shall hold.

    Raises:
        ValueError: if it cannot be written.
    """
    file = Path(path)
    part = file.with_name(f".{os.getpid()}.part")
    try:
        is_new = not file.exists()
        whole = is_new or (file.is_file() and not file.is_symlink() and os.access(file, os.W_OK))
        if not whole or not os.access(file.parent, os.W_OK):
            file.write_text(text, encoding="utf-8")
            return
        try:
            part.write_text(text, encoding="utf-8")
            if not is_new:
                shutil.copymode(file, part)
            part.replace(file)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written: {error.strerror}") from None
