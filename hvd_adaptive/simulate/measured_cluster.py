"""A cluster as ``hvd-adaptive calibrate`` measured it; docs/calibrate.md describes the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hvd_adaptive.calibrate.file import Calibration, RankCalibration, SynchronousCalibration
from hvd_adaptive.simulate.cluster import Array, Cluster, Measured, described_cluster
from hvd_adaptive.simulate.scenario_options import ClusterConfig
from hvd_adaptive.simulate.units import parse_ranks

# What a measured cluster never has from the description.
_MEASURED = ("speeds", "samples_per_s", "step_overhead", "jitter", "model_mb", "merge_gbs")


def without_effect(calibration: Calibration, described: ClusterConfig) -> dict[str, str]:
    """Returns the options of the description that change nothing in :func:`measured_cluster`, and why.

    Args:
        calibration: what was measured.
        described: the numbers of ranks.
    """
    why = dict.fromkeys(_MEASURED, "which measured it")
    if len(calibration.ranks) > 1:
        why["exchange_overhead"] = "which measured it"
    if _has_link(calibration):
        count, is_one_host = len(calibration.ranks), calibration.link.num_hosts == 1
        why |= dict.fromkeys(("ranks_per_host", "host_link" if is_one_host else "link"), "which measured it")
        if is_one_host and max(parse_ranks(described.ranks)) <= count:
            why |= dict.fromkeys(("link", "latency"), f"whose {count} ranks are on one host")
    return why


def _has_link(calibration: Calibration) -> bool:
    return len(calibration.ranks) > 1 and calibration.link.per_byte_s > 0


def measured_cluster(
    calibration: Calibration, described: ClusterConfig, world_size: int, *, strategy: str, mega_batch: int
) -> Cluster:
    """Returns the measured cluster; with more ranks than were measured, theirs repeated, over the described links.

    Args:
        calibration: what was measured.
        described: what was not: drift, overlap, and the links between more hosts.
        world_size: number of ranks.
        strategy: of :class:`hvd_adaptive.Config`, whose steps were measured.
        mega_batch: samples between two merges, for the bytes of merges that exchange touched rows only.
    """
    ranks, link, merge = calibration.ranks, calibration.link, calibration.merge
    count = len(ranks)
    own, contention = _own_and_contention(calibration)
    fixed_s = np.array([rank.fixed_s for rank in ranks])
    per_sample_s = np.array([rank.per_work_s for rank in ranks]) * calibration.work_per_sample
    steps = {"sync": calibration.sync, "horovod": calibration.horovod}.get(strategy)
    if steps is None:
        fixed_s, per_sample_s = fixed_s * own, per_sample_s * own
    else:
        # What the exchange asks of a step besides, such as looking through the gradients, does not grow with the samples.
        shorter, added_s = _beside_line(steps, calibration.ranks, contention)
        fixed_s, per_sample_s = fixed_s * shorter + added_s, per_sample_s * shorter
    base = described_cluster(described, world_size)
    # One rank alone exchanges nothing and has its cursor beside it: both are as described.
    links, overhead_s = base.links, link.latency_s if count > 1 else base.exchange_overhead_s
    if _has_link(calibration):
        bandwidth = 2 * (count - 1) / count / link.per_byte_s
        links = dataclasses.replace(
            links,
            ranks_per_host=-(-count // link.num_hosts),
            host_bandwidth=bandwidth if link.num_hosts == 1 else links.host_bandwidth,
            bandwidth=bandwidth if link.num_hosts > 1 else links.bandwidth,
        )
        # The measured latency is that of all the messages of a sum.
        then = dataclasses.replace(links, world_size=count)
        overhead_s = max(0.0, link.latency_s - then.allreduce_s(0))
    order = np.argsort(merge.mega_batch)
    payload_bytes = np.interp(mega_batch, np.array(merge.mega_batch)[order], np.array(merge.payload_bytes)[order])
    places = np.arange(world_size) % count
    exchange_s = None
    if steps is not None and count > 1 and not described.gradient_mb:
        exchange_s = steps.exchange_s
    return dataclasses.replace(
        base,
        fixed_s=fixed_s[places],
        per_sample_s=per_sample_s[places],
        contention=contention[places],
        jitter=float(np.median([rank.jitter for rank in ranks])),
        links=links,
        model_bytes=float(payload_bytes),
        gradient_bytes=1e6 * described.gradient_mb if described.gradient_mb else float(calibration.model_bytes),
        exchange_overhead_s=overhead_s,
        measured=Measured(
            world_size=count,
            claim_s=calibration.claim_s if count > 1 else None,
            control_s=float(np.median(merge.control_s)),
            own_merge_s=merge.local_s,
            exchange_s=exchange_s,
        ),
    )


def _own_and_contention(calibration: Calibration) -> tuple[Array, Array]:
    """Splits what steps took longer than the line: into a factor of the rank's own, and what each other that computes adds.

    A rank whose slowdown is emulated computes for a part of a step only, and disturbs the others of its host no longer.

    Returns:
        Two arrays of shape (number of ranks,).
    """
    ranks = calibration.ranks
    alone, together = (np.array([getattr(rank, name) for rank in ranks]) for name in ("alone", "together"))
    beside = _others_computing(ranks).sum(axis=1)
    # A rank cannot have been quicker among others: then it is the machine that was.
    added = np.where(beside > 0, np.maximum(0.0, together - alone), 0.0)
    own = together - added
    return own, added / np.where(beside > 0, beside, 1.0) / own


def _beside_line(
    steps: SynchronousCalibration, ranks: Sequence[RankCalibration], contention: Array
) -> tuple[Array, Array]:
    """Returns what each rank's synchronous step is beside its line, slowdown and contention taken off: a factor <= 1 on the line,
    and seconds added to it, each of shape (number of ranks,)."""
    step_s = np.maximum(steps.step_s, 1e-12)
    # Of a longer step, only a part is beside a shorter one.
    beside = (_others_computing(ranks) * np.minimum(1.0, step_s / step_s[:, None])).sum(axis=1)
    own_s = step_s / (1 + contention * beside)
    line_s = step_s / np.array(steps.lengthened)
    slowdown = np.array([rank.slowdown for rank in ranks])
    return np.minimum(1.0, own_s / line_s), np.maximum(0.0, own_s - line_s) / slowdown


def _others_computing(ranks: Sequence[RankCalibration]) -> Array:
    """Returns the part of its time that each rank (column) computes beside another (row) of its host, 0 elsewhere."""
    hosts = np.array([rank.host for rank in ranks])
    others = (hosts[:, None] == hosts) & ~np.eye(len(ranks), dtype=bool)
    computing: Array = others / np.array([rank.slowdown for rank in ranks])
    return computing
