"""The documentation: its commands run, its messages are the code's, its links lead somewhere, its reference is fresh."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import hvd_adaptive
from hvd_adaptive.cli.fields import fields_of
from hvd_adaptive.cli.option_groups import (
    CALIBRATE,
    RUN,
    RUN_MORE,
    SIMULATE,
    SIMULATE_MORE,
    TRAIN,
    TRAIN_MORE,
)
from hvd_adaptive.cli.parser import make_parser
from hvd_adaptive.cli.simulate import simulated_fields
from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.config import Config
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.xmc.sparse_mlp import SparseMLP
from hvd_adaptive.xmc.train_config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Makes every training in the pages short, and its rounds.
SHORT = {
    "HVD_ADAPTIVE_MEGA_BATCH": "1000",
    "HVD_ADAPTIVE_TIME_LIMIT": "0.5",
    "HVD_ADAPTIVE_CALIBRATION": "false",
    "HVD_ADAPTIVE_HIDDEN_SIZE": "8",
    "HVD_ADAPTIVE_EVAL_ROUNDS": "0",
}


@dataclass
class Block:
    page: str
    line: int
    text: str
    skip: str | None


def fenced(page: Path, language: str) -> list[Block]:
    """The blocks of a page in a language, with what skip="..." behind it says."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start, info = None, ""
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start, info = number, line[3:].strip()
            continue
        if info.split(" ")[0] == language:
            skip = re.search(r'skip="([^"]*)"', info)
            found.append(Block(page.name, start + 1, "\n".join(lines[start + 1 : number]), skip and skip[1]))
        start = None
    assert start is None, f"{page.name}: the block of line {start} has no end"
    return found


def runnable_pages() -> list[Path]:
    return [page for page in PAGES if any(block.skip is None for block in fenced(page, "bash"))]


@pytest.mark.parametrize("page", runnable_pages(), ids=lambda page: page.stem)
def test_commands_of_a_page_run(page: Path, run_job: Any, data: Path, cache_home: Path, tmp_path: Path) -> None:
    """In the order of the page, in a folder with the data set PREFIX."""
    for split in ("train", "test"):
        shutil.copy(data / f"toy_{split}.txt.gz", tmp_path / f"PREFIX_{split}.txt.gz")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    env = {"PATH": path, "XDG_CACHE_HOME": str(cache_home), **root, **SHORT}
    for block in fenced(page, "bash"):
        if block.skip is None:
            text = re.sub(r"--time-limit \d+", "--time-limit 0.5", block.text)
            text = re.sub(r"hvd-adaptive calibrate ", "hvd-adaptive calibrate --seconds 0.5 ", text)
            script = f"cd {shlex.quote(str(tmp_path))}\nset -euo pipefail\n{text}"
            # Commands that load torch themselves are forks, as their ranks are.
            job = run_job(["bash", "-c", script], env=env, timeout=900, alone=True)
            assert job.returncode == 0, f"{block.page}:{block.line}\n{block.text}\n{job.describe()}"


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Every call of hvd-adaptive in a page, in any kind of block, with its line."""
    found = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if re.match(r"^(    )?(#|\*|\||[A-Z])", line) or "hvd-adaptive " not in line or "`" in line:
            continue
        words = shlex.split(line, comments=True)
        while words and Path(words[0]).name != "hvd-adaptive":
            words.pop(0)
        if words:
            ends = [i for i, word in enumerate(words) if word in (">", "|", "&&", "...")]
            found.append((number, words[1 : ends[0] if ends else None]))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_parse(page: Path) -> None:
    """Also of the commands that are not run: options that were renamed would show."""
    for number, words in commands(page):
        if words[0] == "submit":
            continue  # has a parser of its own, for components; tests/unit/test_batch_script.py
        try:
            make_parser().parse_args(words)
        except ValueError as error:
            pytest.fail(f"{page.name}:{number}: hvd-adaptive {' '.join(words)}\n{error}")


def test_codecs_for_each_tensor_fit_the_model_of_train() -> None:
    """A pattern of names that its model has not would be an error."""
    tensors = [TensorInfo(name, tuple(p.shape)) for name, p in SparseMLP(2, 3, 4).named_parameters()]
    found = [make_parser().parse_args(words) for page in PAGES for _, words in commands(page) if words[0] == "train"]
    texts = [options.compression for options in found if getattr(options, "compression", None)]
    assert any(";" in text for text in texts)
    for text in texts:
        parse_policy(text).check(tensors)


@cache
def messages() -> list[str]:
    """Every text in the code, with \\0 for what is filled in."""
    found = []
    for path in (ROOT / "hvd_adaptive").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]", "\0", node.value))
    return found


TROUBLES = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_troubleshooting_has_the_messages_of_the_code(trouble: str) -> None:
    pattern = re.compile(".*".join(re.escape(part) for part in trouble.split("...")), re.S)
    assert any(pattern.search(message) for message in messages()), "no message in the code reads like this any more"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [PAGES[0]]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
            waiting += [found for link in links if (found := (page.parent / link).resolve()) in PAGES]
    assert [page.name for page in PAGES if page not in reached] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """`scripts/docs.sh` finds this, too, where its packages can be had."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [^:]+: ([\w/-]+\.md)$", config, re.M)
    paths = [page.relative_to(ROOT).as_posix().removeprefix("docs/") for page in PAGES[1:]]
    assert [path for path in paths if path not in listed] == []


@pytest.mark.parametrize(
    ("groups", "fields"),
    [
        ({**TRAIN, **TRAIN_MORE}, fields_of(TrainConfig, Config)),
        ({**RUN, **RUN_MORE}, fields_of(RunConfig)),
        ({**SIMULATE, **SIMULATE_MORE}, simulated_fields()),
    ],
    ids=["train", "run", "simulate"],
)
def test_every_option_has_its_group_in_the_help(groups: dict[str, tuple[str, ...]], fields: dict[str, type]) -> None:
    assert sorted(name for names in groups.values() for name in names) == sorted(fields)
    assert {name for names in CALIBRATE.values() for name in names} < fields_of(TrainConfig, Config).keys()


@pytest.mark.parametrize(
    "command", [None, "train", "run", "evaluate", "predict", "doctor", "calibrate", "report", "simulate", "bench"]
)
def test_help_has_examples_that_parse_and_fits_a_terminal(
    command: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        make_parser().parse_args([*([command] if command else []), "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 122
    examples = [line.strip() for line in text.splitlines() if re.match(r"  (\w+ .*)?hvd-adaptive \w", line)]
    assert examples
    for example in examples:
        words = shlex.split(re.split(r"   +| > ", example)[0])
        make_parser().parse_args(words[words.index("hvd-adaptive") + 1 :])
    for line in text.splitlines():
        assert not re.search(r"\b(STR|INT|FLOAT|None|True|False)\b", line), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_in_pages_parses(page: Path) -> None:
    for block in fenced(page, "python"):
        ast.parse(block.text)


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_fresh() -> None:
    made = script("make_api_docs")
    assert set(hvd_adaptive.__all__) - set(made.PUBLIC["hvd_adaptive"]) == {"__version__"}
    assert made.PAGE.read_text(encoding="utf-8") == made.render(), "run python scripts/make_api_docs.py"


def test_the_picture_of_a_round_is_fresh_and_well_formed() -> None:
    made = script("draw_round")
    text = made.PICTURE.read_text(encoding="utf-8")
    assert text == made.render(), "run python scripts/draw_round.py"
    assert ElementTree.fromstring(text).tag.endswith("svg")
