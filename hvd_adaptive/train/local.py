"""Strategy ``local``: ranks claim batches from a shared cursor, train by themselves, and merge weighted deltas."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.config import Config
from hvd_adaptive.core.balance import lr_multiplier, speed_shares
from hvd_adaptive.core.dispatch import MegaBatch, claim_size
from hvd_adaptive.core.outer import OuterStep
from hvd_adaptive.core.weights import Perturbation, merge_weights
from hvd_adaptive.train import optimizer_state
from hvd_adaptive.train.batches import Batch, BatchSource, Rows, prefetched
from hvd_adaptive.train.claims import Claims, OwnPart, SharedCursor
from hvd_adaptive.train.control import RoundControl
from hvd_adaptive.train.flat_model import FlatModel
from hvd_adaptive.train.memory import cut, free_cached
from hvd_adaptive.train.records import Array, GatheredStats, RoundRecord, RoundStats
from hvd_adaptive.transport.base import AgreedError, Transport

log = logging.getLogger(__name__)


class LocalStrategy:
    """Adaptive SGD (arXiv 2110.07029) with the rules of ``Config``. Construction is COLLECTIVE.

    Attributes:
        optimizer: the user's own.
        batch_sizes: the ranks' batch sizes, samples, shape (world_size,), equal on every rank.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        self.optimizer = optimizer
        self._config = config
        self._transport = transport
        self.flat_model = FlatModel(model, transport)
        self._outer = OuterStep(
            config.outer_step, lr=config.outer_learning_rate, momentum=config.outer_momentum
        )
        self._initial_state = copy.deepcopy(optimizer.state_dict()["state"])
        self.batch_sizes = np.full(transport.world_size, float(config.batch_size))
        self._shares = np.full(transport.world_size, 1.0 / transport.world_size)
        self._warming_up = False
        self._cursor_key = ""
        self._control = RoundControl(config, transport.world_size, speaks=transport.rank == 0)
        # This rank's own, which the others know after the round.
        self._ceiling = np.inf
        self._device = next(model.parameters()).device
        self._failed = False
        self._returned: list[tuple[Rows, int]] = []
        self._dataset_size = 0

    @property
    def mega_batch(self) -> int:
        """Samples of the next round over all ranks."""
        return self._control.mega_batch

    def warm_up(self, active: bool) -> None:
        """Switches the warm-up's smallest batch size on, or back to the starting size after it."""
        if active != self._warming_up:
            size = self._config.batch_size_bounds[0] if active else self._config.batch_size
            self.batch_sizes = np.minimum(np.full(len(self.batch_sizes), float(size)), self._control.ceilings)
            self._warming_up = active

    def lr_multiplier(self, batch: Batch) -> float:
        """Returns the factor on the learning rate for a batch of this many samples."""
        return lr_multiplier(
            self._config.lr_rule,
            batch_size=batch.num_samples,
            reference_batch_size=self._config.reference_batch_size or self._config.batch_size,
        )

    def take_foreign_seconds(self) -> float:
        """Returns compute seconds of this step that are not the rank's own work: none."""
        return 0.0

    def take_back(self, batch: Batch) -> bool:
        """Gives the batch's samples to this rank again, as halves, and half its size is this rank's ceiling from now on."""
        self._ceiling = min(self._ceiling, batch.num_samples // 2)
        self._returned.append((batch.rows, batch.work))
        self._failed = True
        return True

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
        mega_batch = MegaBatch(rows, work)
        rank = self._transport.rank
        # A control that was loaded from a checkpoint may know more.
        self._ceiling = min(self._ceiling, float(self._control.ceilings[rank]))
        self._cursor_key = f"claim.{round_id}"
        # A batch size is in samples, a claim in work.
        work_per_sample = mega_batch.total_work / max(1, len(rows))
        full_claims = self.batch_sizes * work_per_sample
        dynamic = self._config.dispatch == "dynamic"
        claims = self._claims(mega_batch.total_work)

        def fetch(pending: int) -> Batch | None:
            def size(remaining: int) -> int:
                return claim_size(
                    remaining=remaining,
                    full_claim=min(full_claims[rank], self._ceiling * work_per_sample),
                    own_pending=pending,
                    others_full_claims=full_claims.sum() - full_claims[rank],
                    # Nobody else takes of an own part.
                    speed_share=self._shares[rank] if dynamic else 1.0,
                    smallest=2 * work_per_sample,
                )

            while (claim := claims.claim(size)) is not None:
                claimed = mega_batch.claimed(*claim)
                if len(claimed):
                    return source.load(claimed, claim[1] - claim[0])
            return None

        @contextmanager
        def timed() -> Iterator[None]:
            start = time.perf_counter()
            yield
            stats.claim_s += time.perf_counter() - start

        for batch in prefetched(fetch, timed):
            if batch.num_samples <= self._ceiling:
                yield batch
            else:
                # Claimed before the ceiling was known.
                self._returned.append((batch.rows, batch.work))
            yield from self._repeated(source, timed)

    def _repeated(self, source: BatchSource, timed: Callable[[], AbstractContextManager[None]]) -> Iterator[Batch]:
        """Yields the samples of batches that were too large, until all have been computed."""
        if self._failed:
            free_cached(self._device)
            self._failed = False
        while self._returned:
            rows, work = self._returned.pop()
            parts = cut(rows, work, most=int(min(self._ceiling, len(rows))))
            if len(parts) > 1:
                self._returned += reversed(parts)
                continue
            with timed():
                batch = source.load(rows, work)
            yield batch

    def _claims(self, total_work: int) -> Claims:
        world_size, rank = self._transport.world_size, self._transport.rank
        if self._config.dispatch == "dynamic":
            return SharedCursor(self._transport, self._cursor_key, total_work=total_work)
        shares = self._shares if self._config.dispatch == "proportional" else np.ones(world_size)
        edges = np.rint(np.concatenate(([0.0], np.cumsum(shares))) / shares.sum() * total_work)
        return OwnPart(int(edges[rank]), int(edges[rank + 1]))

    def end_round(self, stats: RoundStats) -> tuple[GatheredStats, Array, int]:
        """Merges the ranks' models and rebalances. COLLECTIVE.

        Args:
            stats: this rank's round; gets the seconds of waiting, control and merge.

        Returns:
            The statistics of all ranks as they were before the merge, the merge weights, and the bytes this rank sent.

        Raises:
            AgreedError: on all ranks, if no rank's parameters are finite.
        """
        start = time.perf_counter()
        finite = self.flat_model.compute_delta()
        stats.finite = float(finite)
        stats.ceiling = self._ceiling if np.isfinite(self._ceiling) else 0.0
        if self._config.perturbation:
            stats.norm_per_parameter = self.flat_model.norm_per_parameter()
        delta_s = time.perf_counter() - start
        stats.wait_s = self._transport.rendezvous("round")

        start = time.perf_counter()
        gathered = GatheredStats(self._transport.allgather_stats(stats.vector()))
        all_finite = gathered["finite"] > 0
        weight = self._weights(gathered)
        self._rebalance(gathered)
        stats.control_s = time.perf_counter() - start

        start = time.perf_counter()
        rank = self._transport.rank
        convex = weight / weight.sum()
        self.flat_model.merge_(self._outer, weight=float(weight[rank]), buffer_weight=float(convex[rank]))
        self._merge_optimizer_state(finite=finite, weight=float(convex[rank]))
        if not all_finite.all() and rank == 0:
            log.warning(
                "ranks %s had NaN or Inf in their parameters: they contributed nothing and start again from the merged model. "
                "If this repeats, lower --lr.",
                np.flatnonzero(~all_finite).tolist(),
            )
        if rank == 0:
            self._transport.forget(self._cursor_key)
        stats.merge_s = delta_s + time.perf_counter() - start
        return gathered, weight, self.flat_model.payload_bytes

    def _weights(self, gathered: GatheredStats) -> Array:
        config = self._config
        perturbation = None
        if config.perturbation:
            perturbation = Perturbation(
                threshold=config.perturbation_threshold, delta=config.perturbation_delta
            )
        try:
            return merge_weights(
                config.merge_weights,
                num_updates=gathered["num_updates"],
                num_samples=gathered["num_samples"],
                batch_sizes=gathered["batch_size"],
                finite=gathered["finite"] > 0,
                norm_per_parameter=gathered["norm_per_parameter"],
                perturbation=perturbation,
            )
        except RuntimeError as error:
            # Every rank has the same statistics, so every rank is here.
            raise AgreedError(str(error)) from None

    def _rebalance(self, gathered: GatheredStats) -> None:
        self._shares = speed_shares(gathered["work"], gathered["busy_s"])
        self.batch_sizes = self._control.next_batch_sizes(
            self.batch_sizes, gathered, warming_up=self._warming_up
        )

    def after_round(self, record: RoundRecord) -> None:
        """Chooses the next merge period."""
        self._control.after_round(record, self._dataset_size)

    def _merge_optimizer_state(self, *, finite: bool, weight: float) -> None:
        if self._config.optimizer_state == "average":
            optimizer_state.average_(self.optimizer, self._transport, weight)
        if self._config.optimizer_state == "reset" or (not finite and self._config.optimizer_state == "keep"):
            optimizer_state.reset_(self.optimizer, self._initial_state)
