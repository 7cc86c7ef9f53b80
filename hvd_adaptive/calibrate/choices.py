"""Which way to train is predicted to reach a loss first, of those that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from hvd_adaptive.calibrate.file import Choice
from hvd_adaptive.config import Config

# Samples to a loss over plain Horovod's. `local`: 1.0 to 1.4 on the embedded set (benchmarks/records/2026-11-23-defaults.md),
# 1.02 on a language model (2026-11-23-fragments.md). Codes of 4 bits with residuals cost none that was seen.
SAMPLES_TO_A_LOSS = {"local": 1.2, "sync": 1.0, "horovod": 1.0}
# Tried where the exchange takes this part of the time or more.
SLOW_EXCHANGE = 0.1
SLOW_LINK_CODEC = "maxmin:4"
# Less than this is not worth another option: seconds scatter.
_LEAST_GAIN = 1.1


def relative_time(choice: Choice) -> float:
    """Returns the predicted time to a loss, in units that compare between choices."""
    return SAMPLES_TO_A_LOSS[choice.strategy] / choice.samples_per_s


def may_choose(config: Config, given: Collection[str], strategy: str, compression: str) -> bool:
    """Returns whether ``train`` would take another strategy or compression beside the options that it gets.

    Args:
        config: as it was given.
        given: names of the options that were chosen by hand; where strategy or compression is among them, both stay.
        strategy: of the choice.
        compression: likewise.
    """
    if config.compression != "none" or not {"strategy", "compression"}.isdisjoint(given):
        return False
    try:
        dataclasses.replace(config, strategy=strategy, compression=compression)
    except ValueError:
        # An option that was given needs another one.
        return False
    return True


def choose(choices: Sequence[Choice]) -> Choice:
    """Returns the first choice, unless another one is predicted to be at least a tenth sooner. Plain Horovod is never chosen:
    ``sync`` does the same updates.

    Args:
        choices: at least one; the first has the options as they were given.
    """
    first = choices[0]
    ours = [choice for choice in choices if choice.strategy != "horovod"]
    best = min(ours, key=relative_time)
    return best if relative_time(best) * _LEAST_GAIN <= relative_time(first) else first


def table(choices: Iterable[Choice], chosen: Choice) -> list[str]:
    """Returns lines for people: each choice with its speed, its samples to a loss, and its time over the chosen one's."""
    lines = [f"{'choice':<28} {'samples/s':>10}  {'samples to a loss':>17}  {'time':>5}"]
    for one in choices:
        name = one.strategy if one.compression == "none" else f"{one.strategy}, {one.compression}"
        mark = "  <- chosen" if one is chosen else ""
        time = relative_time(one) / relative_time(chosen)
        lines.append(f"{name:<28} {one.samples_per_s:>10,.0f}  {SAMPLES_TO_A_LOSS[one.strategy]:>16.1f}x  {time:>5.2f}{mark}")
    return lines
