"""Options of ``hvd-adaptive run`` and of the drop-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_adaptive.combinations import check_needs
from hvd_adaptive.config import Config
from hvd_adaptive.validation import check_positive, check_types_and_choices, option

_LOCAL = ("local",)


class BadOptions(SystemExit):
    """The options do not fit the number of ranks, or the model; the exit code is what is wrong."""


def _as_in_train(
    name: str, *, default: Any = None, text: str = "", choices: tuple[str, ...] = (), strategy: tuple[str, ...] = _LOCAL
) -> Any:
    """An option of :class:`Config` with the same meaning; ``strategy``: of this program those that it is for."""
    known = Config.__dataclass_fields__[name]
    only = "local: " if strategy == _LOCAL else ""
    return option(
        known.default if default is None else default,
        only + (text or known.metadata["help"]),
        *(choices or known.metadata["choices"]),
        strategy=strategy,
    )


EQUAL_SHARES = "equal"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How a wrapped script's ranks share their batches. Fields are options; ``metadata["help"]`` describes them.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
    """

    strategy: str = option(
        "sync",
        "sync (default): the script's own updates, shares by speed; local: models are merged",
        *("sync", "local"),
    )
    shares: str | None = option(
        None,
        "fixed shares of a batch: equal, or one number a rank, as in 1,2 (default: by measured speeds)",
    )
    interval: int = option(25, "optimizer steps between two looks at the ranks' speeds")
    max_batch_size: int | None = option(
        None, "most samples in a batch of any rank (default: no bound)"
    )
    micro_batch_size: int | None = option(
        None,
        "call compiled models with so many samples at a time, so that they compile once",
    )
    dry_run: bool = option(
        False,
        "run at most 28 steps, say what would be adaptive, and end",
    )
    slowdown: str | None = option(
        None, "emulate unequal ranks: for each rank, how many times as long its steps take, as in 1,2"
    )
    mega_batch: int | None = _as_in_train(
        "mega_batch", text="samples over all ranks between two merges (default: 50 batches of all ranks together)"
    )
    merge_period: str | None = _as_in_train("merge_period")
    merge_share: float = _as_in_train("merge_share")
    merge_weights: str = _as_in_train("merge_weights")
    lr_rule: str = _as_in_train(
        "lr_rule",
        default="linear",
        text="how the learning rate follows a rank's share of the batch",
        choices=("linear", "sqrt", "none"),
    )
    outer_step: str | None = _as_in_train(
        "outer_step", text="how the merged change moves the model (default: cautious with torch's Adam and its kin, else none)"
    )
    outer_lr: float | None = _as_in_train("outer_lr")
    outer_momentum: float | None = _as_in_train("outer_momentum")
    optimizer_state: str | None = _as_in_train("optimizer_state")
    hash_interval: int = _as_in_train(
        "hash_interval", text="merges between checks that all ranks hold the same model; 0: never"
    )
    compression: str = _as_in_train(
        "compression",
        text="none, fp16, maxmin:4, ...; auto (default): none, in local by a trial (docs/compression.md)",
        strategy=("local", "sync"),
    )
    reducer: str = _as_in_train(
        "reducer",
        default="sra",
        text="how encoded values are summed",
        choices=("sra", "allreduce"),
        strategy=("local", "sync"),
    )
    error_feedback: bool = _as_in_train("error_feedback", strategy=("local", "sync"))
    stall_limit_s: float = option(
        300.0, "seconds after which a dead or frozen rank ends the job; a long wait only warns"
    )

    def __post_init__(self) -> None:
        check_types_and_choices(self)
        check_positive(self, "interval", "max_batch_size", "micro_batch_size")
        if self.stall_limit_s < 1:
            raise ValueError(f"stall_limit_s must be >= 1, got {self.stall_limit_s}")
        check_needs(self)
        if self.strategy == "local" and self.merge_weights == "samples" and self.lr_rule != "none":
            # Every rank makes the same number of steps here.
            raise ValueError(
                f"merge_weights 'samples' needs lr_rule 'none', got {self.lr_rule!r}: a rank's share of the batch "
                "already makes its steps longer, and would count twice. Or use merge_weights 'updates'"
            )
        most, micro = self.max_batch_size, self.micro_batch_size
        if most is not None and micro is not None and most < micro:
            raise ValueError(f"max_batch_size must be >= micro_batch_size, got {most} < {micro}")
        self.merging()
        if self.shares is not None:
            parse_shares(self.shares)

    @property
    def merges_alone(self) -> bool:
        """Whether local steps differ from plain ones on one rank, too: if its merges change its model."""
        rules = self.merging()
        return rules.outer_step not in (None, "none") or rules.encodes

    def has_equal_shares(self) -> bool:
        """Whether the script's batches stay as they are."""
        return self.shares is not None and len(set(parse_shares(self.shares))) == 1

    def merging(self) -> Config:
        """Returns the rules by which models are merged and values are encoded, as ``train`` has them.

        Raises:
            ValueError: for a value that they do not allow.
        """
        values = {name: getattr(self, name) for name in (*LOCAL_OPTIONS, *_ENCODING)}
        return Config(strategy="local", sparse_merge="never", **values)


# Those of strategy local, and those of both strategies that Config knows too.
LOCAL_OPTIONS = tuple(n for n, f in RunConfig.__dataclass_fields__.items() if f.metadata["needs"].get("strategy") == _LOCAL)
_ENCODING = ("compression", "reducer", "error_feedback")


def parse_shares(text: str, num_ranks: int = 1) -> tuple[float, ...]:
    """Returns the proportions behind ``shares``, one > 0 a rank, of any scale.

    Raises:
        ValueError: if the text is neither "equal" nor a list of such numbers.
    """
    if text == EQUAL_SHARES:
        return (1.0,) * num_ranks
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"shares must be one number > 0 a rank, as in 1,2, or {EQUAL_SHARES}; got {text!r}")
    return shares


def check_shares(text: str | None, num_ranks: int) -> None:
    """Checks that there is one share a rank.

    Raises:
        ValueError: if not.
    """
    if text is not None and (count := len(parse_shares(text, num_ranks))) != num_ranks:
        raise ValueError(f"shares must have one number a rank: {num_ranks} ranks, got {count} in {text!r} (or be {EQUAL_SHARES})")
