"""How pictures look: colours that colour-blind readers can tell apart, and labels at the ends of lines instead of legends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#333333"
EDGE = "#999999"
FAINT = "#888888"
GRID = "#e5e5e5"
PAPER = "#fffffe"
# Okabe and Ito's palette, distinguishable with every common colour blindness; its yellow is too faint for lines.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# After the last colour lines are dashed.
DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))
TIME_COLOURS = {
    "compute": "#009e73",
    "claim": "#56b4e9",
    "wait": "#d55e00",
    "merge": "#0072b2",
    "control": "#cc79a7",
    "checkpoint": "#e69f00",
    "other": "#bbbbbb",
}
# What a page's style sheet calls them, so that a picture in the page follows its light or dark colours.
CSS_VARIABLES = {
    INK: "ink",
    EDGE: "edge",
    FAINT: "faint",
    GRID: "grid",
    PAPER: "paper",
    "#bbbbbb": "rest",
    **{colour: f"c{number}" for number, colour in enumerate(PALETTE)},
}

_RC: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.edgecolor": EDGE,
    "axes.labelcolor": INK,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2.0,
    "text.parse_math": False,  # a run's name may hold dollars
    "svg.fonttype": "none",
    "svg.hashsalt": "hvd-adaptive",
}
_LEADER: Any = {
    "arrowstyle": "-",
    "linewidth": 0.7,
    "alpha": 0.6,
    "relpos": (0, 0.5),
    "shrinkA": 1,
    "shrinkB": 1,
}


@contextmanager
def pictures() -> Iterator[None]:
    """Draws in this project's style within the block.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise RuntimeError("pictures need matplotlib: pip install matplotlib") from error
    with rc_context(_RC):
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """Returns an empty figure of this size in inches, which belongs to no window; within :func:`pictures`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    return figure


def colour(number: int) -> str:
    """Returns the colour of the line with this number."""
    return PALETTE[number % len(PALETTE)]


def dashes(number: int) -> Any:
    """Returns the line style of the line with this number: with the colour, different for 21 lines."""
    return DASHES[number // len(PALETTE) % len(DASHES)]


def shorten(text: str, width: int = 22) -> str:
    """Returns the text, cut in its middle to this many characters."""
    if len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def few_seconds(value: float) -> str:
    """1234.5 -> "1,234", 1.23 -> "1.2": of few seconds the tenths count."""
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def join_numbers(numbers: Sequence[int]) -> str:
    """1, 2, 3, 5 -> "1-3, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], *, height_in: float) -> None:
    """Writes (x, y, text, colour) at the right edge, moved apart where lines end close to each other.

    Args:
        axes: what the lines are in.
        ends: the last point of each line.
        height_in: height of the axes, inches.
    """
    if not ends:
        return
    low, high = axes.get_ylim()
    line_height_points = 14
    gap = (high - low) * line_height_points / (72 * height_in)
    ordered = sorted(ends, key=lambda end: end[1])
    places: list[float] = []
    for _, y, _, _ in ordered:
        places.append(y if not places else max(y, places[-1] + gap))
    overflow = places[-1] - high
    if overflow > 0:
        # Only those that are pushed, from the top down.
        places[-1] = high
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    for place, (x, y, text, ink) in zip(places, ordered, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(1.015, place),
            textcoords=("axes fraction", "data"),
            color=ink,
            va="center",
            annotation_clip=False,
            fontweight="bold",
            arrowprops={**_LEADER, "color": ink},
        )
