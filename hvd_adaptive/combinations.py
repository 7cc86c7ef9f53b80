"""Which options go together; imports neither torch nor MPI."""

from __future__ import annotations

import dataclasses
from typing import Any

# The batch-size rules of each strategy, its default first.
SIZE_RULES = {
    "local": ("fixed", "paper", "heterogpu", "proportional"),
    "sync": ("proportional", "fixed", "static"),
    "horovod": ("fixed",),
    "sma": ("fixed",),
}

# The merge weights of which a rank has one for all coordinates.
_ONE_WEIGHT = ("paper", "heterogpu", "uniform", "updates", "samples")
# Nothing may be in a round's end only, nor differ between the merges of a round.
_BESIDE_STEPS_NEEDS: dict[str, tuple[Any, ...]] = {
    "weight_rule": ("uniform", "updates", "samples"),
    "merge_fragments": (1,), "auto_bits": (0,), "sparse_merge": ("auto", "never"),
    "optimizer_state": (None, "keep"), "outer_state": ("device",), "perturbation": (False,),
    "island": (None,), "logical_ranks": (None,), "record": (False,), "replay": (None,),
}  # fmt: skip
_DUAL_NEEDS: dict[str, tuple[Any, ...]] = {"optimizer_state": (None,), "logical_ranks": (None,)}
_DUAL_WHY = "it sums the optimizer's accumulators at each merge, and the next step needs the sum"


def check_combinations(config: Any) -> None:
    """Raises ValueError for options that do not go together.

    Args:
        config: a :class:`hvd_adaptive.Config` whose single values are valid.
    """
    if config.repeatable and (config.strategy != "local" or config.logical_ranks is not None):
        name = "record" if config.record else "replay"
        raise ValueError(
            f"{name} needs strategy local without logical_ranks, got strategy {config.strategy!r} and "
            f"logical_ranks {config.logical_ranks}: only claims that follow the ranks' speeds need a record"
        )
    if config.repeatable and config.reference_ranks is not None:
        name = "record" if config.record else "replay"
        raise ValueError(f"{name} repeats a run with its number of ranks: leave reference_ranks and --elastic out")
    rules = SIZE_RULES[config.strategy]
    if config.size_rule not in rules:
        raise ValueError(
            f"batch_size_rule must be one of {', '.join(rules)} for strategy {config.strategy!r}, got {config.batch_size_rule!r}"
        )
    check_needs(config)
    if config.micro_batch_size is not None:
        _check_micro_batches(config)
    if not config.encodes and config.reducer not in ("by-host", "sra"):
        raise ValueError(f"reducer {config.reducer!r} needs a compression, got {config.compression!r}: it would have no effect")
    if config.auto_bits and not config.compression.lstrip().startswith("maxmin"):
        raise ValueError(
            f"auto_bits chooses bits of maxmin codes: it needs compression 'maxmin:BITS', got {config.compression!r}"
        )
    if config.encodes:
        _check_needed(
            config,
            f"compression {config.compression!r}",
            "it encodes the deltas of all rows at the merge, or the gradients of each step",
            logical_ranks=(None,),
            sparse_merge=("auto", "never"),
        )
    if config.strategy == "local" and config.loss_reduction != "mean":
        _check_local_reduction(config)
    elif config.loss_reduction == "targets" and config.encodes:
        if "fp16" in config.compression:
            raise ValueError(
                f"loss_reduction 'targets' needs another compression than fp16, got {config.compression!r}: gradients travel "
                "multiplied by targets per sample, which fp16 may not hold"
            )
        why = "what a codec loses of one step cannot be added to a step with another number of targets"
        _check_needed(config, "loss_reduction 'targets' with a compression", why, error_feedback=(False,))
    if config.outer_step == "cautious" and config.outer_lr is not None and config.outer_momentum is None:
        raise ValueError(
            f"outer_lr {config.outer_lr} needs outer_momentum with outer_step 'cautious', got none: momentum that is not set "
            "grows with the run, and the step with it. Set both or none"
        )
    if config.outer_state == "host":
        _check_needed(
            config,
            "outer_state 'host'",
            "its merges take the whole global model piece by piece",
            merge_fragments=(1,),
            sparse_merge=("auto", "never"),
            logical_ranks=(None,),
        )
    if config.island is not None:
        _check_island(config)
    _check_merges_beside_steps(config)
    for name in ("outlier_limit", "clip_delta"):
        if getattr(config, name):
            what = f"{name} {getattr(config, name)}"
            _check_needed(config, what, "it is the norm of one weight a rank", weight_rule=_ONE_WEIGHT)
            _check_needed(config, what, "it takes the norm over all rows", sparse_merge=("auto", "never"))
    if config.merge_weights == "dual-averaging":
        _check_needed(config, "merge_weights 'dual-averaging'", _DUAL_WHY, **_DUAL_NEEDS)
    if config.logical_ranks is not None:
        _check_needed(
            config,
            "logical_ranks",
            "nothing may follow the ranks' speeds or their number",
            strategy=("local",),
            reference_ranks=(None,),
            size_rule=("fixed",),
            dispatch=("dynamic",),
            merge_period=(None, "fixed"),
            merge_fragments=(1,),
            outlier_limit=(0.0,),
            clip_delta=(0.0,),
            optimizer_state=(None, "keep", "reset"),
            sparse_merge=("auto", "never"),
            weight_rule=_ONE_WEIGHT,
        )


def _check_local_reduction(config: Any) -> None:
    name = f"loss_reduction {config.loss_reduction!r}"
    if config.loss_reduction == "sum":
        _check_needed(config, name, "each rank takes the gradients of its own loss as they are", strategy=("sync",))
    if config.micro_batch_size is None:
        raise ValueError(
            f"{name} with strategy 'local' needs micro_batch_size, got none: a whole batch's gradients are taken as they are. "
            "Leave loss_reduction out"
        )
    _check_needed(config, f"{name} with strategy 'local'", "an island's ranks count by samples", island=(None,))


def _check_island(config: Any) -> None:
    name = f"island {config.island!r}"
    reducers = ("by-host", "sra", "allreduce")
    _check_needed(config, name, "an island is one rank to the others, and they meet in one step", reducer=reducers)
    _check_needed(config, name, "an island cuts each batch by its samples", work=("samples",))
    _check_needed(config, name, "an island has one weight for all coordinates", weight_rule=_ONE_WEIGHT)
    _check_needed(config, name, "it takes the ranks as they are", reference_ranks=(None,), logical_ranks=(None,))
    _check_needed(config, name, "claims are repeated rank by rank", record=(False,), replay=(None,))


def _check_merges_beside_steps(config: Any) -> None:
    if config.merges_beside_steps:
        why = "a merge beside steps takes the whole model, and a rank's weight is its own work"
        _check_needed(config, f"merges_per_round {config.merges_per_round}", why, **_BESIDE_STEPS_NEEDS)
    if config.merge_fragments > 1:
        name = f"merge_fragments {config.merge_fragments}"
        _check_needed(config, name, "a fragment is sent with all its rows", sparse_merge=("auto", "never"))
        why = "a rank sends a fragment before it knows what others have done, so that its weight is its own work"
        _check_needed(config, name, why, weight_rule=("uniform", "updates", "samples"))
        _check_needed(config, name, "codecs must stay while fragments are on the way", auto_bits=(0,))
        return
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if item.name in ("fragment_delay", "fragment_alpha") and value != item.default:
            raise ValueError(f"{item.name} {value!r} needs merge_fragments of 2 or more, got 1: it would have no effect")


def _check_micro_batches(config: Any) -> None:
    size = config.micro_batch_size
    names = ["batch_size", "global_batch_size"] if config.strategy == "sync" else ["batch_size", "min_batch_size"]
    for name in names:
        value = getattr(config, name)
        if value is not None and value % size:
            raise ValueError(
                f"{name} must be a whole number of micro-batches of micro_batch_size {size}, got {value}: steps are made of "
                f"whole ones. Nearest: {max(1, round(value / size)) * size}"
            )
    if config.max_batch_size is not None and config.max_batch_size < size:
        raise ValueError(f"max_batch_size must be >= micro_batch_size, got {config.max_batch_size} < {size}")
    if config.strategy == "local":
        why = "ranks make steps of one size with micro-batches, and faster ranks make more of them"
        _check_needed(config, f"micro_batch_size {size}", why, size_rule=("fixed",))


def check_needs(config: Any) -> None:
    """Raises ValueError for an option that was set and would have no effect beside the others.

    Args:
        config: a configuration whose fields' metadata hold ``needs``.
    """
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        # Older runs' config.json has these with all options: they were the defaults.
        if value != item.default and (item.name, value) not in (("merge_period", "fixed"), ("outer_momentum", 0.9)):
            _check_needed(config, f"{item.name} {value!r}", "it would have no effect", **item.metadata["needs"])


def has_effect(config: Any, name: str) -> bool:
    """Returns whether an option has an effect beside the others, so that it may be set.

    Args:
        config: a valid :class:`hvd_adaptive.Config`.
        name: the option's.
    """
    needs = type(config).__dataclass_fields__[name].metadata["needs"]
    return all(getattr(config, other) in allowed for other, allowed in needs.items())


def goes_with_merges_beside_steps(config: Any) -> bool:
    """Returns whether ``merges_per_round`` may be above 1 beside the other options.

    Args:
        config: a valid :class:`hvd_adaptive.Config`.
    """
    return all(getattr(config, name) in allowed for name, allowed in _BESIDE_STEPS_NEEDS.items())


def goes_with_dual_averaging(config: Any) -> bool:
    """Returns whether ``merge_weights`` may be dual-averaging beside the other options.

    Args:
        config: a valid :class:`hvd_adaptive.Config`.
    """
    return all(getattr(config, name) in allowed for name, allowed in _DUAL_NEEDS.items())


def check_reference(config: Any) -> None:
    """Raises ValueError for ``elastic_batch`` without ``reference_ranks``; not on construction, as --elastic tells it the ranks.

    Args:
        config: a valid :class:`hvd_adaptive.Config`, of a rank.
    """
    if config.elastic_batch != "fixed-global" and config.reference_ranks is None:
        raise ValueError(
            f"elastic_batch {config.elastic_batch!r} needs reference_ranks, the number of ranks that batch_size and the learning "
            "rate are meant for, got none: it would have no effect"
        )


def check_elastic(config: Any) -> None:
    """Raises ValueError for options that do not go with ``--elastic``.

    Args:
        config: a valid :class:`hvd_adaptive.Config`.
    """
    if config.repeatable:
        name = "record" if config.record else "replay"
        raise ValueError(f"{name} repeats a run with its number of ranks: leave --elastic out")
    if config.backend == "torch":
        raise ValueError("--elastic starts ranks for Horovod: leave backend 'torch' out")
    if config.slowdown is not None:
        raise ValueError(f"slowdown {config.slowdown!r} has a factor a rank, and --elastic changes their number: leave one out")
    if config.island is not None:
        raise ValueError(f"island {config.island!r} takes the ranks as they are, and --elastic changes them: leave one out")


def check_elastic_script(config: Any) -> None:
    """Raises ValueError for options that do not go with ``run --elastic``.

    Args:
        config: a valid :class:`hvd_adaptive.wrap.run_options.RunConfig`.
    """
    if config.dry_run:
        raise ValueError("dry_run ends after a few steps: leave --elastic out")
    for name, instead in ("shares", ", or set --shares equal"), ("slowdown", ""):
        value = getattr(config, name)
        if value not in (None, "equal"):
            raise ValueError(f"{name} {value!r} has a number a rank, and --elastic changes their number: leave one out{instead}")


def _check_needed(config: Any, what: str, why: str, **needed: tuple[Any, ...]) -> None:
    for name, allowed in needed.items():
        value = getattr(config, name)
        if value not in allowed:
            option = {"size_rule": "batch_size_rule", "weight_rule": "merge_weights"}.get(name, name)
            choices = " or ".join(str(choice) for choice in allowed if choice is not None)
            needed_text = f"{option} {choices}" if choices else f"no {option}"
            raise ValueError(f"{what} needs {needed_text}, got {value!r}: {why}")
