"""Which way to train is predicted to reach a loss first, of those that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from hvd_adaptive.algorithm.fragments import cut_layers
from hvd_adaptive.calibrate.file import BY_CHOICE, LOCAL_ONLY, Choice
from hvd_adaptive.calibrate.recommend import Recommendation
from hvd_adaptive.config import Config

# Samples to a loss over plain Horovod's. `local`: 1.0 to 1.4 on the embedded set (benchmarks/records/2026-11-23-defaults.md),
# 1.02 on a language model (2026-11-23-fragments.md). Codes of 4 bits with residuals cost none that was seen.
SAMPLES_TO_A_LOSS = {"local": 1.2, "sync": 1.0, "horovod": 1.0}
# What merging in so many fragments needs over whole merges: 0.032 and 0.059 behind in loss at equal samples, where a loss of
# 0.108 took 1.25 times the samples (2026-11-23-fragments.md).
FRAGMENTS = {4: 1.07, 2: 1.13}
# Tried where the exchange takes this part of the time or more.
SLOW_EXCHANGE = 0.1
# Less than this is not worth another option: seconds scatter.
_LEAST_GAIN = 1.1


def samples_to_a_loss(choice: Choice) -> float:
    """Returns the samples that a choice needs to a loss, over plain Horovod's."""
    return SAMPLES_TO_A_LOSS[choice.strategy] * FRAGMENTS.get(choice.merge_fragments, 1.0)


def relative_time(choice: Choice) -> float:
    """Returns the predicted time to a loss, in units that compare between choices."""
    return samples_to_a_loss(choice) / choice.samples_per_s


def most_fragments(names: Sequence[str], sizes: Sequence[int]) -> int | None:
    """Returns the most fragments, of those whose loss was measured, into which a model can be cut; None: it has one layer.

    Args:
        names: of the parameters, in the model's order.
        sizes: their elements.
    """
    for number in FRAGMENTS:
        try:
            cut_layers(names, sizes, number)
        except ValueError:
            continue
        return number
    return None


def may_choose(config: Config, given: Collection[str], strategy: str, compression: str, merge_fragments: int = 1) -> bool:
    """Returns whether ``train`` would take another way to train beside the options that it gets.

    Args:
        config: as it was given.
        given: names of the options that were chosen by hand; where strategy, compression or merge_fragments is among them, all
            of them stay.
        strategy: of the choice.
        compression: likewise.
        merge_fragments: likewise.
    """
    if config.encodes or config.merge_fragments != 1 or not BY_CHOICE.isdisjoint(given):
        return False
    try:
        dataclasses.replace(config, strategy=strategy, compression=compression, merge_fragments=merge_fragments)
    except ValueError:
        # An option that was given needs another one.
        return False
    return True


def may_cut(config: Config) -> bool:
    """Returns whether the options allow micro-batches, about which they say nothing themselves."""
    try:
        dataclasses.replace(config, micro_batch_size=1)
    except ValueError:
        return False
    return config.micro_batch_size is None and config.min_batch_size is None and config.max_batch_size is None


def given_bounds(config: Config) -> list[str]:
    """Returns the names of the bounds of batch sizes that the options set."""
    return [name for name in LOCAL_ONLY if getattr(config, name) is not None]


def settled(config: Config, chosen: Recommendation) -> Config:
    """Returns the options with a batch that fits into memory, as ``train`` will get them."""
    if chosen.micro_batch_size is not None:
        return dataclasses.replace(config, micro_batch_size=chosen.micro_batch_size)
    if chosen.batch_size == config.batch_size:
        return config
    return dataclasses.replace(
        config,
        batch_size=chosen.batch_size,
        min_batch_size=chosen.min_batch_size,
        max_batch_size=chosen.max_batch_size,
        reference_batch_size=config.reference_batch_size or config.batch_size,
    )


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


def name_of(choice: Choice) -> str:
    """Returns a choice in a few words."""
    parts = [choice.strategy]
    if choice.compression != "none":
        parts.append(choice.compression)
    if choice.merge_fragments > 1:
        parts.append(f"{choice.merge_fragments} fragments")
    if choice.micro_batch_size is not None:
        parts.append(f"micro-batches of {choice.micro_batch_size}")
    return ", ".join(parts)


def table(choices: Iterable[Choice], chosen: Choice) -> list[str]:
    """Returns lines for people: each choice with its period, its speed, its samples to a loss, and its time over the chosen
    one's. What was computed and not tried has a mark."""
    names = [(one, name_of(one)) for one in choices]
    width = max(28, *(len(name) for _, name in names))
    lines = [f"{'choice':<{width}} {'period':>7} {'samples/s':>10}  {'samples to a loss':>17}  {'time':>5}"]
    for one, name in names:
        period = f"{one.mega_batch}" if one.strategy == "local" else "-"
        speed = f"{'~' if one.source == 'computed' else ''}{one.samples_per_s:,.0f}"
        time = relative_time(one) / relative_time(chosen)
        mark = "  <- chosen" if one is chosen else ""
        lines.append(f"{name:<{width}} {period:>7} {speed:>10}  {samples_to_a_loss(one):>16.2f}x  {time:>5.2f}{mark}")
    if any(one.source == "computed" for one, _ in names):
        lines.append("~ computed from the steps and merges above and the link, and not tried: it would not be first")
    return lines
