"""A run in virtual time: the rules that real ranks obey (algorithm/), and seconds that the cluster's description gives.

Ranks claim, compute and wait as events on one clock; dispatch, balance, weights, shares and merge periods are the very
objects of a real run. What a merge does to the model is not simulated: only when, and what it costs.
"""

from __future__ import annotations

from hvd_adaptive.algorithm.ledger import Ledger, round_size
from hvd_adaptive.algorithm.slowdown import Slowdown
from hvd_adaptive.config import Config
from hvd_adaptive.research.heterogpu import add_rules
from hvd_adaptive.simulate.cluster import Cluster
from hvd_adaptive.simulate.step_times import StepTimes
from hvd_adaptive.simulate.virtual_strategies import Round, VirtualLocal, VirtualStrategy, VirtualSync

# An epoch that no run comes to the end of.
_NO_END = 1 << 60


def simulate(config: Config, cluster: Cluster, *, num_rounds: int, dataset_size: int | None = None) -> list[Round]:
    """Plays a run in virtual time; the same arguments give the same rounds.

    Args:
        config: the rules; its seed also draws the steps' times.
        cluster: what they meet.
        num_rounds: rounds to play.
        dataset_size: samples of an epoch, which rounds do not cross; None: no end.

    Raises:
        ValueError: if the rules and the cluster do not go together.
    """
    add_rules()
    size = dataset_size or _NO_END
    slowdown = Slowdown(config.slowdown, world_size=cluster.world_size)
    steps = StepTimes(cluster, slowdown, seed=config.seed)
    strategy: VirtualStrategy = (VirtualLocal if config.strategy == "local" else VirtualSync)(config, cluster, steps)
    ledger, now, num_samples, last_round_s = Ledger(), 0.0, 0, 0.0
    rounds: list[Round] = []
    for _ in range(num_rounds):
        count = round_size(
            ledger.cursor, dataset_size=size, mega_batch=strategy.mega_batch, unit=strategy.round_unit
        )
        steps.begin_round(now, last_round_s)
        end, stats, sent_bytes, num_steps = strategy.play(count, now)
        ledger = ledger.advance(count, size)
        num_samples += count
        done = Round(
            epoch=ledger.epoch + ledger.cursor / size,
            train_s=end,
            num_samples=num_samples,
            stats=stats,
            own_samples=steps.own_samples(config.batch_size, now, end),
            sent_bytes=sent_bytes,
            num_steps=num_steps,
        )
        rounds.append(done)
        now, last_round_s = end, end - now
        strategy.after_round(done, size)
    return rounds
