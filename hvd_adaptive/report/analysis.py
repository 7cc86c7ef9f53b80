"""What a run's records say about its ranks: where time went, who was waited for, what dispatch by speed has brought."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hvd_adaptive.report.runs import Array, Run

# Fields of a record's ranks that are parts of the training time, and what they are called.
TIME_PARTS = {
    "busy_s": "compute",
    "claim_s": "claim",
    "wait_s": "wait",
    "merge_s": "merge",
    "average_s": "merge",
    "control_s": "control",
    "checkpoint_s": "checkpoint",
}
_SLOW = 1.5
_WINDOW = 11


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank did in a run.

    Attributes:
        rank: its number.
        host: its host's name, "" where the run has not ended.
        samples: samples computed.
        speed: samples per second of computing.
        relative_speed: its speed over the fastest rank's, in (0, 1].
        last_share: part of the rounds in which this rank came last, so that the others waited for it.
        slow_rounds: numbers of rounds in which a sample took it more than 1.5 times as long as usual around that time.
        worst: largest of these factors; 1 without slow rounds.
    """

    rank: int
    host: str
    samples: float
    speed: float
    relative_speed: float
    last_share: float
    slow_rounds: tuple[int, ...]
    worst: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Rank-seconds without work: with equal shares at the speeds that the ranks showed, and as it was.

    Attributes:
        equal_s: what the ranks would have waited for the slowest one, had each computed one Nth of every round.
        actual_s: what they did wait, for one another and for claims.
    """

    equal_s: float
    actual_s: float

    @property
    def reclaimed_s(self) -> float:
        """Rank-seconds saved; negative where waiting cost more than unequal speeds explain."""
        return self.equal_s - self.actual_s


def round_seconds(run: Run) -> Array:
    """Returns the training seconds of each round, shape (num_rounds,).

    A round may follow others of which there is no record, as in a run that was resumed where its earlier ones were gone. It has
    the seconds that its ranks account for.
    """
    seconds = np.diff(run.column("train_s"), prepend=0.0)
    follows_others = np.diff(run.column("round"), prepend=-1.0) != 1
    if follows_others.any():
        parts = [values for name in TIME_PARTS if (values := run.by_rank(name)) is not None]
        known = np.nansum(parts, axis=0).max(axis=1) if parts else np.zeros(len(seconds))
        seconds[follows_others] = np.minimum(seconds, known)[follows_others]
    return seconds


def rank_seconds(run: Run) -> dict[str, Array]:
    """Returns where each rank's training time went.

    Returns:
        By part ("compute", "claim", "wait", "merge", "control", "checkpoint", "other") seconds, shape (num_ranks,). The parts
        add up to the time that the rank took part in, unless they overlap.
    """
    present = run.by_rank(next(iter(run.rounds[0]["ranks"])))
    assert present is not None
    durations = np.where(np.isnan(present), 0.0, round_seconds(run)[:, None])
    parts = {part: np.zeros(present.shape[1]) for part in TIME_PARTS.values()}
    for name, part in TIME_PARTS.items():
        values = run.by_rank(name)
        if values is not None:
            parts[part] += np.nansum(values, axis=0)
    rest = durations.sum(axis=0) - sum(parts.values())
    parts["other"] = np.maximum(rest, 0.0)
    return parts


def time_shares(run: Run) -> dict[str, float]:
    """Returns the parts of :func:`rank_seconds` over all ranks, as shares of their sum."""
    sums = {part: float(values.sum()) for part, values in rank_seconds(run).items()}
    total = sum(sums.values()) or 1.0
    return {part: value / total for part, value in sums.items()}


def rank_speeds(run: Run) -> Array:
    """Returns samples per second of computing by round and rank, shape (num_rounds, num_ranks); NaN without samples."""
    samples, busy = run.by_rank("samples"), run.by_rank("busy_s")
    if samples is None or busy is None:
        return np.full((len(run.rounds), 1), np.nan)
    return np.divide(samples, busy, out=np.full_like(busy, np.nan), where=(busy > 0) & (samples > 0))


def mean_speeds(run: Run) -> Array:
    """Returns each rank's samples per second of computing over the whole run, shape (num_ranks,); NaN without samples."""
    samples, busy = run.by_rank("samples"), run.by_rank("busy_s")
    if samples is None or busy is None:
        return np.full(1, np.nan)
    samples, busy = np.nansum(samples, axis=0), np.nansum(busy, axis=0)
    return np.divide(samples, busy, out=np.full_like(busy, np.nan), where=(busy > 0) & (samples > 0))


def equal_shares_ceiling(run: Run) -> float | None:
    """Returns the highest utilisation that equal shares allow: the slowest rank's speed over the mean speed; None unknown."""
    speeds = mean_speeds(run)
    if np.isnan(speeds).any():
        return None
    return float(speeds.min() / speeds.mean())


def idle(run: Run) -> Idle | None:
    """Compares waiting with what equal shares would have cost at the same speeds; None where that is not known.

    A rank's cost of a sample is taken from the same round, else from the whole run. For strategies that exchange at every
    step the waiting contains the exchange, so that nothing can be said about them.
    """
    samples, busy = run.by_rank("samples"), run.by_rank("busy_s")
    wait, claim = run.by_rank("wait_s"), run.by_rank("claim_s")
    if samples is None or busy is None or wait is None or claim is None or exchange_in_wait(run):
        return None
    costs = 1.0 / np.where(np.isnan(rank_speeds(run)), mean_speeds(run), rank_speeds(run))
    costs = np.where(np.isnan(samples), np.nan, costs)
    if np.isnan(costs[~np.isnan(samples)]).any():
        return None
    equal = 0.0
    for number, row in _present(costs):
        share = np.nansum(samples[number]) / len(row)
        equal += float((share * (row.max() - row)).sum())
    return Idle(equal_s=equal, actual_s=float(np.nansum(wait) + np.nansum(claim)))


def sent_bytes(run: Run) -> Array:
    """Returns the bytes that a rank gave into the merge of each round, shape (num_rounds,); NaN where a round does not say.

    One rank sends nothing: 0. Nor does one island, of which only the first rank has bytes.
    """
    has_islands = run.config.get("island") is not None

    def is_alone(ranks: dict[str, list[float]]) -> bool:
        sent = ranks.get("payload_bytes")
        return len(next(iter(ranks.values()))) == 1 or (has_islands and sent is not None and np.count_nonzero(sent) == 1)

    alone = [is_alone(record["ranks"]) for record in run.rounds]
    return np.where(alone, 0.0, run.column("payload_bytes"))


def exchange_in_wait(run: Run) -> bool:
    """Whether the strategy's waiting contains the exchange."""
    return run.strategy in ("sync", "horovod")


def rank_reports(run: Run) -> list[RankReport]:
    """Returns what each rank did, ordered by rank."""
    speeds, mean = rank_speeds(run), mean_speeds(run)
    samples = run.by_rank("samples")
    wait = run.by_rank("wait_s")
    last = np.zeros(len(mean))
    if wait is not None:
        for _, row in _present(wait):
            last[int(row.argmin())] += 1
    hosts = run.summary.get("hosts") or []
    fastest = np.nanmax(mean) if not np.isnan(mean).all() else np.nan
    all_factors = _factors_of_usual(1.0 / speeds)
    reports = []
    for rank in range(len(mean)):
        factors = all_factors[:, rank]
        slow = np.flatnonzero(factors > _SLOW)
        reports.append(
            RankReport(
                rank=rank,
                host=str(hosts[rank]) if rank < len(hosts) else "",
                samples=0.0 if samples is None else float(np.nansum(samples[:, rank])),
                speed=float(mean[rank]),
                relative_speed=float(mean[rank] / fastest),
                last_share=float(last[rank] / len(run.rounds)),
                slow_rounds=tuple(int(run.rounds[i]["round"]) for i in slow),
                worst=float(factors[slow].max()) if len(slow) else 1.0,
            )
        )
    return reports


def _factors_of_usual(costs: Array) -> Array:
    """Each value over the median of its rank's values around it, shape (num_rounds, num_ranks); NaN where those are few."""
    half = _WINDOW // 2
    padded = np.pad(costs, ((half, half), (0, 0)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW, axis=0)
    enough = np.count_nonzero(~np.isnan(windows), axis=-1) > half
    usual = np.full_like(costs, np.nan)
    usual[enough] = np.nanmedian(windows[enough], axis=-1)
    return costs / usual


def _present(values: Array) -> Iterator[tuple[int, Array]]:
    for number, row in enumerate(values):
        present = row[~np.isnan(row)]
        if len(present):
            yield number, present
