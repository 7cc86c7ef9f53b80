"""The picture of simulated strategies over numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_adaptive.report.style import colour, new_figure, pictures


def plot_scaling(outcomes: Mapping[str, Sequence[Mapping[str, float]]], path: Path, *, title: str) -> None:
    """Draws utilisation, share of communication and rounds a second over the number of ranks into a PNG.

    Args:
        outcomes: by strategy, one mapping a number of ranks with ``ranks``, ``utilisation``, ``communication_share`` and
            ``rounds_per_s``.
        path: the file to write; its folder must exist.
        title: above the picture.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    panels = (
        ("utilisation", "Utilisation"),
        ("communication_share", "Share of time in communication"),
        ("rounds_per_s", "Rounds a second"),
    )
    with pictures():
        figure = new_figure(12, 4.2)
        for axes, (name, text) in zip(figure.subplots(1, 3), panels, strict=True):
            axes.set_title(text)
            axes.set_xlabel("ranks")
            axes.set_xscale("log", base=2)
            for number, (strategy, rows) in enumerate(outcomes.items()):
                axes.plot(
                    [row["ranks"] for row in rows],
                    [row[name] for row in rows],
                    color=colour(number),
                    marker="osD^vX*"[number % 7],
                    markersize=4,
                    label=strategy,
                )
            ranks = sorted({row["ranks"] for rows in outcomes.values() for row in rows})
            axes.set_xticks(ranks[:: max(1, -(-len(ranks) // 7))], minor=False)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
            axes.minorticks_off()
            if name == "rounds_per_s":
                axes.set_yscale("log")
            else:
                axes.set_ylim(0, 1.02)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=150, format="png", facecolor="white")
