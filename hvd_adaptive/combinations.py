"""Which options go together; imports neither torch nor MPI."""

from __future__ import annotations

from typing import Any

# The batch-size rules of each strategy, its default first.
SIZE_RULES = {
    "local": ("fixed", "paper", "heterogpu", "proportional"),
    "sync": ("proportional", "fixed", "static"),
    "horovod": ("fixed",),
    "sma": ("fixed",),
}


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
    rules = SIZE_RULES[config.strategy]
    if config.size_rule not in rules:
        raise ValueError(
            f"batch_size_rule must be one of {', '.join(rules)} for strategy {config.strategy!r}, got {config.batch_size_rule!r}"
        )
    fixed = {"work": "samples"} if config.strategy == "sync" else {
        "global_batch_size": None, "accumulation_steps": 1, "loss_reduction": "mean",
    }  # fmt: skip
    for name, value in fixed.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} must be {value!r} with strategy {config.strategy!r}, got {getattr(config, name)!r}"
            )
    if config.compression != "none":
        _check_needed(
            config,
            f"compression {config.compression!r}",
            "it encodes the deltas of all rows at the merge",
            strategy=("local",),
            logical_ranks=(None,),
            overlap_merge=(False,),
            sparse_merge=("auto", "never"),
            row_weights=(False,),
        )
        if config.repeatable and config.reducer == "auto":
            raise ValueError("record and replay need a fixed reducer, got 'auto', which chooses by seconds")
    if config.logical_ranks is not None:
        _check_needed(
            config,
            "logical_ranks",
            "nothing may follow the ranks' speeds or their number",
            strategy=("local",),
            size_rule=("fixed",),
            dispatch=("dynamic",),
            merge_period=("fixed", "qsr"),
            overlap_merge=(False,),
            optimizer_state=("keep", "reset"),
            sparse_merge=("auto", "never"),
            row_weights=(False,),
        )


def _check_needed(config: Any, what: str, why: str, **needed: tuple[Any, ...]) -> None:
    for name, allowed in needed.items():
        value = getattr(config, name)
        if value not in allowed:
            option = "batch_size_rule" if name == "size_rule" else name
            raise ValueError(f"{what} needs {option} {' or '.join(map(str, allowed))}, got {value!r}: {why}")
