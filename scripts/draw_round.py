#!/usr/bin/env python
"""Draws docs/round.svg, the picture of one round in docs/how-it-works.md.

python scripts/draw_round.py
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "round.svg"
# Samples a second of each rank, relative; a batch takes 1 / speed.
_SPEEDS = (1, 1, 2, 4)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_LEFT, _RIGHT, _TOP, _LANE = 118, 640, 128, 40
_NUM_BATCHES = 24
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 400" role="img" aria-labelledby="t d" font-family="sans-serif"
 font-size="14">
<title id="t">One round of strategy local</title>
<desc id="d">Four ranks of unequal speed take batches from one shared queue until the mega-batch is used up: the fast rank
computes four times as many as each slow one, and all end together. Then they exchange statistics, derive the same weights, and
add their weighted and encoded deltas to the global model, which is the same on every rank.</desc>
<style>
text { fill: #24292f } .soft { fill: #57606a } .line { stroke: #57606a; fill: none } .box { fill: #f6f8fa; stroke: #8c959f }
.step { fill: #24292f } .number { fill: #ffffff; font-weight: bold; text-anchor: middle }
@media (prefers-color-scheme: dark) {
text { fill: #e3e7eb } .soft { fill: #a4adb7 } .line { stroke: #a4adb7 } .box { fill: #1c2229; stroke: #6b7580 }
.step { fill: #e3e7eb } .number { fill: #14181d } }
</style>"""


def render() -> str:
    """Returns the picture as SVG."""
    claims = _claims()
    end = max(stop for _, _, stop in claims)
    scale = (_RIGHT - _LEFT) / end
    parts = [_HEAD]
    cell = (_RIGHT - _LEFT) / len(claims)
    parts.append(f'<text x="{_LEFT}" y="26">the mega-batch: one round\'s samples, handed out from left to right</text>')
    for number, (rank, start, stop) in enumerate(claims):
        parts.append(_rect(_LEFT + number * cell, 36, cell - 1.5, 24, _COLOURS[rank]))
        y = _TOP + _LANE * rank
        parts.append(_rect(_LEFT + start * scale, y, (stop - start) * scale - 2, 26, _COLOURS[rank]))
    parts.append('<text class="soft" x="10" y="53">queue</text>')
    for rank, speed in enumerate(_SPEEDS):
        y = _TOP + _LANE * rank + 18
        parts.append(f'<text x="10" y="{y}">rank {rank} <tspan class="soft">{speed}x</tspan></text>')
        parts.append(f'<path class="line" d="M{_RIGHT + 36} {y - 5} h26"/>')
        parts.append(_rect(_RIGHT + 64, y - 14 + 4, 16, 10, _COLOURS[rank]))
        parts.append(f'<path class="line" d="M{_RIGHT + 82} {y - 5} L{_RIGHT + 124} {_TOP + 73}"/>')
    parts.append(f'<rect class="box" x="{_RIGHT + 10}" y="{_TOP - 8}" width="24" height="{4 * _LANE + 2}" rx="4"/>')
    middle = _TOP + 73
    parts.append(
        f'<text transform="translate({_RIGHT + 27} {middle}) rotate(-90)" text-anchor="middle" font-size="13">statistics</text>'
    )
    parts.append(f'<rect class="box" x="{_RIGHT + 126}" y="{middle - 36}" width="176" height="72" rx="8"/>')
    parts.append(f'<text x="{_RIGHT + 214}" y="{middle - 4}" text-anchor="middle">global model</text>')
    parts.append(
        f'<text class="soft" x="{_RIGHT + 214}" y="{middle + 16}" text-anchor="middle" font-size="13">same bits everywhere</text>'
    )
    above = _TOP - 24
    places = ((_LEFT - 14, 48), (_LEFT - 14, _TOP + 13), (_RIGHT + 22, above), (_RIGHT + 72, above), (_RIGHT + 214, above))
    parts += [_number(x, y, number) for number, (x, y) in enumerate(places, 1)]
    steps = (
        "Whoever is free claims the next batch from a shared counter, and loads it while the one before computes.",
        "Each rank trains on its own replica. The last claims are cut by the ranks' speeds, so that all end together.",
        "One small exchange: updates, samples, seconds. Every rank derives the same weights from it.",
        "Each rank's delta from the global model, weighted and perhaps compressed, goes over the wire once.",
        "The sum moves the global model by the outer step; batch sizes and learning rates follow for the next round.",
    )
    for number, text in enumerate(steps, 1):
        y = 312 + 20 * (number - 1)
        parts += [_number(18, y - 5, number), f'<text x="36" y="{y}" font-size="13.5">{text}</text>']
    return "\n".join([*parts, "</svg>"]) + "\n"


def _claims() -> list[tuple[int, float, float]]:
    """Rank, start and end of each batch: whoever is free first takes the next."""
    free = [0.0] * len(_SPEEDS)
    claims = []
    for _ in range(_NUM_BATCHES):
        rank = min(range(len(free)), key=lambda r: (free[r], -_SPEEDS[r]))
        start = free[rank]
        free[rank] += 1 / _SPEEDS[rank]
        claims.append((rank, start, free[rank]))
    return claims


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2" fill="{colour}"/>'


def _number(x: float, y: float, number: int) -> str:
    circle = f'<circle class="step" cx="{x}" cy="{y}" r="9"/>'
    return f'{circle}<text class="number" x="{x}" y="{y + 4.5}" font-size="12">{number}</text>'


if __name__ == "__main__":
    PICTURE.write_text(render(), encoding="utf-8")
