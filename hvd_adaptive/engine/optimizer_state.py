"""What becomes of a rank's optimizer state after a merge."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import ASGD, LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam

from hvd_adaptive.combinations import goes_with_dual_averaging
from hvd_adaptive.comm.protocols import AgreedError, Collectives
from hvd_adaptive.config import Config
from hvd_adaptive.engine.dual_averaging import has_accumulators
from hvd_adaptive.engine.optimizers import LazyMomentum, RowwiseAdagrad
from hvd_adaptive.engine.shards import local, zeros

# State that is no farther from the parameters than this part of their norm is a copy of them.
_NEAR = 0.3
# Of the time, averages of Adam's moments take so much at most.
_PART_OF_TIME = 0.05
# Of a state that is averaged: what is copied and summed at a time, so that large models need no second copy of theirs.
_ELEMENTS_AT_ONCE = 1 << 24


def rule(config: Config, optimizer: Optimizer) -> str:
    """Returns what becomes of the state after a merge: ``config.optimizer_state``, or its default.

    Accumulators that only grow (Adagrad) are averaged: kept, a row's first step on each rank would be a full one. So are the
    moments of Adam and its kin, which have less noise together: benchmarks/records/2026-11-30-moments.md. What is as large as the
    model is kept beside a compressed exchange or fragments, and so is the state of other optimizers, as in DiLoCo. Dual averaging
    sums the accumulators itself. LBFGS begins again: its state is differences to a model that the merge has moved.
    """
    if config.weight_rule == "dual-averaging":
        return "sum"
    if config.optimizer_state is not None:
        return config.optimizer_state
    if isinstance(optimizer, LBFGS):
        return "reset"
    averages = _exchanges_accumulators(config, optimizer) or (learns_from_short_rounds(config, optimizer) and not config.encodes)
    return "average" if config.logical_ranks is None and averages else "keep"


class AverageLimit:
    """Lets averages of Adam's moments take a part of the time, beside rounds whose length follows what merges take: rounds that
    are longer for these averages lose more than they gain."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, -math.inf

    @classmethod
    def of(cls, config: Config, optimizer: Optimizer) -> AverageLimit | None:
        """Returns the limit of a configuration; None: each merge averages, as where runs repeat and where it was set."""
        is_set = config.optimizer_state is not None or config.merge_period != "auto" or config.repeatable
        return None if is_set or not is_adam(optimizer) else cls()

    def is_due(self) -> bool:
        """Whether this rank may spend the time again."""
        return time.perf_counter() - self._last >= self._seconds / _PART_OF_TIME

    def took(self, seconds: float) -> float:
        """Takes note of an average that has just ended, and of its seconds, which it returns."""
        self._seconds, self._last = seconds, time.perf_counter()
        return seconds


def learns_from_short_rounds(config: Config, optimizer: Optimizer) -> bool:
    """Returns whether frequent merges are worth their time where no period is set: with dense Adam and its kin.

    Merges beside later steps are as old as a round is long, whatever that is, and logical ranks follow no clock.
    """
    return is_adam(optimizer) and config.merge_fragments == 1 and config.logical_ranks is None


def is_adam(optimizer: Optimizer) -> bool:
    """Returns whether it is torch's Adam or one of its kin."""
    return isinstance(optimizer, (Adam, AdamW, NAdam, RAdam))


def _exchanges_accumulators(config: Config, optimizer: Optimizer) -> bool:
    """Whether exchanging the optimizer's accumulators costs little: they are few, or nothing else is compressed."""
    return isinstance(optimizer, RowwiseAdagrad) or (isinstance(optimizer, Adagrad) and not config.encodes)


def with_defaults(
    config: Config, optimizer: Optimizer, parameters: Iterable[Tensor], *, world_size: int = 1, rare_labels: bool = False
) -> Config:
    """Returns the configuration with what follows from the optimizer where it is not set: merge weights, the learning rate's rule
    and the outer step.

    Merges go by updates. Where labels are rare, Adagrad's go by dual averaging, others' by gradient mass.

    The learning rate of SGD, with momentum or without, follows the batch size linearly. That of other optimizers stays: they
    divide a gradient by its usual size, so their steps do not grow with the batch's.

    Dense Adam and its kin on several ranks get the cautious outer step. Others get none: it makes steps several times as long, so
    SGD may diverge at its best rates, and adaptive optimizers take as long steps on rare rows as on others.

    Args:
        config: the rules.
        optimizer: the ranks' own.
        parameters: that are merged.
        world_size: number of ranks.
        rare_labels: a label occurs on one rank at most between most merges.

    Raises:
        AgreedError: on all ranks, for dual averaging or an average of states with an optimizer that cannot, or options of an
            outer step where there is none.
    """
    # Every rank has the same options and optimizer, so every rank raises.
    if config.optimizer_state == "average" and isinstance(optimizer, LBFGS):
        raise AgreedError("optimizer_state 'average' cannot average LBFGS's history: leave it out, or choose 'reset'")
    known = {id(p) for p in _parameters(optimizer)}
    fits = has_accumulators(optimizer) and all(id(p) in known for p in parameters)
    if config.merge_weights == "dual-averaging" and not fits:
        what = type(optimizer).__name__ if not has_accumulators(optimizer) else "an optimizer of a part of the parameters"
        raise AgreedError(
            f"merge_weights 'dual-averaging' needs an optimizer with accumulators (Adagrad, RowwiseAdagrad), got {what}: choose "
            "such an optimizer, or other merge_weights"
        )
    if config.merge_weights == "auto":
        can = fits and _exchanges_accumulators(config, optimizer) and goes_with_dual_averaging(config)
        for_rare = "dual-averaging" if can else "fisher-rows"
        # Fragments and islands have one weight a rank.
        by_rows = rare_labels and config.island is None and config.merge_fragments == 1 and not config.merges_beside_steps
        config = dataclasses.replace(config, merge_weights=for_rare if by_rows else "updates")
    is_sgd = isinstance(optimizer, (SGD, LazyMomentum))
    if config.lr_rule == "auto":
        config = dataclasses.replace(config, lr_rule="linear" if is_sgd else "none")
    if config.outer_step is None:
        is_set = config.outer_lr is not None or config.outer_momentum is not None
        adapts = learns_from_short_rounds(config, optimizer) and (world_size > 1 or is_set)
        config = with_outer_step(config, "nesterov" if is_sgd and is_set else "cautious" if adapts else "none", optimizer)
    return config


def with_outer_step(config: Config, kind: str, optimizer: Optimizer) -> Config:
    """Returns the configuration with an outer step that follows from the optimizer.

    Raises:
        AgreedError: on all ranks, for options that it does not go with.
    """
    try:
        return dataclasses.replace(config, outer_step=kind)
    except ValueError as error:
        unless = f"; with {type(optimizer).__name__} there is no outer step unless outer_step is set" if kind == "none" else ""
        raise AgreedError(f"{error}{unless}") from None


def reset_(optimizer: Optimizer, initial: dict[str, Any]) -> None:
    """Puts the optimizer's state back to ``initial``, a copied ``state_dict()["state"]``; hyperparameters stay."""
    current = optimizer.state_dict()
    optimizer.state = defaultdict(dict)
    # torch takes over the tensors themselves; steps must not change the copy that the next reset needs.
    optimizer.load_state_dict({"state": copy.deepcopy(initial), "param_groups": current["param_groups"]})


def structure(optimizer: Optimizer) -> dict[tuple[int, str], tuple[tuple[int, ...], torch.dtype, str]]:
    """Returns shape, dtype and type of device of each tensor or number of the state, by the parameter's place among all and the
    entry's name. Of what is in shards, the shape of all of it: the same on every rank."""
    return {
        (index, name): (
            (tuple(value.shape), value.dtype, value.device.type) if isinstance(value, Tensor) else ((), torch.float64, "cpu")
        )
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, (Tensor, int, float))
    }


def checksum(optimizer: Optimizer) -> float:
    """Returns a number that tells structures apart, exact in float64; 0 for an empty state."""
    found = structure(optimizer)
    return float(zlib.crc32(repr(sorted(found.items(), key=lambda item: item[0])).encode())) if found else 0.0


@torch.no_grad()
def average_(
    optimizer: Optimizer,
    transport: Collectives,
    weight: float,
    *,
    agreed: bool = False,
    is_lost: bool = False,
    unions: Mapping[int, Tensor] | None = None,
) -> list[Tensor]:
    """Replaces the tensors and numbers of the state by their weighted mean over the ranks that have them. COLLECTIVE.

    A rank without state for a parameter (it made no step) receives the others' mean. Means of whole numbers are rounded. A
    parameter with a mean that is not finite is left out, so that one rank's infinite moments stay its own.

    Args:
        optimizer: state of any structure that holds tensors or numbers by name, as torch's optimizers do.
        transport: the world.
        weight: this rank's weight, >= 0; the weights sum to 1, and one > 0 is of a rank that has state.
        agreed: all ranks' states have one :func:`structure`, the same on every rank: they need not tell each other.
        is_lost: this rank's state is worth nothing: what gets no mean is removed.
        unions: by ``id`` of a parameter the rows in which ranks' states may differ, ascending, the same on every rank. Entries
            with a row for each of the parameter's exchange only those.

    Returns:
        The parameters that were left out, the same on every rank.
    """
    parameters = _parameters(optimizer)
    own = structure(optimizer)
    everyone = [(1.0, own)] if agreed else transport.allgather_object((weight, own))
    specification = {key: spec for w, entries in everyone if w for key, spec in entries.items()}
    shares = {key: sum(w for w, entries in everyone if key in entries) for key in specification}
    groups: dict[tuple[torch.dtype, torch.device], list[_Entry]] = defaultdict(list)
    num_elements: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    num_sums, averaged = 0, set[tuple[int, str]]()
    for key in sorted(specification):
        shape, dtype, device = specification[key]
        parameter = parameters[key[0]]
        state = optimizer.state[parameter]
        value = state.get(key[1])
        if value is None:
            # Fused and capturable steps count on the GPU.
            value = state[key[1]] = zeros(parameter, shape, dtype, on_host=device == "cpu")
        value = local(value) if isinstance(value, Tensor) else value
        rows = (unions or {}).get(id(parameter))
        if not isinstance(value, Tensor) or value.dim() != parameter.dim() or shape[:1] != parameter.shape[:1]:
            rows = None
        part = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=dtype)
        part = part if rows is None else part.index_select(0, rows)
        part = part.reshape(-1).to(torch.float64 if dtype == torch.float64 else torch.float32)
        kind = part.dtype, part.device
        groups[kind].append(_Entry(key, state, value, rows, part, weight / shares[key] if key in own else 0.0))
        num_elements[kind] += part.numel()
        if num_elements[kind] >= _ELEMENTS_AT_ONCE:
            averaged |= _average_entries_(groups.pop(kind), transport, name=f"optimizer.{num_sums}")
            num_elements[kind], num_sums = 0, num_sums + 1
    for number, entries in enumerate(groups.values(), num_sums):
        averaged |= _average_entries_(entries, transport, name=f"optimizer.{number}")
    for index, name in own.keys() - averaged if is_lost else ():
        del optimizer.state[parameters[index]][name]
    return [parameters[index] for index in sorted({index for index, _ in specification.keys() - averaged})]


class _Entry(NamedTuple):
    """A tensor or number of the state.

    Attributes:
        key: the parameter's place and its own name.
        state: the parameter's, which holds it.
        value: itself; of a shard, what this rank has.
        rows: those to average; None: all.
        part: its values to average, flat.
        factor: of this rank's values in the mean.
    """

    key: tuple[int, str]
    state: dict[str, Any]
    value: Any
    rows: Tensor | None
    part: Tensor
    factor: float


def _average_entries_(entries: list[_Entry], transport: Collectives, *, name: str) -> set[tuple[int, str]]:
    """Averages entries of one dtype and device by one sum, but for parameters whose sum is not finite; returns the keys of the
    others. COLLECTIVE."""
    sizes = [entry.part.numel() for entry in entries]
    flat = torch.cat([entry.part for entry in entries])
    _scale_(flat, sizes, [entry.factor for entry in entries])
    transport.allreduce_sum_(flat, name=name)
    means, infinite = flat.split(sizes), set[int]()
    if not torch.isfinite(flat).all():
        # The same sum on every rank.
        infinite = {entry.key[0] for entry, mean in zip(entries, means, strict=True) if not torch.isfinite(mean).all()}
    targets, sources = [], []
    for entry, mean in zip(entries, means, strict=True):
        if entry.key[0] in infinite:
            continue
        value, rows = entry.value, entry.rows
        if _is_whole(value):
            # Weights may sum to a little less than 1, and 4.9999995 is no 4.
            mean = mean.round()
        if not isinstance(value, Tensor):
            entry.state[entry.key[1]] = type(value)(mean.item())
        elif rows is None:
            targets.append(value)
            sources.append(mean.view(value.shape))
        else:
            value[rows] = mean.view(len(rows), *value.shape[1:]).to(value.dtype)
    # A few launches on a GPU, not one a tensor.
    if targets:
        torch._foreach_copy_(targets, sources)
    return {entry.key for entry in entries if entry.key[0] not in infinite}


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


def _scale_(flat: Tensor, sizes: list[int], factors: list[float]) -> None:
    """Multiplies each part of a flat tensor, of such a size, by its factor."""
    if len(set(factors)) == 1 and factors[0]:
        flat.mul_(factors[0])
        return
    for part, factor in zip(flat.split(sizes), factors, strict=True):
        # Not part * 0: NaN times 0 is NaN.
        part.mul_(factor) if factor else part.zero_()


@torch.no_grad()
def copies_of_parameters(optimizer: Optimizer) -> list[str]:
    """Returns the names of states that are about the parameters themselves, as fp32 master weights and Lookahead's slow ones: a
    step that copies them back undoes merges. Reads parameters and state once; ASGD's average is none of these."""
    if isinstance(optimizer, ASGD):
        return []
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for parameter in _parameters(optimizer):
        for name, value in optimizer.state.get(parameter, {}).items():
            dense = isinstance(value, Tensor) and value.is_floating_point() and value.layout == parameter.layout == torch.strided
            if dense and value.shape == parameter.shape and value.numel() > 1:
                pairs[str(name)].append((local(parameter), local(value)))
    return [name for name, found in pairs.items() if _are_near(found)]


def _are_near(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    sums = []
    for parameter, value in pairs:
        own = parameter.float()
        sums.append(torch.stack([(value.to(own.device, torch.float32) - own).square().sum(), own.square().sum()]))
    distance, size = torch.stack(sums).double().sum(0).tolist()
    return bool(distance < _NEAR**2 * size)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
