"""From what a person writes after ``--data`` to the files of a data set."""

from __future__ import annotations

import difflib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from hvd_adaptive.xmc.data.embedded import EMBEDDED_NAME, EMBEDDED_PATH

logger = logging.getLogger(__name__)

_TRAIN_NAME = re.compile(r"(?P<prefix>.*?)(?P<separator>[_.-]?)train\.txt(\.gz)?")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where a data set lies; nothing has been opened yet.

    Attributes:
        name: for people, and the start of the cache's directory name.
        train: the XMC file of the training split; None for the embedded set.
        test: the XMC file of the test split; None for the embedded set.
        label_names: a file with one label name a line, or None.
        feature_names: a file with one feature name a line, or None.
    """

    name: str
    train: Path | None
    test: Path | None
    label_names: Path | None = None
    feature_names: Path | None = None

    @property
    def is_embedded(self) -> bool:
        """Whether this is the set that comes with the package."""
        return self.train is None

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the content depends on."""
        if self.train is None:
            return (EMBEDDED_PATH,)
        return tuple(
            path for path in (self.train, self.test, self.label_names, self.feature_names) if path is not None
        )


def resolve(data: str | None, test_data: str | None = None) -> DataSource:
    """Find the files of a data set.

    Args:
        data: None or "debian-depends" for the embedded set; a directory that holds one data set; a PREFIX
            for which PREFIX_train.txt[.gz] and PREFIX_test.txt[.gz] exist; or the path of a training file.
        test_data: the path of the test file. Without it the test file is the training file's name with
            "test" for "train". PREFIX_labels.txt and PREFIX_features.txt beside it, if there, name the ids.

    Raises:
        ValueError: nothing was found, or more than one thing; says what is there instead. Or a folder may not be read.
    """
    try:
        return _find(data, test_data)
    except OSError as error:
        raise ValueError(f"data: {error.filename or data} cannot be read: {error.strerror}") from None


def _find(data: str | None, test_data: str | None) -> DataSource:
    if data is None or (data == EMBEDDED_NAME and not Path(data).exists()):
        if test_data is not None:
            raise ValueError(
                f"test_data must not be given with the embedded set, got {test_data!r}; give data as well"
            )
        return DataSource(name=EMBEDDED_NAME, train=None, test=None)
    if not data:
        raise ValueError("data must be a path or a prefix, got ''; leave it out for the embedded set")
    path = Path(data).expanduser()
    if path.is_dir():
        train = _only_train_file(path)
    elif path.is_file():
        train = path
    else:
        train = _train_file_of_prefix(path, data)
    test = _test_file(train, test_data)
    stem = _stem(train)
    if stem is None:
        name = train.name.split(".")[0] or train.name
        return DataSource(name=name, train=train.resolve(), test=test.resolve())
    prefix, separator = stem
    return DataSource(
        name=prefix or train.resolve().parent.name or "data",
        train=train.resolve(),
        test=test.resolve(),
        label_names=_names_file(train.parent / f"{prefix}{separator}labels.txt"),
        feature_names=_names_file(train.parent / f"{prefix}{separator}features.txt"),
    )


def _stem(train: Path) -> tuple[str, str] | None:
    """Split "Eurlex_train.txt.gz" into ("Eurlex", "_"); None where the name has another form."""
    match = _TRAIN_NAME.fullmatch(train.name)
    return (match["prefix"], match["separator"]) if match else None


def _train_files(directory: Path) -> list[Path]:
    """All training files, without the .gz twin of a plain file."""
    found = sorted(path for path in directory.iterdir() if path.is_file() and _stem(path) is not None)
    return [path for path in found if not (path.suffix == ".gz" and path.with_suffix("") in found)]


def _only_train_file(directory: Path) -> Path:
    found = _train_files(directory)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"data: the directory {directory} holds no file named [PREFIX_]train.txt[.gz], "
            f"but {_listing(directory)}; give the path of the training file (and of the test file)"
        )
    choices = ", ".join(str(directory / (_stem(path) or ("",))[0]) for path in found)
    raise ValueError(
        f"data: the directory {directory} holds {len(found)} data sets; choose one of: {choices}"
    )


def _train_file_of_prefix(path: Path, data: str) -> Path:
    for separator in ("_", ".", "-"):
        for suffix in (".txt", ".txt.gz"):
            candidate = path.with_name(f"{path.name}{separator}train{suffix}") if path.name else path
            if candidate.is_file():
                return candidate
    parent = path.parent
    if not parent.is_dir():
        raise ValueError(f"data: {data!r} does not exist, nor does the directory {parent}")
    prefixes = [stem[0] for file in _train_files(parent) if (stem := _stem(file)) is not None]
    names = [*prefixes, *(entry.name for entry in parent.iterdir())]
    if parent == Path("."):
        names.append(EMBEDDED_NAME)
    near = _nearest(path.name, names)
    hint = f"; did you mean {near}?" if near else f"; the directory {parent} holds {_listing(parent)}"
    raise ValueError(
        f"data: {data!r} is no file, no directory, and no prefix of _train.txt or _train.txt.gz{hint}"
    )


def _test_file(train: Path, test_data: str | None) -> Path:
    if test_data is not None:
        path = Path(test_data).expanduser()
        if path.is_file():
            return path
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = _nearest(path.name, names)
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"test_data: {test_data!r} is not a file{hint}")
    stem = _stem(train)
    if stem is None:
        raise ValueError(
            f"data: cannot tell the test file of {train}, as its name does not end in train.txt[.gz]; "
            "give --test-data"
        )
    candidates = [train.with_name(f"{''.join(stem)}test{suffix}") for suffix in (".txt", ".txt.gz")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ValueError(
        f"data: no test file for {train}: neither {candidates[0].name} nor {candidates[1].name} is there; "
        "give --test-data"
    )


def _names_file(path: Path) -> Path | None:
    return path.resolve() if path.is_file() else None


def _nearest(name: str, names: list[str]) -> str:
    lowered = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)
    return " or ".join(repr(lowered[match]) for match in close)


def _listing(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    if not names:
        return "nothing"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
