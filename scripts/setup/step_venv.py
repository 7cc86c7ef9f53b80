"""The virtual environment: creation, checks of an existing one, pip in it, and the record of a set-up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from setup_console import run_logged, say
from setup_options import SetupError

_RECORD_NAME = "hvd-adaptive-setup.json"
_MIN_PIP = (23, 0)


@dataclass(kw_only=True, slots=True)
class Record:
    """What a set-up left behind in .venv, read by the next one.

    Attributes:
        venv: where the environment was made; it does not work anywhere else.
        complete: whether that set-up came to its end.
        inputs: hash of everything that it depended on.
        torch_spec, mpi, mpicc, cuda, dev: the choices, see Options.
        cuda_cc_list: HOROVOD_BUILD_CUDA_CC_LIST as it was set.
        build_variables: the others that were set for the build of Horovod.
        libmpi: the MPI library's file.
        horovod: key of the installed Horovod wheel.
        patient_yield: the library by which ranks with few cores sleep where they wait; None where it could not be compiled.
        versions: installed versions by package name.
    """

    venv: str
    complete: bool = False
    inputs: str = ""
    torch_spec: str | None = None
    mpi: str | None = None
    mpicc: str | None = None
    cuda: str | None = None
    cuda_cc_list: str | None = None
    build_variables: dict[str, str] = field(default_factory=dict)
    dev: bool | None = None
    libmpi: str | None = None
    horovod: str | None = None
    patient_yield: str | None = None
    versions: dict[str, str] = field(default_factory=dict)


class Venv:
    """The environment at a fixed place, and the commands that run in it."""

    def __init__(self, path: Path, *, log: Path, offline: Path | None) -> None:
        self.path = path
        self.log = log
        self.offline = offline

    @property
    def bin(self) -> Path:
        """The folder of the environment's commands."""
        return self.path / "bin"

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.bin / "python"

    def environment(self, *path_first: Path) -> dict[str, str]:
        """This process's environment with `path_first`, then the environment's bin, in front of PATH."""
        result = dict(os.environ)
        folders = [*map(str, path_first), str(self.bin), result.get("PATH", os.defpath)]
        result["PATH"] = os.pathsep.join(folders)
        result["VIRTUAL_ENV"] = str(self.path)
        result["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        result["PIP_ROOT_USER_ACTION"] = "ignore"
        result["PIP_NO_INPUT"] = "1"
        if self.offline is not None:
            # A configured index or folder would be asked besides DIR.
            result["PIP_CONFIG_FILE"] = os.devnull
            for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
                result.pop(name, None)
        return result

    def pip_sources(self) -> list[str]:
        """pip's options that choose where packages come from."""
        return [] if self.offline is None else ["--no-index", "--find-links", str(self.offline)]

    def pip(self, arguments: Sequence[str | Path], *, label: str, **environment: str) -> None:
        """Runs a pip command that may fetch packages.

        Raises:
            SetupError: pip failed; the message has its reasons and the log.
        """
        command = [self.python, "-m", "pip", arguments[0], *self.pip_sources(), *arguments[1:]]
        run_logged(command, label=label, log=self.log, environment=self.environment() | environment)

    def uninstall(self, *names: str) -> None:
        """Removes packages; absent ones are no error."""
        command: list[str | Path] = [self.python, "-m", "pip", "uninstall", "--yes", *names]
        run_logged(command, label="removing " + " ".join(names), log=self.log, environment=self.environment())

    def query(self, code: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
        """Runs Python code in the environment and returns the JSON value that its last line of output is.

        Raises:
            SetupError: the code failed; the message has its last line.
        """
        result = subprocess.run(
            [str(self.python), "-c", code, *arguments],
            env=self.environment() if environment is None else environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
            raise SetupError(
                f"a check in {self.path} failed: {reason}\n  what to do: scripts/setup.sh --recreate"
            )
        return json.loads(result.stdout.strip().splitlines()[-1])

    def python_tag(self) -> str:
        """The environment's Python as wheels name it, e.g. "cp311"."""
        tag: str = self.query("import json, sys; print(json.dumps('cp%d%d' % sys.version_info[:2]))")
        return tag

    def versions(self, *names: str) -> dict[str, str]:
        """Installed versions of the named packages; absent ones are left out."""
        code = (
            "import json, sys\nfrom importlib import metadata\nfound = {}\n"
            "for name in sys.argv[1:]:\n"
            "    try: found[name] = metadata.version(name)\n"
            "    except metadata.PackageNotFoundError: pass\n"
            "print(json.dumps(found))"
        )
        found: dict[str, str] = self.query(code, *names)
        return found

    def read_record(self) -> Record | None:
        """The last set-up's record, or None where there is none that can be read."""
        try:
            fields = json.loads((self.path / _RECORD_NAME).read_text(encoding="utf-8"))
            return Record(**fields)
        except (OSError, ValueError, TypeError):
            return None

    def write_record(self, record: Record) -> None:
        """Writes the record at once, never by half."""
        draft = self.path / f"{_RECORD_NAME}.part"
        draft.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        draft.replace(self.path / _RECORD_NAME)


def prepare(venv: Venv, *, recreate: bool, python: str | None) -> Record:
    """Makes the environment, or checks the one that is there.

    Args:
        venv: where it is to be.
        recreate: remove an existing one first.
        python: the interpreter that the person named, or None.

    Returns:
        The record of an earlier set-up in the same place, else a new one.

    Raises:
        SetupError: something at that path is no environment, or it has another Python than the one asked for.
    """
    record = venv.read_record()
    if os.path.lexists(venv.path):
        if not (venv.path / "pyvenv.cfg").is_file() and any(venv.path.iterdir()):
            raise SetupError(
                f"{venv.path} exists and is no virtual environment: move it away, then run this again"
            )
        reason = "--recreate" if recreate else _why_unusable(venv, record)
        if reason is None:
            if python is not None:
                _require_same_python(venv)
            return record or Record(venv=str(venv.path))
        if not recreate and record is None and (venv.path / "pyvenv.cfg").is_file():
            raise SetupError(
                f"{venv.path}, which this script did not make, is not usable: {reason}\n"
                "  what to do: scripts/setup.sh --recreate replaces it"
            )
        say(f"replacing .venv: {reason}")
        _remove(venv.path)
    _create(venv)
    fresh = Record(venv=str(venv.path))
    if record is not None:
        fresh.torch_spec, fresh.mpi, fresh.dev = record.torch_spec, record.mpi, record.dev
        fresh.cuda, fresh.cuda_cc_list, fresh.build_variables = record.cuda, record.cuda_cc_list, record.build_variables
    venv.write_record(fresh)
    return fresh


def _why_unusable(venv: Venv, record: Record | None) -> str | None:
    """Why an existing environment cannot be used, or None if it can."""
    if record is not None and record.venv != str(venv.path):
        return f"it was made at {record.venv}, and virtual environments do not work at another path"
    code = "import sys, pip; print(sys.prefix); print(*sys.version_info[:2])"
    try:
        result = subprocess.run(
            [str(venv.python), "-c", code],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        prefix, version = result.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError, ValueError):
        return "its python or pip does not start"
    if Path(prefix).resolve() != venv.path.resolve():
        return f"its python belongs to {prefix}"
    if tuple(map(int, version.split())) < (3, 10):
        return f"it has Python {version.replace(' ', '.')}, and 3.10 is needed"
    made_at = _activate_path(venv)
    if made_at is not None and made_at != str(venv.path):
        return f"it was made at {made_at}, and virtual environments do not work at another path"
    return None


def _activate_path(venv: Venv) -> str | None:
    """The path that the environment's scripts were made for, from pip's first line; None if untold."""
    try:
        first = (venv.bin / "pip").read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    interpreter = first.removeprefix("#!")
    return (
        str(Path(interpreter).parent.parent)
        if interpreter.startswith("/") and "/bin/python" in first
        else None
    )


def _require_same_python(venv: Venv) -> None:
    present = venv.query("import json, sys; print(json.dumps(sys.version_info[:2]))")
    wanted = list(sys.version_info[:2])
    if present != wanted:
        raise SetupError(
            f"--python is Python {wanted[0]}.{wanted[1]}, but .venv has {present[0]}.{present[1]}\n"
            "  what to do: add --recreate, or leave --python out to keep .venv"
        )


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _create(venv: Venv) -> None:
    run_logged(
        [sys.executable, "-m", "venv", venv.path],
        label=f"creating .venv with Python {sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})",
        log=venv.log,
        environment=os.environ,
        advice="the venv module needs ensurepip: Debian's python3-venv, or another --python",
    )


def install_build_tools(venv: Venv) -> None:
    """Brings pip (for its reports) and setuptools (for the builds) to a fitting version."""
    found = venv.versions("pip", "setuptools")
    wanted = []
    if _numbers(found.get("pip", "0")) < _MIN_PIP:
        wanted.append("pip>=23.0")
    if _numbers(found.get("setuptools", "0")) < (77, 0):
        wanted.append("setuptools>=77.0.3")
    if wanted:
        venv.pip(["install", *wanted], label="installing " + " ".join(wanted))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
