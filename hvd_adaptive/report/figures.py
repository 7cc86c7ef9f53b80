"""Charts as files and as parts of a page."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from hvd_adaptive.report.charts import WIDTH_IN, Chart, comparison_charts, run_charts
from hvd_adaptive.report.drawing import draw_accuracy, draw_by_rank, draw_loss
from hvd_adaptive.report.runs import Run
from hvd_adaptive.report.style import CSS_VARIABLES, new_figure, pictures, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"


def chart_svg(chart: Chart, prefix: str) -> str:
    """Draws a chart as an SVG element for an HTML page, in the colours of the page's style sheet.

    Args:
        chart: what to draw.
        prefix: makes the element's ids unique in the page.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    buffer = io.BytesIO()
    with _drawn(chart) as figure:
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    # Its own output, not a stranger's; a run's name in it is text of a node, and stays that.
    root = ElementTree.fromstring(buffer.getvalue())
    for child in [child for child in root if child.tag == f"{{{_SVG}}}metadata"]:
        root.remove(child)
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                value = f"{prefix}-{value}"
            elif name == f"{{{_XLINK}}}href":
                value = value.replace("#", f"#{prefix}-", 1)
            elif "url(#" in value:
                value = value.replace("url(#", f"url(#{prefix}-")
            else:
                value = re.sub(r"#[0-9a-f]{6}\b", _themed, value)
            element.set(name, value)
        if element.tag == f"{{{_SVG}}}text":
            # The page's own font: what matplotlib measured with is wider than most.
            element.set("style", re.sub(r"'DejaVu Sans'.*?sans-serif", "var(--font)", element.get("style", "")))
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    root.set("role", "img")
    root.set("aria-label", chart.alt)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def write_pngs(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draws overview.png and each chart into a folder, which is made if it is not there; returns the files.

    Raises:
        RuntimeError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "overview.png"]
    draw_overview(runs, files[0])
    charts = [(chart.name, chart, "") for chart in comparison_charts(runs)]
    for number, run in enumerate(runs, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", run.label.lower()).strip("-")[:40] or "run"
        charts += [(f"{number}-{slug}-{chart.name}", chart, run.label) for chart in run_charts(run)]
    for name, chart, label in charts:
        files.append(folder / f"{name}.png")
        with _drawn(chart) as figure:
            title = f"{chart.title}: {shorten(label, 34)}" if label else chart.title
            figure.suptitle(title, x=0.01, ha="left", fontsize=12)
            figure.savefig(files[-1], dpi=150, format="png", facecolor="white")
    return files


def draw_overview(runs: Sequence[Run], path: Path) -> None:
    """Draws P@1 over training seconds, or the loss if no run was scored, and how the ranks of every run of strategy "local" share
    the work, into one PNG.

    Args:
        runs: the runs.
        path: the file to write; its folder must exist.

    Raises:
        RuntimeError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    adaptive = [run for run in runs if run.strategy == "local" and run.by_rank("samples") is not None]
    with _quiet_pictures():
        height = 4.2 + 1.2 * max(0, len(adaptive) - 1)
        figure = new_figure(10.5 if adaptive else 6.5, height)
        columns = figure.add_gridspec(1, 2 if adaptive else 1)
        axes = figure.add_subplot(columns[0])
        if any(run.evaluations for run in runs):
            axes.set_title("P@1 on the test set")
            draw_accuracy(axes, runs, height_in=0.7 * height)
        else:
            axes.set_title("Training loss of each round")
            draw_loss(axes, runs, height_in=0.7 * height)
        if adaptive:
            panels = columns[1].subgridspec(len(adaptive), 1)
            for number, run in enumerate(adaptive):
                axes = figure.add_subplot(panels[number])
                samples = run.by_rank("samples")
                assert samples is not None
                draw_by_rank(axes, run, samples, height_in=0.7 * height / len(adaptive))
                axes.set_title(f"Samples a round: {shorten(run.label)}")
                if number < len(adaptive) - 1:
                    axes.set_xlabel("")
        width = 90 if adaptive else 55
        title = "\n".join(textwrap.wrap(describe_ranks(runs), width))
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=150, format="png", facecolor="white")


def describe_ranks(runs: Sequence[Run]) -> str:
    """Returns the number of ranks and the emulated slowdowns in words."""
    sizes = {run.num_ranks for run in runs}
    size = sizes.pop() if len(sizes) == 1 else None
    ranks = "" if size is None else f"{size} rank{'s' if size > 1 else ''}"
    slowed = {run.slowdown for run in runs}
    if slowed == {""}:
        return ranks
    if len(slowed) == 1:
        return f"{ranks + ', ' if ranks else ''}emulated slowdowns {slowed.pop()}"
    parts = [f"{run.label}: {run.slowdown or 'none'}" for run in runs]
    return f"{ranks + ', ' if ranks else ''}emulated slowdowns ({'; '.join(parts)})"


@contextmanager
def _drawn(chart: Chart) -> Iterator[Figure]:
    with _quiet_pictures():
        figure = new_figure(WIDTH_IN, chart.height_in)
        chart.draw(figure.add_subplot())
        yield figure


@contextmanager
def _quiet_pictures() -> Iterator[None]:
    with pictures(), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is drawn as boxes in a PNG, and by the reader's fonts in a page.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _themed(match: re.Match[str]) -> str:
    name = CSS_VARIABLES.get(match.group())
    return f"var(--{name})" if name else match.group()
