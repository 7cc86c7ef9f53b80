"""The report's page in a real browser: nothing cut off, nothing too wide, readable in light and dark."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from needs import skip_or_fail
from run_files import write_run

from hvd_adaptive.report.page import render_page
from hvd_adaptive.report.runs import read_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Measures the page that it is appended to; the page becomes the answer.
MEASURE = """
<script>
const figures = [...document.querySelectorAll("figure svg")];
const within = (a, b) => b.left > a.left - 2 && b.right < a.right + 2 && b.top > a.top - 2 && b.bottom < a.bottom + 2;
const texts = figures.flatMap(svg => [...svg.querySelectorAll("text")].map(text => [svg, text]));
const others = [...document.querySelectorAll("p, td, th, h1, h2, figcaption, summary, li")];
const unique = values => [...new Set(values)];
const answer = JSON.stringify({
  width: innerWidth,
  content: document.documentElement.scrollWidth,
  heights: figures.map(svg => svg.getBoundingClientRect().height),
  cut: texts.filter(([svg, t]) => !within(svg.getBoundingClientRect(), t.getBoundingClientRect())).map(([, t]) => t.textContent),
  smallest: Math.min(...texts.map(([, text]) => text.getBoundingClientRect().height)),
  paper: getComputedStyle(document.body).backgroundColor,
  inks: unique([...others.map(e => getComputedStyle(e).color), ...texts.map(([, text]) => getComputedStyle(text).fill)]),
  lines: unique(figures.flatMap(svg => [...svg.querySelectorAll("path")].map(path => getComputedStyle(path).stroke))),
});
document.body.innerHTML = "<pre id=answer></pre>";
document.getElementById("answer").textContent = answer;
</script>
"""


def browse(*arguments: str) -> str:
    command = [str(CHROMIUM), "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", *arguments]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def luminance(colour: str) -> float:
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CHROMIUM is None:
        skip_or_fail("needs a browser: Debian's chromium")
    folder = tmp_path_factory.mktemp("page")
    runs = [
        write_run(folder / "a", strategy="horovod", label="plain Horovod <b>with a long & hostile name</b>"),
        write_run(folder / "b", strategy="local", label="Adaptive SGD", best=0.69, rate=0.13),
    ]
    path = folder / "report.html"
    path.write_text(render_page(read_runs(runs)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(500, True), (1280, False)])
def test_page_in_a_browser(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    # A headless window is at least 500 wide; its content can be narrower. The policy forbids scripts: this one measures.
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    measured = tmp_path / "measured.html"
    measured.write_text(text.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom = browse(f"--user-data-dir={tmp_path}", *scheme, f"--window-size={width},2000", "--dump-dom", measured.as_uri())
    found = re.search(r'<pre id="answer">(.*?)</pre>', dom, re.S)
    assert found, dom[-500:]
    answer: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    assert answer["content"] <= answer["width"] == width
    assert len(answer["heights"]) >= 10
    assert min(answer["heights"]) > 80
    assert not answer["cut"]
    assert answer["smallest"] > 10
    assert (luminance(answer["paper"]) < 0.1) == dark
    assert min(contrast(ink, answer["paper"]) for ink in answer["inks"] if ink.startswith("rgb(")) > 2.2
    assert len([line for line in answer["lines"] if line.startswith("rgb")]) >= 6


def test_page_draws_its_colours_under_its_own_policy(page: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "picture.png"
    browse(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,2000", f"--screenshot={picture}", page.as_uri())
    pixels = (imread(picture)[::2, :, :3] * 255).round().astype(int).reshape(-1, 3)
    colours = {tuple(map(int, pixel)) for pixel in pixels}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours
