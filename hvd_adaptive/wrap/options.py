"""Options of ``hvd-adaptive run`` and of the drop-in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvd_adaptive.validation import check_positive, check_types_and_choices


def _option(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How a wrapped script's ranks share their batches. Fields are options; ``metadata["help"]`` describes them.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
    """

    strategy: str = _option(
        "sync", "sync: the script's own updates, of which each rank computes a share by its speed"
    )
    compression: str | None = _option(None, "not there yet; the script's own compression is kept")
    shares: str | None = _option(
        None,
        "fixed proportions of the global batch, one a rank, as in 1,2 (default: by the ranks' measured speeds)",
    )
    interval: int = _option(25, "optimizer steps between two looks at the ranks' speeds")
    max_batch_size: int | None = _option(
        None, "most samples in a batch of any rank, as its memory allows (default: no bound)"
    )
    dry_run: bool = _option(
        False, "run the script's first steps with equal shares, print what would be intercepted, and end"
    )
    slowdown: str | None = _option(
        None, "emulate unequal ranks: stretch each rank's compute by a factor, 1,2, or by a schedule (see train)"
    )
    stall_limit_s: float = _option(
        300.0, "seconds after which a rank whose process is dead or frozen ends the job"
    )

    def __post_init__(self) -> None:
        check_types_and_choices(self)
        check_positive(self, "interval", "max_batch_size")
        if self.stall_limit_s < 1:
            raise ValueError(f"stall_limit_s must be >= 1, got {self.stall_limit_s}")
        if self.strategy != "sync":
            raise ValueError(
                f"strategy must be sync, got {self.strategy!r}: local steps for wrapped scripts are not there yet"
            )
        if self.compression is not None:
            raise ValueError(
                f"compression {self.compression!r}: compression for wrapped scripts is not there yet; the script's own "
                "(compression=hvd.Compression.fp16) works as before"
            )
        if self.shares is not None:
            parse_shares(self.shares)


def parse_shares(text: str) -> tuple[float, ...]:
    """Returns the proportions behind ``shares``, one > 0 a rank, of any scale.

    Raises:
        ValueError: if the text is not a list of such numbers.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"shares must be one number > 0 a rank, as in 1,2, got {text!r}")
    return shares
