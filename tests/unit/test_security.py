"""Nothing from outside is unpickled or executed: what the source says, and what the interpreter sees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hvd_adaptive"
MODULES = sorted(PACKAGE.rglob("*.py"))
UNPICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml"}
# mpi4py's methods of these names pickle; only ranks of the job are at the other end, which run the same program anyway.
PICKLED_BY_MPI = {"allgather", "alltoall", "bcast", "gather", "scatter", "send", "recv", "sendrecv", "allreduce", "reduce"}
MAY_USE_MPI = {"comm", "wrap"}


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """All calls, with the dotted name of what is called as far as it has one."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, target = [], node.func
            while isinstance(target, ast.Attribute):
                name.append(target.attr)
                target = target.value
            found.append((".".join([*([target.id] if isinstance(target, ast.Name) else ["?"]), *reversed(name)]), node))
    return found


def faults(text: str, room: str = "") -> list[str]:
    """What a module does that could run what a file says."""
    tree = ast.parse(text)
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"imports {name}" for name in (*names, *module) if name.split(".")[0] in UNPICKLING]
    for name, call in calls(tree):
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        constant = {key: value.value for key, value in options.items() if isinstance(value, ast.Constant)}
        if name in ("torch.load", "eval", "exec", "os.system", "np.fromregex") or name.endswith(".fromfile"):
            found.append(f"calls {name}")
        if name in ("np.load", "np.savez", "np.save", "numpy.load", "np.lib.format.open_memmap") and constant.get(
            "allow_pickle"
        ) is not False and "open_memmap" not in name:
            found.append(f"calls {name} without allow_pickle=False")
        if constant.get("shell") is True:
            found.append(f"calls {name} with a shell")
        if room not in MAY_USE_MPI and "comm" in name.lower() and name.split(".")[-1] in PICKLED_BY_MPI:
            found.append(f"calls {name}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_unpickles_or_executes_what_it_reads(path: Path) -> None:
    assert faults(path.read_text(), path.relative_to(PACKAGE).parts[0]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "np.load('x')",
        "np.load('x', allow_pickle=True)", "eval('1')", "import yaml", "subprocess.run('x', shell=True)", "self._comm.bcast(1)",
    ],
)  # fmt: skip
def test_the_audit_sees_them(text: str) -> None:
    assert faults(text)
