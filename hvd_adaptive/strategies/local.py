"""Strategy ``local``: ranks claim batches from a shared cursor, train by themselves, and merge weighted deltas."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.batch_sizes import lr_multiplier, speed_shares
from hvd_adaptive.algorithm.ledger import ClaimRule, MegaBatch, own_parts
from hvd_adaptive.algorithm.merge_period import capped_mega_batch
from hvd_adaptive.algorithm.round_control import RoundControl
from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.claim_pool import open_claims
from hvd_adaptive.engine.claims import Claim, Claims, OwnPart
from hvd_adaptive.engine.merge import Merge
from hvd_adaptive.engine.out_of_memory import MemoryCeiling
from hvd_adaptive.engine.overlap import OverlappedMerge
from hvd_adaptive.engine.records import RoundClaims, RoundRecord, RoundStats
from hvd_adaptive.engine.replay import RecordedClaims, WatchedClaims
from hvd_adaptive.engine.settled_claims import FirstClaims, SettledClaims
from hvd_adaptive.engine.strategy import OwnState, Removable
from hvd_adaptive.strategies.own_micro_batches import OwnMicroBatches

log = logging.getLogger(__name__)


class LocalStrategy:
    """Adaptive SGD (arXiv 2110.07029) with the rules of ``Config``. Construction is COLLECTIVE.

    Attributes:
        optimizer: the user's own.
        inexact: empty.
        merge: what makes the ranks' models one.
        flat_model: its global model.
        repeat: the next round as it was recorded; None: ranks claim from the shared cursor.
        claimed: this rank's claims of the round.
        hooks: on the model and the optimizer.
    """

    # Whether workers read the first batches of a round before it begins; and whether a rank's step uses its own gradients alone.
    _settles = _steps_alone = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        self.optimizer = optimizer
        # torch.distributed does not tell what has arrived: sums would come late.
        self.merge = Merge(model, optimizer, config, transport, beside_steps=transport.backend != "torch")
        # Set by the merge alone.
        short_rounds = config.mega_batch is None and self.merge.config.mega_batch is not None
        merges_from = self.merge.merges_from if config.merges_per_round is None else None
        config = self._config = self.merge.config
        self._transport = transport
        self.flat_model = self.merge.flat_model
        self.hooks: list[Removable] = [part.touched for part in self.flat_model.row_ranges]
        if (rule := self.merge.rule) is not None:
            self.hooks.append(optimizer.register_step_pre_hook(lambda *_: rule.before_step()))
            self.hooks.append(optimizer.register_step_post_hook(lambda *_: rule.after_step()))
        self._round = 0
        self._sizes = np.full(transport.world_size, float(config.batch_size))
        self._shares = np.full(transport.world_size, 1.0 / transport.world_size)
        self._micro_batches: OwnMicroBatches | None = None
        if config.micro_batch_size is not None and self._steps_alone:
            self._micro_batches = OwnMicroBatches(model, optimizer, config, transport)
            self.hooks += self._micro_batches.hooks
        self.inexact: list[str] = []
        self._warming_up = False
        self._forget_claims: Callable[[], None] = lambda: None
        self._control = RoundControl(
            config, transport.world_size, speaks=transport.rank == 0, short_rounds=short_rounds, merges_from=merges_from,
            can_narrow=self.merge.codec.can_narrow,
        )  # fmt: skip
        # This rank's own, which the others know after the round.
        self._memory = MemoryCeiling(next(model.parameters()).device)
        self._dataset_size = 0
        self.repeat: RoundClaims | None = None
        self.claimed: list[Claim] = []
        self._claims: Claims
        self._mega_batch: MegaBatch | None = None
        self._span = (0, 0)  # The work that this rank's claims are from.
        # Claims that were settled before: of this round, and of the next one.
        self._settled_now: SettledClaims | None = None
        self._settled: SettledClaims | None = None

    @property
    def batch_sizes(self) -> Array:
        """The ranks' batch sizes, samples, shape (world_size,), equal on every rank."""
        return self._sizes

    @property
    def round_unit(self) -> int:
        """Samples of which a round is a whole number, except at the end of an epoch."""
        return self._unit * len(self._sizes) if self._equally_many else self._unit

    @property
    def _equally_many(self) -> bool:
        """Whether each rank takes as many whole batches as every other one."""
        return bool(self._control.takes_whole_batches and (self._sizes == self._sizes[0]).all())

    @property
    def _unit(self) -> int:
        """Samples of which a claim is a whole number: a micro-batch's, or a batch's where only whole ones are taken."""
        return self._config.micro_batch_size or (round(self._sizes[0]) if self._equally_many else 1)

    def mega_batch_of(self, dataset_size: int) -> int:
        """Returns the samples of the next round over all ranks."""
        return capped_mega_batch(self._config, self._control.mega_batch, dataset_size, len(self._sizes))

    def warm_up(self, active: bool) -> None:
        """Switches the warm-up's smallest batch size on, or back to the starting size after it."""
        if active != self._warming_up:
            size = self._config.batch_size_bounds[0] if active else self._config.batch_size
            self._sizes = np.minimum(np.full(len(self._sizes), float(size)), self._control.ceilings)
            self._warming_up = active

    def lr_multiplier(self, batch: Batch) -> float:
        """Returns the factor on the learning rate for a batch of this many samples."""
        return lr_multiplier(
            self._config.lr_rule,
            batch_size=self._step_samples(batch),
            reference_batch_size=self._config.reference_batch_size or self._config.batch_size,
        )

    def _step_samples(self, batch: Batch) -> int:
        return batch.num_samples

    def take_foreign_seconds(self) -> float:
        """Returns compute seconds of this step that are not the rank's own work: none."""
        return 0.0

    def synchronize(self) -> bool:
        """Returns True at once: a step uses the rank's own gradients."""
        if self._micro_batches is not None:
            self._micro_batches.synchronize()
        return True

    def take_back(self, batch: Batch) -> bool:
        """Gives the batch's samples to this rank again, as halves, and half its size is this rank's ceiling from now on.

        Raises:
            RuntimeError: for micro-batches, whose size is fixed.
        """
        if self._micro_batches is not None:
            size = self._config.micro_batch_size
            raise RuntimeError(
                f"rank {self._transport.rank} ran out of memory with micro-batches of {size} samples, which cannot be halved: "
                "lower micro_batch_size"
            )
        self._memory.take_back(batch)
        return True

    def repeat_round(self, recorded: RoundClaims) -> None:
        """Makes the next round the recorded one: its batch sizes, which may have followed from seconds, and its claims."""
        self._sizes = np.array(recorded.batch_size)
        self.repeat = recorded

    def drain(self) -> None:
        """Merges what is on the way beside steps. COLLECTIVE."""
        if self.merge.overlap is not None:
            self.merge.overlap.drain_()

    def round_batches(
        self, rows: Rows, *, work: np.ndarray | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's batches of a mega-batch until its cursor is at the end.

        Args:
            rows: the mega-batch's rows in dispatch order, the same on every rank.
            work: their cost, or None for one unit a sample.
            source: makes batches of rows.
            round_id: names the cursor; never used twice.
            stats: gets the seconds spent waiting for batches.
        """
        self._dataset_size = len(source)
        merges = self._control.merges_of(len(rows), self._sizes)
        self.merge.begin_round(merges, narrow=self._control.is_narrow)
        overlap = self.merge.overlap
        if overlap is not None:
            start = time.perf_counter()
            expected = max(1.0, self._work_of(len(rows), float(self._sizes.mean())))
            overlap.start_round_(work=expected, merges=merges)
            stats.merge_s += time.perf_counter() - start
        mega_batch = self._mega_batch = MegaBatch(rows, work)
        rank = self._transport.rank
        # A control that was loaded from a checkpoint may know more.
        self._memory.samples = min(self._memory.samples, float(self._control.ceilings[rank]))
        self._round = round_id
        rule_of = functools.partial(
            ClaimRule.of_round,
            batch_sizes=self._sizes,
            speed_shares=self._shares,
            work_per_sample=mega_batch.total_work / max(1, len(rows)),
            dynamic=self._config.dispatch == "dynamic",
            unit=self._unit,
            pads=self._config.micro_batch_size is not None,
        )
        rule = rule_of(rank)
        self._settled_now = self._settle_claims(source, mega_batch)
        claims = self._claims = WatchedClaims(self._open_claims(mega_batch.total_work, rule_of, merges=merges))
        self.claimed = claims.taken
        # Of each batch that was loaded and not yet computed: the number of its claim, and how a replay has to cut it.
        loaded: deque[tuple[int, list[int]]] = deque()

        def fetch(pending: int) -> Batch | None:
            def size(remaining: int) -> int:
                others = mega_batch.total_work - remaining - sum(stop - start for start, stop, *_ in claims.taken)
                return rule.claim(remaining, pending=pending, ceiling=self._memory.samples, others_claimed=others)

            while (claim := claims.claim(size)) is not None:
                start, stop, *parts = claim
                claimed = mega_batch.claimed(start, stop)
                if len(claimed):
                    loaded.append((len(claims.taken) - 1, parts))
                    batch = source.request(claimed, stop - start)
                    (first, end), place = self._span, self._place(len(claims.taken) - 1)
                    batch._place = mega_batch.num_rows_before((place - first) * mega_batch.total_work // (end - first))
                    return batch
            return None

        start = time.perf_counter()
        for batch in source.prefetched(fetch, stats):
            if not stats.first_batch_s:
                stats.first_batch_s = time.perf_counter() - start
            number, parts = loaded.popleft()
            if overlap is not None:
                self._reach(overlap, self._place(number), stats)
            if self._micro_batches is not None:
                self._micro_batches.follow(batch)
            sizes = yield from self._memory.batches(batch, parts, source, stats)
            claims.taken[number] = (*claims.taken[number][:2], *sizes)
        if overlap is not None:
            self._reach(overlap, self._span[1] if claims.end is None else claims.end, stats)

    def _place(self, number: int) -> int:
        """Returns where in the round a claim of this rank counts, in work: ranks take what was settled in turns."""
        # A replay knows claims only.
        if (settled := self._settled_now) is not None and not self._config.repeatable:
            num_own = len(settled.of_rank(self._transport.rank))
            if number < num_own:
                return settled.total_work * number // num_own
        return self.claimed[number][0]

    def _reach(self, overlap: OverlappedMerge, place: int, stats: RoundStats) -> None:
        """Lets merges beside steps go on to a place of the round, in work."""
        start = time.perf_counter()
        first, end = self._span
        num_samples, size = self._computed(stats), stats.batch_size
        # Who has no part at all is at its end.
        position = (place - first) / (end - first) if end > first else 1.0
        overlap.reach_(position, self._work_of(num_samples, size), num_samples / size)
        stats.merge_s += time.perf_counter() - start

    def _computed(self, stats: RoundStats) -> float:
        """Returns the samples of this round's steps so far."""
        return stats.num_samples

    def _work_of(self, num_samples: float, batch_size: float) -> float:
        """Returns what weighs a rank: samples, or updates."""
        return num_samples if self._config.weight_rule == "samples" else num_samples / batch_size

    def close_round(self) -> None:
        """Ends the round at the shared cursor; where each rank has a part of its own, goes on to its end."""
        self._claims.close()

    def round_samples(self, num_rows: int) -> int:
        """Returns the samples that were claimed."""
        end = self._claims.end
        return num_rows if end is None or self._mega_batch is None else self._mega_batch.num_rows_before(end)

    def _check_claims(self, handed: int) -> None:
        """Raises RuntimeError unless the ranks' loops were given what was claimed: the ledger must not count anything else."""
        if self._mega_batch is None:
            return  # no round was opened: there is no cursor
        expected = self.round_samples(len(self._mega_batch.rows))
        if self.repeat is None and handed != expected:
            raise RuntimeError(
                f"the ranks got {handed} samples of round {self._round}, which has {expected}: a loop was left within the round "
                "(end it by session.stop()), or its cursor was moved by something else than claims. See docs/security.md"
            )

    def _settle_claims(self, source: BatchSource, mega_batch: MegaBatch) -> SettledClaims | None:
        """Settles claims of the next round; returns those of this one, None where there are none."""
        settled, self._settled = self._settled, None
        # Where a thread reads, it reads one batch, in the time of one.
        if source.num_prefetched > 1 and self._settles and self._config.dispatch == "dynamic" and self.repeat is None:
            rank, many = self._transport.rank, self._equally_many
            coming = SettledClaims.after(
                mega_batch, source, batch_sizes=self._sizes, shares=self._shares, unit=self._unit, equally_many=many
            )
            source.expect([] if coming is None else coming.rows_of_rank(rank, source.following[1]))
            self._settled = coming
        return settled if settled is not None and settled.fit(source, mega_batch) else None

    def _open_claims(self, total_work: int, rule_of: Callable[[Sequence[int]], ClaimRule], *, merges: int) -> Claims:
        world_size, rank = self._transport.world_size, self._transport.rank
        self._span = (0, total_work)
        if self.repeat is not None:
            own = self.repeat.claims[rank]
            if self._config.dispatch != "dynamic" and own:
                self._span = (own[0][0], own[-1][1])
            return RecordedClaims(own, end=self.repeat.end)
        if self._config.dispatch == "dynamic":
            settled = self._settled_now
            start = settled.total_work if settled is not None else 0
            claims: Claims
            # Beside sums a claim of each batch would wait.
            size, equal = round(self._sizes[0]), None
            if merges > 1 and self._equally_many:
                equal = size, self._unit, self._control.stretch_of(world_size * size)
            claims, self._forget_claims = open_claims(
                self._transport, self._round, total_work=total_work, start=start, rule_of=rule_of, equal=equal
            )
            return claims if settled is None else FirstClaims(settled.of_rank(rank), claims)
        shares = self._shares if self._config.dispatch == "proportional" else np.ones(world_size)
        edges = own_parts(shares, total_work, unit=self._unit)
        self._span = (int(edges[rank]), int(edges[rank + 1]))
        return OwnPart(*self._span)

    def end_round(self, stats: RoundStats) -> tuple[Gathered, Array, int]:
        """Merges the ranks' models and rebalances. COLLECTIVE.

        Args:
            stats: this rank's round; gets the seconds of waiting, control and merge.

        Returns:
            The statistics of all ranks as they were before the merge, the merge weights, and the bytes this rank sent.

        Raises:
            AgreedError: on all ranks, if no rank's parameters are finite.
        """
        start = time.perf_counter()
        interval = self._config.hash_interval
        # With the session's check of hashes, so that a write which it would find is found here first, and merged.
        self.merge.measure_(stats, verify=interval > 0 and (self._round + 1) % interval == 0)
        stats.ceiling = self._memory.samples if np.isfinite(self._memory.samples) else 0.0
        delta_s = time.perf_counter() - start
        stats.wait_s = self._transport.rendezvous("round")

        start = time.perf_counter()
        gathered = self._gather(stats)
        self._check_claims(int(gathered["handed_samples"].sum()))
        weight = self.merge.weights(gathered)
        self._rebalance(gathered)
        stats.control_s = time.perf_counter() - start

        start = time.perf_counter()
        self.merge.apply_(gathered, weight)
        stats.merge_rows = self.merge.num_rows
        self._forget_claims()
        stats.average_s = self.merge.state_s
        stats.merge_s += delta_s + time.perf_counter() - start - stats.average_s
        return gathered, weight, self.flat_model.payload_bytes

    def _gather(self, stats: RoundStats) -> Gathered:
        return stats.gather(self._transport.allgather_stats)

    def state_dict(self) -> dict[str, Any]:
        """Returns the global model, the outer step's velocity, the balance and what merges beside steps have on the way
        (shared), and this rank's optimizer state and progress."""
        state = self.merge.state_dict()
        state["shared"] |= {
            "batch_sizes": self._sizes,
            "shares": self._shares,
            "warming_up": self._warming_up,
            "control": self._control.state_dict(),
        }
        return state

    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a state; the balance only where the number of ranks is the same, else it starts anew."""
        self._load_shared(shared, world_size=world_size)
        self.merge.load_own(
            shared, own_of(self._transport.rank % world_size), same_ranks=world_size == self._transport.world_size
        )

    def _load_shared(self, shared: dict[str, Any], *, world_size: int) -> None:
        self.merge.load_shared(shared)
        self._control.load_state_dict(shared["control"])
        if world_size == self._transport.world_size:
            self._sizes = self._control.resumed_batch_sizes(shared["batch_sizes"], shared["control"])
            self._shares, self._warming_up = shared["shares"].copy(), shared["warming_up"]

    def _rebalance(self, gathered: Gathered) -> None:
        self._shares = speed_shares(gathered["work"], gathered["busy_s"])
        self._sizes = self._control.next_batch_sizes(self._sizes, gathered, warming_up=self._warming_up)

    def after_round(self, record: RoundRecord) -> None:
        """Chooses the next merge period."""
        self._control.after_round(record, self._dataset_size)
