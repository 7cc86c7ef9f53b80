"""How many times as long as the best the steps of `sync` are under the shares that it chooses, in virtual time.

    python benchmarks/share_control.py [--seeds 3] [--steps 1200] [--record FILE]

A rank's step takes (a + c x samples) x noise; a step of all ranks as long as the longest without noise, over that with the best
shares. Noise is lognormal with the given jitter, and a small part of it lasts for some steps; in the first 2 to 11 steps each
rank is slower or faster by chance; in some cases 3% of a rank's steps take 1 to 4 times as long, or speeds wander. Another
version's shares: the same command with its path in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
from recording import header, publish

from hvd_adaptive.algorithm.share_balance import Array
from hvd_adaptive.algorithm.share_control import ShareControl
from hvd_adaptive.config import Config

SAMPLES = 64
KINDS = ("equal", "1:2", "1:1:2:4", "one slow", "random")
COLUMNS = ("steps 1-50", "51-300", "from 301", "95% of them below", "moves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1200, help="more than 300 (default: 1200)")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.steps <= 300:
        parser.error(f"--steps must be more than 300, got {options.steps}: the table has columns up to 300 and from 301 on")
    cases, rows = [], []
    parts, booleans = (0.0, 0.3, 0.6), (False, True)
    for case in itertools.product((2, 4, 16), KINDS, parts, (0.1, 0.3, 0.6), (0.0, 0.003), booleans, booleans):
        num_ranks, kind, fixed, jitter, drift, scales, tail = case
        same_as_another = not scales and (fixed == 0 or kind == "equal")
        if same_as_another or (num_ranks == 2 and kind == "1:1:2:4") or (tail and (drift or not scales)):
            continue
        cases.append(case)
        rows.append(np.mean([
            play(slowness(kind, num_ranks, seed), fixed, jitter, drift, scales, tail, seed=seed, num_steps=options.steps)
            for seed in range(options.seeds)
        ], axis=0))  # fmt: skip
    table = np.array(rows)
    lines = [
        *header("Steps of sync over those with the best shares", f"Mean of {len(cases)} cases, {options.seeds} seeds each."),
        f"| cases | {' | '.join(COLUMNS)} |",
        "| --- " * (1 + len(COLUMNS)) + "|",
        line("all", table),
    ]
    names = ("ranks", "speeds", "fixed part of an equal step", "jitter")
    for place, name in enumerate(names):
        for value in dict.fromkeys(case[place] for case in cases):
            lines.append(line(f"{name}: {value}", table[[case[place] == value for case in cases]]))
    publish(lines, options.record)


def line(name: str, rows: Array) -> str:
    mean = rows.mean(axis=0)
    return f"| {name} | {' | '.join(f'{value:.3f}' for value in mean[:-1])} | {mean[-1]:.1f} |"


def slowness(kind: str, num_ranks: int, seed: int) -> Array:
    """Returns each rank's seconds for an equal share, without the fixed part, shape (num_ranks,)."""
    place = np.arange(num_ranks)
    return {
        "equal": np.ones(num_ranks),
        "1:2": np.where(place % 2, 1.0, 2.0),
        "1:1:2:4": np.array([8.0, 8, 4, 2])[place % 4],
        "one slow": np.where(place == 0, 3.0, 1.0),
        "random": np.exp(0.4 * np.random.default_rng(1000 + seed).standard_normal(num_ranks)),
    }[kind]


def play(
    slow: Array, fixed_part: float, jitter: float, drift: float, scales: bool, tail: bool, *, seed: int, num_steps: int
) -> list[float]:
    """Plays a run; returns the values of COLUMNS.

    Args:
        slow: as from :func:`slowness`.
        fixed_part: of an equal step.
        jitter: relative standard deviation of a step.
        drift: of a rank's speed, a step.
        scales: slow ranks have a longer fixed part as well, else all have the same.
        tail: some steps are held up.
        seed: of the noise.
        num_steps: to play.
    """
    count, total = len(slow), len(slow) * SAMPLES
    generator = np.random.default_rng(seed)
    per_sample = slow / SAMPLES
    fixed = (slow if scales else np.full(count, np.median(slow))) * fixed_part / (1 - fixed_part)
    start, num_start, lasting = np.exp(0.3 * generator.standard_normal(count)), int(generator.integers(2, 12)), np.zeros(count)
    control = ShareControl(Config(strategy="sync", global_batch_size=total), count, global_batch_size=total, smallest=1)
    costs, moves, best = np.empty(num_steps), 0, 0.0
    for step in range(num_steps):
        shares = np.array(control.shares_at(step), dtype=float)
        if drift:
            change = np.exp(drift * generator.standard_normal(count))
            fixed, per_sample = fixed * change, per_sample * change
        if step % (10 if drift else num_steps) == 0:
            best = best_seconds(fixed, per_sample, total)
        seconds = fixed + per_sample * shares
        costs[step] = seconds.max() / best
        noise = np.exp(jitter * generator.standard_normal(count))
        lasting = 0.9 * lasting + 0.44 * 0.3 * jitter * generator.standard_normal(count)
        noise *= np.exp(lasting) * (start if step < num_start else 1.0)
        if tail:
            noise *= np.where(generator.random(count) < 0.03, 1 + 3 * generator.random(count), 1)
        window = control.count(shares, seconds * noise)
        if window is not None:
            before = control.whole
            control.observe(window, step=step)
            moves += not np.array_equal(before, control.whole)
    late = costs[300:]
    return [costs[:50].mean(), costs[50:300].mean(), late.mean(), np.quantile(late, 0.95), moves]


def best_seconds(fixed: Array, per_sample: Array, total: float) -> float:
    """Returns the seconds of a step with the best shares of at least one sample, by bisection."""
    low, high = 0.0, float((fixed + per_sample * total).max())
    for _ in range(60):
        middle = (low + high) / 2
        enough = np.maximum((middle - fixed) / per_sample, 1).sum() >= total
        low, high = (low, middle) if enough else (middle, high)
    return high


if __name__ == "__main__":
    main()
