"""scripts/setup.sh as a person calls it: help, wrong arguments, refusals before any installation."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what the set-up needs, so that no test can touch the real .venv."""
    root = tmp_path / "a repository"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    return root


def run(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(root / "scripts" / "setup.sh"), *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(root / "cache"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_help_names_every_option_and_changes_nothing(repository: Path) -> None:
    result = run(repository, "--help")
    assert result.returncode == 0
    for option in ("--python", "--torch-spec", "--mpi", "--cuda", "--recreate", "--offline", "--no-dev", "--quick"):
        assert option in result.stdout
    assert "--root" not in result.stdout
    assert sorted(path.name for path in repository.iterdir()) == ["pyproject.toml", "scripts", "setup.cfg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cuda", "12.8"], ["--cuda", "12.8", "site", "pypi"]),
        (["--mpi", "intel"], ["--mpi", "intel", "site", "pypi"]),
        (["--offline", "/no/such/folder"], ["--offline", "/no/such/folder"]),
        (["--torch-spec", "numpy==2"], ["--torch-spec", "numpy==2"]),
        (["--torch-spec=--index-url=x"], ["--torch-spec"]),
        (["--torch-spec", "torchvision"], ["--torch-spec", "torchvision"]),
        (["--dev", "--no-dev"], ["--no-dev", "not allowed with"]),
        (["--pyton", "python3"], ["--pyton"]),
        (["--python", "/no/such/python"], ["--python", "/no/such/python"]),
        (["--python=/no/such/python"], ["--python", "/no/such/python"]),
    ],
)
def test_wrong_arguments_are_named_and_end_with_code_2(
    repository: Path, arguments: list[str], words: list[str]
) -> None:
    result = run(repository, *arguments)
    assert result.returncode == 2, result.stderr
    for word in words:
        assert word in result.stderr
    assert not (repository / ".venv").exists()


def test_an_old_python_is_refused_with_its_version(repository: Path) -> None:
    old = script(repository / "python3.8", 'case "$1" in --version) echo Python 3.8.18;; *) exit 1;; esac')
    result = run(repository, "--python", str(old))
    assert result.returncode == 2
    assert "3.10 or newer" in result.stderr
    assert "Python 3.8.18" in result.stderr


def test_no_fitting_python_on_path_is_said_with_the_remedy(repository: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    result = run(repository, PATH=str(tools))
    assert result.returncode == 2
    assert "--python" in result.stderr


def test_a_folder_that_is_no_environment_is_left_alone_even_with_recreate(repository: Path) -> None:
    precious = repository / ".venv" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("kept", encoding="utf-8")
    result = run(repository, "--recreate")
    assert result.returncode == 1
    assert "is no virtual environment" in result.stderr
    assert precious.read_text(encoding="utf-8") == "kept"


def test_a_foreign_broken_environment_is_not_replaced_unasked(repository: Path) -> None:
    venv = repository / ".venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("home = /nowhere\n", encoding="utf-8")
    result = run(repository)
    assert result.returncode == 1
    assert "--recreate" in result.stderr
    assert (venv / "pyvenv.cfg").exists()


def test_pythonpath_is_reported_for_it_can_hide_packages(repository: Path) -> None:
    result = run(repository, "--help", PYTHONPATH="/somewhere/else")
    assert "/somewhere/else" in result.stderr
