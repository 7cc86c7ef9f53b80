"""The examples: each runs small on two ranks and learns, and the commands in their heads are ones that there are."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import read_run

from hvd_adaptive.cli.parser import make_parser

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HEADS = [path for path in sorted(EXAMPLES.iterdir()) if path.suffix in (".py", ".toml")]
ADAPTIVE = [sys.executable, "-m", "hvd_adaptive"]
RUN = [*ADAPTIVE, "run", "-np", "2"]
# What each measures at the end on data that it has not seen. A model that has learned nothing, or only how frequent each answer
# is, has 0.1 (existing_script, image_classification), 0.08 (own_loop), 0.44 (sparse text); the language model, whose bits
# fall from 8, comes to about 5.
SMALL = {
    "existing_script": ([sys.executable, "existing_script.py", "--small"], 0.5),
    "existing_script under run": ([*RUN, "existing_script.py", "--small"], 0.5),
    "own_loop": ([sys.executable, "own_loop.py", "--small", "--epochs", "4"], 0.3),
    "own_loop_horovod": ([sys.executable, "own_loop_horovod.py", "--small", "--epochs", "4"], 0.3),
    "image_classification": ([sys.executable, "image_classification.py", "--small"], 0.4),
    "image_classification_horovod": ([sys.executable, "image_classification_horovod.py", "--small"], 0.4),
    "language_model": ([sys.executable, "language_model.py", "--small"], -4.8),
    "language_model_horovod": ([sys.executable, "language_model_horovod.py", "--small"], -4.8),
    "sparse_text_horovod": ([sys.executable, "sparse_text_horovod.py", "--small"], 0.47),
}


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all examples keep what they make of the data that come with the package."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", SMALL)
def test_an_example_learns(name: str, run_job: Any, cache_home: Path) -> None:
    command, bound = SMALL[name]
    job = run_job(command, np=None if "run" in command else 2, cwd=EXAMPLES, env={"XDG_CACHE_HOME": str(cache_home)})
    assert job.returncode == 0, job.describe()
    found = [float(value) for value in re.findall(r"(?:held-out accuracy|P@1|held-out) (\d\.\d+) ", job.stdout)]
    assert found, job.describe()
    last = found[-1] if bound > 0 else -found[-1]
    assert last > bound, job.describe()
    if "run" in command:
        assert "adaptive: DataLoader 1" in job.stderr, job.describe()


def test_the_built_in_trainer_learns_by_its_file(run_job: Any, cache_home: Path, tmp_path: Path) -> None:
    run = ["train", "-np", "2", "--config", "sparse_text.toml", "--epochs", "0.2", "--out", str(tmp_path / "run")]
    job = run_job([*ADAPTIVE, *run], cwd=EXAMPLES, env={"XDG_CACHE_HOME": str(cache_home)})
    assert job.returncode == 0, job.describe()
    summary, _ = read_run(tmp_path / "run")
    assert summary["best"]["p1"] > 0.47, job.describe()


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.name)
def test_commands_in_heads_name_what_there_is(path: Path) -> None:
    lines = [line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines()]
    commands = [line for line in lines if line.startswith(("mpirun ", "hvd-adaptive ", "diff "))]
    assert commands or path.stem in ("code_pieces", "digits", "gpt")
    for command in commands:
        for name in re.findall(r"examples/(\w+\.\w+)", command):
            assert (EXAMPLES / name).exists(), command
        script, _, rest = command.rpartition("examples/")[2].partition(" ")
        for option in re.findall(r"--[\w-]+", rest) if script.endswith(".py") else []:
            assert f'"{option}"' in (EXAMPLES / script).read_text(encoding="utf-8"), command
        words = shlex.split(command)
        if words[0] == "hvd-adaptive":
            make_parser().parse_args(words[1:])


def test_the_table_has_every_file() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in HEADS if f"({path.name})" not in table] == []
