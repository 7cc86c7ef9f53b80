"""Strategies side by side over numbers of ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_adaptive.calibrate.file import Calibration
from hvd_adaptive.config import Config
from hvd_adaptive.simulate.cluster import described_cluster
from hvd_adaptive.simulate.measured_cluster import measured_cluster
from hvd_adaptive.simulate.scenario_options import STRATEGIES, ClusterConfig, SweepConfig
from hvd_adaptive.simulate.units import parse_ranks
from hvd_adaptive.simulate.virtual_run import simulate
from hvd_adaptive.simulate.virtual_strategies import Round
from hvd_adaptive.validation import parse_slowdown


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a strategy makes of so many ranks.

    Attributes:
        strategy: its name in ``STRATEGIES``.
        ranks: number of ranks.
        samples_per_s: over all ranks.
        utilisation: samples computed over those that the ranks could have computed, each alone and never waiting.
        wait_share: part of the time that a rank waits for others, the mean over ranks.
        claim_share: part of the time that it waits for a batch.
        communication_share: part of the time that claims, exchanges, merges and control take, as far as nothing computes beside
            them.
        rounds_per_s: rounds a second; one of sync and horovod is only the interval of statistics.
        steps_per_s: a rank's steps a second, the mean over ranks.
        sent_mb_per_s: megabytes (10^6 bytes) a second that a rank sends.
    """

    strategy: str
    ranks: int
    samples_per_s: float
    utilisation: float
    wait_share: float
    claim_share: float
    communication_share: float
    rounds_per_s: float
    steps_per_s: float
    sent_mb_per_s: float


def outcome(strategy: str, rounds: list[Round], *, settle: int = 0) -> Outcome:
    """Returns what rounds add up to, the first ``settle`` left out."""
    counted = rounds[settle:]
    start_s, before = (rounds[settle - 1].train_s, rounds[settle - 1].num_samples) if settle else (0.0, 0)
    seconds = counted[-1].train_s - start_s
    num_samples = counted[-1].num_samples - before

    def share(*names: str) -> float:
        return float(np.mean([sum(r.stats[name] for name in names) for r in counted])) * len(counted) / seconds

    return Outcome(
        strategy=strategy,
        ranks=len(counted[0].stats["busy_s"]),
        samples_per_s=num_samples / seconds,
        utilisation=num_samples / sum(r.own_samples for r in counted),
        wait_share=share("wait_s"),
        claim_share=share("claim_s"),
        communication_share=share("claim_s", "merge_s", "control_s"),
        rounds_per_s=len(counted) / seconds,
        steps_per_s=sum(r.num_steps for r in counted) / seconds,
        sent_mb_per_s=sum(r.sent_bytes for r in counted) / seconds / 1e6,
    )


def strategy_config(name: str, shared: Mapping[str, Any]) -> Config:
    """Returns the configuration of a strategy: the shared options, as far as they mean something to it, and its own.

    Raises:
        ValueError: if they do not go together.
    """
    own = STRATEGIES[name]
    needs = {item.name: item.metadata["needs"].get("strategy") for item in dataclasses.fields(Config)}
    kept = {key: value for key, value in shared.items() if not needs[key] or own["strategy"] in needs[key]}
    return Config(**{**kept, **own})


def sweep(
    sweep_config: SweepConfig,
    cluster_config: ClusterConfig,
    shared: Mapping[str, Any],
    calibration: Calibration | None = None,
    of_local: Mapping[str, Any] | None = None,
    *,
    mega_batch_ranks: int | None = None,
    repeats_slowdown: bool = False,
) -> Iterator[Outcome]:
    """Yields the outcome of each strategy at each number of ranks, the fewest ranks first.

    Args:
        sweep_config: what is compared.
        cluster_config: the cluster.
        shared: options of :class:`Config` by name, of ``SHARED_OPTIONS``.
        calibration: what was measured of it.
        of_local: for strategy ``local`` in place of those of ``shared``.
        mega_batch_ranks: number of ranks that ``mega_batch`` of ``shared`` is for; other numbers have as many samples a rank.
            None: it is for any number.
        repeats_slowdown: the factors of ``slowdown`` are of the measured ranks, and further ranks repeat them.

    Raises:
        ValueError: if options do not go together.
    """
    dataset_size = cluster_config.dataset_size or (calibration.num_samples if calibration else None)
    configs = {
        name: strategy_config(name, {**shared, **(of_local or {})} if STRATEGIES[name]["strategy"] == "local" else shared)
        for name in sweep_config.names
    }
    for count in parse_ranks(cluster_config.ranks):
        for name, config in configs.items():
            if config.mega_batch is None:
                samples = round(sweep_config.local_steps * config.batch_size * count)
                config = dataclasses.replace(config, mega_batch=max(1, samples))
            elif mega_batch_ranks is not None:
                config = dataclasses.replace(config, mega_batch=max(1, round(config.mega_batch * count / mega_batch_ranks)))
            if repeats_slowdown and config.slowdown is not None:
                config = dataclasses.replace(config, slowdown=_repeated(config.slowdown, count))
            if calibration is None:
                cluster = described_cluster(cluster_config, count)
            else:
                mega_batch = config.mega_batch_samples
                cluster = measured_cluster(calibration, cluster_config, count, strategy=config.strategy, mega_batch=mega_batch)
            rounds = simulate(config, cluster, num_rounds=sweep_config.rounds, dataset_size=dataset_size)
            yield outcome(name, rounds, settle=sweep_config.settle)


def _repeated(slowdown: str, num_ranks: int) -> str:
    """Returns a schedule with as many factors as there are ranks."""
    entries = [(start, itertools.islice(itertools.cycle(factors), num_ranks)) for start, factors in parse_slowdown(slowdown)]
    return ";".join(f"{start}:{','.join(map(str, factors))}" for start, factors in entries)
