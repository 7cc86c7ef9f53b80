"""From measured steps and merges to batch-size bounds and a mega-batch, and the speed that they give."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hvd_adaptive.algorithm.merge_period import LEAST_MERGES_AN_EPOCH, least_mega_batch
from hvd_adaptive.algorithm.statistics import Array
from hvd_adaptive.calibrate.file import MEMORY_PART

# At the smallest batch a step's fixed part takes at most half of it, at the largest a tenth is all that could be won.
_LEAST_EFFICIENCY = 0.5
_ENOUGH_EFFICIENCY = 0.9
# The paper's b_min is b_max / 8; the sum of sizes stays with 'proportional', whose bound is 8 x batch_size.
_ROOM = 8


@dataclass(slots=True)
class Recommendation:
    """Options for a run, and what should be said about them.

    Attributes:
        batch_size: samples; the given one, unless it does not fit into memory.
        min_batch_size: samples.
        max_batch_size: samples.
        mega_batch: samples between two merges.
        micro_batch_size: samples of each forward pass; None: whole batches.
        notes: sentences for people.
    """

    batch_size: int
    min_batch_size: int
    max_batch_size: int
    mega_batch: int = 0
    micro_batch_size: int | None = None
    notes: list[str] = field(default_factory=list)


def recommend_batches(
    *,
    batch_size: int,
    fixed_s: Array,
    sample_s: Array,
    largest: Array,
    dataset_size: int,
    may_cut: bool = False,
    min_batch_size: int | None = None,
    max_batch_size: int | None = None,
) -> Recommendation:
    """Chooses the bounds of the batch sizes, and micro-batches where a batch does not fit into memory.

    Whole batches take least time: each further pass costs what every step costs. So there are micro-batches only for memory, the
    largest that fit. Without them, the batch gets smaller.

    Steps under ``min_batch_size`` would spend more than half of their time on what every step costs, on some rank; above
    ``max_batch_size`` no rank would gain a tenth. Both keep to 8 x around the batch size, as the rules do. A bound that is given
    stays, unless memory forbids it, which a note says.

    Args:
        batch_size: the one that the learning rate belongs to.
        fixed_s: seconds that each rank's step costs, shape (world_size,), >= 0.
        sample_s: seconds of each further sample, shape (world_size,), > 0.
        largest: samples that each rank's memory allows, infinite where that is not known, shape (world_size,).
        dataset_size: number of training samples.
        may_cut: the other options allow micro-batches.
        min_batch_size: the given one, <= batch_size; None: to be chosen.
        max_batch_size: the given one, >= batch_size; None: to be chosen.

    Raises:
        ValueError: if one sample does not fit on some rank.
    """
    room = MEMORY_PART * float(largest.min())
    if room < 1:
        raise ValueError(f"rank {int(largest.argmin())} has no memory for a batch of one sample: use a smaller model")
    notes = []
    size = batch_size
    why = f"rank {int(largest.argmin())} has memory for {largest.min():.0f} samples"
    if room < size:
        micro = max(part for part in range(1, int(room) + 1) if size % part == 0)
        if may_cut and micro * _ROOM >= size:
            now, then = (float((fixed_s + sample_s * part).max()) / part for part in (micro, size))
            notes.append(
                f"micro_batch_size is {micro}: {why}. A step of batch_size {size} adds up the gradients of {size // micro} "
                f"micro-batches, the same update; steps take up to {now / then:.2f} times as long"
            )
            return Recommendation(size, size, size, micro_batch_size=micro, notes=notes)
        size = int(room)
        notes.append(f"batch_size is {size} instead of {batch_size}: {why}")
    half = float((fixed_s / sample_s).max()) * _LEAST_EFFICIENCY / (1 - _LEAST_EFFICIENCY)
    enough = float((fixed_s / sample_s).max()) * _ENOUGH_EFFICIENCY / (1 - _ENOUGH_EFFICIENCY)
    low = int(np.clip(np.ceil(half - 1e-6), max(1, size // _ROOM), size))
    high = int(min(np.clip(np.ceil(enough - 1e-6), size, _ROOM * size), max(room, size), max(dataset_size, size)))
    if min_batch_size is not None:
        low = min(min_batch_size, size)
    if max_batch_size is not None:
        high = int(min(max_batch_size, max(room, size)))
    for name, given, bound in (("min_batch_size", min_batch_size, low), ("max_batch_size", max_batch_size, high)):
        if given is not None and bound < given:
            notes.append(f"{name} is {bound} instead of {given}: {why}")
    efficiency = sample_s * size / (fixed_s + sample_s * size)
    slowest = int(efficiency.argmin())
    if efficiency[slowest] < _LEAST_EFFICIENCY and high > size:
        now, then = (fixed_s[slowest] / size + sample_s[slowest] for size in (size, high))
        notes.append(
            f"at batch_size {size} what every step costs is {1 - efficiency[slowest]:.0%} of rank {slowest}'s time: batches of "
            f"{high} would be {now / then:.1f} times as fast there, at a learning rate of their own"
        )
    return Recommendation(size, low, high, notes=notes)


def recommend_mega_batch(
    *, batch_size: int, least: int, communication_s: float, samples_per_s: float, share: float, dataset_size: int
) -> tuple[int, str | None]:
    """Chooses the samples between two merges: whole batches, as few as keep communication within its share of the time.

    Args:
        batch_size: samples.
        least: samples that a round shall have in any case.
        communication_s: seconds of a round's merge and control.
        samples_per_s: of all ranks between merges.
        share: the part of the time that communication may take, in (0, 1).
        dataset_size: number of training samples; a round has at most a quarter of them, or ``least``.

    Returns:
        The mega-batch, and a sentence where it cannot be long enough.
    """
    wanted = max(least_mega_batch(communication_s, 1 / samples_per_s, share=share), least)
    most = max(dataset_size // LEAST_MERGES_AN_EPOCH // batch_size * batch_size, least)
    chosen = int(np.ceil(min(wanted, most) / batch_size)) * batch_size
    taken = communication_s / (communication_s + chosen / samples_per_s)
    # What is printed in whole percent is above the share, then.
    if wanted <= most or taken < 1.25 * share:
        return chosen, None
    return chosen, (
        f"merges take {taken:.0%} of the time even in rounds of a quarter of the data: a faster link, --compression or a "
        "smaller model makes them shorter"
    )


def predict(*, step_s: Array, batch_size: int, mega_batch: int, merge_s: float, control_s: float, wait_s: float) -> float:
    """Returns the samples a second of dynamic dispatch with equal batch sizes.

    Args:
        step_s: seconds of each rank's step and claim at the batch size, all ranks at work, shape (world_size,), > 0.
        batch_size: samples.
        mega_batch: samples of a round.
        merge_s: seconds of its merge.
        control_s: seconds of its statistics and weights.
        wait_s: mean seconds that ranks wait for the last one.
    """
    samples_per_s = float((batch_size / step_s).sum())
    return mega_batch / (mega_batch / samples_per_s + merge_s + control_s + wait_s)


def predict_fragments(
    *, step_s: Array, batch_size: int, mega_batch: int, exchange_s: float, rest_s: float, control_s: float, wait_s: float
) -> float:
    """Returns the samples a second where merges go in fragments beside the steps: a round takes as long as its steps or its
    exchange, and then what cannot go beside.

    Args:
        step_s: seconds of each rank's step and claim at the batch size, all ranks at work, shape (world_size,), > 0.
        batch_size: samples.
        mega_batch: samples of a round.
        exchange_s: seconds in which all fragments of a round cross the link.
        rest_s: seconds of the merges' other work.
        control_s: seconds of a round's statistics and weights.
        wait_s: mean seconds that ranks wait for the last one.
    """
    compute_s = mega_batch / float((batch_size / step_s).sum())
    return mega_batch / (max(compute_s, exchange_s) + rest_s + control_s + wait_s)
