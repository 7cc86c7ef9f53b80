"""Options of ``hvd-adaptive simulate``: what is compared, and the cluster that is described; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_adaptive.simulate.units import parse_ranks, parse_rate, parse_seconds, parse_speeds
from hvd_adaptive.validation import check_not_negative, check_positive, check_types_and_choices, option

# What each is called here, and the options that make it.
STRATEGIES: dict[str, dict[str, Any]] = {
    "local": {"strategy": "local"},
    "local-sizes": {"strategy": "local", "batch_size_rule": "proportional"},
    "local-parts": {"strategy": "local", "dispatch": "proportional"},
    "sync": {"strategy": "sync"},
    "static": {"strategy": "sync", "batch_size_rule": "static"},
    "local-sgd": {"strategy": "local", "dispatch": "equal", "merge_weights": "uniform"},
    "horovod": {"strategy": "horovod"},
}

# Options of `train` that change what is simulated.
SHARED_OPTIONS = (
    *("batch_size", "min_batch_size", "max_batch_size", "mega_batch", "merge_period", "merge_share"),
    *("compression", "reducer", "global_batch_size", "slowdown", "seed"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """A description. Fields are options of ``hvd-adaptive simulate``; ``metadata["help"]`` describes them.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
    """

    ranks: str = option("2..4096", "numbers of ranks: 2,4,12 or 2..4096, which doubles")
    ranks_per_host: int = option(4, "ranks that share a host and its link")
    speeds: str = option(
        "1,1,2,4", "the ranks' relative speeds, repeated over the ranks"
    )
    samples_per_s: float = option(2000.0, "samples a second of a rank of speed 1, without --step-overhead")
    step_overhead: str = option("2ms", "fixed time of every step, for any batch and speed")
    jitter: float = option(0.05, "relative standard deviation of a step's seconds")
    drift: float = option(0.0, "relative standard deviation of a rank's speed after a minute: throttling, other programs")
    link: str = option("10gbit", "bandwidth of a host's link, each way")
    latency: str = option("50us", "seconds of an empty message between hosts")
    host_link: str = option("10GB/s", "bandwidth between two ranks of a host")
    host_latency: str = option("2us", "seconds of an empty message between two ranks of a host")
    model_mb: float = option(100.0, "megabytes (10^6 bytes) of the model in fp32")
    gradient_mb: float | None = option(
        None, "megabytes exchanged in a step of sync and horovod (default: the model's)"
    )
    overlap: float = option(0.5, "part of a step during which gradients may cross the wire, in [0, 1]")
    exchange_overhead: str = option("1ms", "fixed time of every exchange: Horovod's cycle and agreement")
    merge_gbs: float = option(
        10.0, "gigabytes of model a second in a rank's own part of a merge: change, copies, outer step"
    )
    codec_gbs: float = option(3.0, "gigabytes of fp32 values a second that a rank encodes and decodes")
    store_operation: str = option("12us", "time of an operation in the thread that serves the cursor; a claim takes two")
    first_batch: str = option("0ms", "time to load a round's first batch; later ones load during steps")
    dataset_size: int | None = option(None, "samples of an epoch, which rounds do not cross (default: no end)")

    def __post_init__(self) -> None:
        check_types_and_choices(self)
        check_positive(
            self, "ranks_per_host", "samples_per_s", "model_mb", "gradient_mb", "merge_gbs", "codec_gbs", "dataset_size"
        )
        check_not_negative(self, "jitter", "drift", "overlap")
        if self.overlap > 1:
            raise ValueError(f"overlap must be in [0, 1], got {self.overlap}")
        parse_ranks(self.ranks)
        parse_speeds(self.speeds)
        for name in ("step_overhead", "latency", "host_latency", "exchange_overhead", "store_operation", "first_batch"):
            parse_seconds(name, getattr(self, name))
        for name in ("link", "host_link"):
            parse_rate(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """What is compared. Fields are options of ``hvd-adaptive simulate``; ``metadata["help"]`` describes them.

    Raises:
        ValueError: on construction, naming the field, the requirement and the value.
    """

    strategies: str = option(
        "local,local-parts,sync,local-sgd,horovod",
        "which; docs/simulate.md lists them",
    )
    local_steps: float = option(
        25.0, "batches of a rank between merges, if --mega-batch is not given"
    )
    rounds: int = option(16, "rounds to play")
    settle: int = option(8, "rounds at the start that do not count: the rules learn the ranks' speeds in them")

    def __post_init__(self) -> None:
        check_types_and_choices(self)
        check_positive(self, "local_steps", "rounds")
        check_not_negative(self, "settle")
        if self.settle >= self.rounds:
            raise ValueError(f"settle must be < rounds, got {self.settle} of {self.rounds}")
        unknown = [name for name in self.names if name not in STRATEGIES]
        if unknown:
            raise ValueError(f"strategies must be of {', '.join(STRATEGIES)}, got {unknown[0]!r}")

    @property
    def names(self) -> list[str]:
        """The strategies to compare."""
        return [name.strip() for name in self.strategies.split(",")]
