"""The rooms and their arrows: who may import whom."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hvd_adaptive"

# What each room may import of this package, besides itself and config.
ALLOWED = {
    "algorithm": set(),
    "compress": {"algorithm", "comm"},
    "cluster": set(),
    "comm": {"cluster"},
    "exchange": {"comm", "compress"},
    "engine": {"algorithm", "comm", "compress", "exchange"},
    "strategies": {"algorithm", "comm", "compress", "engine", "exchange"},
    "state": {"cluster", "comm"},
    "research": {"algorithm", "comm", "engine", "state", "strategies"},
    "session": {"algorithm", "cluster", "comm", "engine", "research", "state", "strategies"},
    "xmc": {"algorithm", "comm", "engine", "session", "state"},
    "wrap": {"algorithm", "cluster", "comm", "engine", "exchange", "research", "session", "state"},
    "calibrate": {"algorithm", "comm", "engine", "session", "xmc"},
    "doctor": {"cluster", "comm", "compress", "engine", "exchange", "session"},
    "report": set(),
    # The rules of algorithm, and the bytes that codecs and reducers put on the wire; it never meets a rank.
    "simulate": {"algorithm", "calibrate", "compress", "exchange", "research"},
    "cli": {
        *("algorithm", "calibrate", "cluster", "comm", "doctor", "engine", "exchange", "report", "session", "simulate", "state"),
        *("strategies", "wrap", "xmc"),
    },
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_public_names_are_listed_before_they_are_loaded() -> None:
    code = "import hvd_adaptive as h; print(set(h.__all__) <= set(dir(h)), all(getattr(h, name) for name in h.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True True\n", done.stderr


def test_the_core_loads_without_horovod_and_mpi() -> None:
    modules = [
        f"hvd_adaptive.{room}.{path.stem}".replace("/", ".")
        for room in ("algorithm", "compress/kernels", "compress")
        for path in (PACKAGE / room).glob("*.py")
        if path.stem != "__init__" and not path.stem.startswith("cuda")  # Triton is there with CUDA only
    ]
    code = f"import sys, {', '.join(modules)}; print(sorted({{'horovod', 'mpi4py'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_arrows_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    found = imports(path)
    roots = {name.split(".")[0] for name in found}
    if room not in ("comm", "wrap"):
        assert not roots & {"horovod", "mpi4py"}
    if room in ("algorithm", "compress"):
        assert not roots & {"os", "time", "socket", "threading"}
        # A codec may be handed collectives, and does not know who fulfils them.
        assert all(name.startswith("hvd_adaptive.comm.protocols") for name in found if name.startswith("hvd_adaptive.comm"))
    if path.parent != PACKAGE:
        rooms = {name.split(".")[1] for name in found if name.startswith("hvd_adaptive.")}
        everywhere = {"combinations", "config", "exit_codes", "validation", "__version__"}
        assert rooms <= ALLOWED[room] | everywhere | {room}
    assert not roots & {"pickle", "cloudpickle", "dill"}


def test_what_is_imported_is_declared() -> None:
    """Also what comes with Horovod or another package today."""
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    declared = {re.split(r"[\s;<>=]", line)[0] for text in lists for line in text.split("\n") if line}
    # Its set-up builds Horovod; Horovod has no requirement on it either.
    names = {"sklearn": "scikit-learn", "horovod": "torch"}
    found = {name.split(".")[0] for path in PACKAGE.rglob("*.py") for name in imports(path)}
    others = found - set(sys.stdlib_module_names) - {"hvd_adaptive"}
    assert {names.get(name, name) for name in others} <= declared


def test_every_marker_is_used_and_declared() -> None:
    """--strict-markers finds those that are not declared."""
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    block = text.partition("markers = [")[2].partition("\n]")[0]
    declared = set(re.findall(r'^    "(\w+)', block, re.M))
    tests = "".join(path.read_text() for path in (PACKAGE.parent / "tests").rglob("*.py"))
    assert declared == {name for name in declared if f"mark.{name}" in tests} >= {"mpi", "gpu"}


def test_every_module_fits_a_reader() -> None:
    long = [path.name for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 400]
    assert not long


def test_no_python_runs_between_fork_and_exec() -> None:
    # A child of a process with threads may wait for ever for a lock that one of them held.
    assert not [path.name for path in PACKAGE.rglob("*.py") if "preexec_fn=" in path.read_text()]
