"""Strategy ``local``: ranks claim batches from a shared cursor, train by themselves, and merge weighted deltas."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.config import Config
from hvd_adaptive.core.balance import lr_multiplier, next_batch_sizes, speed_shares
from hvd_adaptive.core.dispatch import MegaBatch, claim_size
from hvd_adaptive.core.outer import OuterStep
from hvd_adaptive.core.weights import Perturbation, merge_weights
from hvd_adaptive.train import optimizer_state
from hvd_adaptive.train.batches import Batch, BatchSource, Rows, prefetched
from hvd_adaptive.train.flat_model import FlatModel
from hvd_adaptive.train.overlap import OverlappedMerge
from hvd_adaptive.train.records import Array, GatheredStats, RoundStats
from hvd_adaptive.train.row_merge import RowMerge
from hvd_adaptive.train.touched_rows import TouchedRows, sparse_parameters, why_dense
from hvd_adaptive.transport.base import AgreedError, Transport, agree_equal

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
        touched = self._mark_rows(model)
        self.flat_model = FlatModel(model, transport, touched)
        self._rows = self._row_merge()
        self._round = 0
        self._outer = OuterStep(
            config.outer_step, lr=config.outer_learning_rate, momentum=config.outer_momentum
        )
        self._overlap = None
        if config.overlap_merge:
            self._overlap = OverlappedMerge(self.flat_model, self._outer, transport)
        self._initial_state = copy.deepcopy(optimizer.state_dict()["state"])
        self.batch_sizes = np.full(transport.world_size, float(config.batch_size))
        self._shares = np.full(transport.world_size, 1.0 / transport.world_size)
        self._warming_up = False
        self._cursor_key = ""

    def warm_up(self, active: bool) -> None:
        """Switches the warm-up's smallest batch size on, or back to the starting size after it."""
        if active != self._warming_up:
            size = self._config.batch_size_bounds[0] if active else self._config.batch_size
            self.batch_sizes = np.full(len(self.batch_sizes), float(size))
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

    def drain(self) -> None:
        """Merges what an overlapped merge has on the way. COLLECTIVE."""
        if self._overlap is not None:
            self._overlap.drain_()

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
        if self._overlap is not None:
            start = time.perf_counter()
            self._overlap.start_round_()
            stats.merge_s += time.perf_counter() - start
        mega_batch = MegaBatch(rows, work)
        rank = self._transport.rank
        self._round = round_id
        key = self._cursor_key = f"claim.{round_id}"
        # A batch size is in samples, a claim in work.
        work_per_sample = mega_batch.total_work / max(1, len(rows))
        full_claims = self.batch_sizes * work_per_sample

        seen = ""

        def fetch(pending: int) -> Batch | None:
            # A compare-and-set: a claim's size depends on the cursor, and only then can no claim be cut to a sliver.
            nonlocal seen
            while (position := int(seen.partition(":")[0] or 0)) < mega_batch.total_work:
                size = claim_size(
                    remaining=mega_batch.total_work - position,
                    full_claim=full_claims[rank],
                    own_pending=pending,
                    others_full_claims=full_claims.sum() - full_claims[rank],
                    speed_share=self._shares[rank],
                    smallest=2 * work_per_sample,
                )
                # The rank makes the value unique: two ranks may want to move the cursor to the same place.
                wanted = f"{position + size}:{rank}"
                seen = self._transport.compare_set(key, seen, wanted)
                if seen == wanted:
                    claimed = mega_batch.claimed(position, position + size)
                    if len(claimed):
                        return source.load(claimed, size)
            return None

        @contextmanager
        def timed() -> Iterator[None]:
            start = time.perf_counter()
            yield
            stats.claim_s += time.perf_counter() - start

        yield from prefetched(fetch, timed)

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
        interval = self._config.hash_interval
        # With the session's check of hashes, so that a write which it would find is found here first, and merged.
        if self._overlap is not None:
            finite = self._overlap.compute_progress()
        else:
            finite = self.flat_model.compute_delta(verify=interval > 0 and (self._round + 1) % interval == 0)
        stats.finite = float(finite)
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
        if self._rows is not None:
            self._rows.exchange(weight)
        own, own_buffers = float(weight[rank]), float(convex[rank])
        if self._overlap is not None:
            self._overlap.merge_(weight=own, buffer_weight=own_buffers)
        else:
            self.flat_model.merge_(self._outer, weight=own, buffer_weight=own_buffers, rows=self._rows)
        if self._rows is not None:
            stats.merge_rows = self._rows.num_rows
            self._rows.observe(time.perf_counter() - start, self.flat_model.payload_bytes)
        self._merge_optimizer_state(finite=finite, weight=float(convex[rank]))
        if not all_finite.all() and rank == 0:
            log.warning(
                "ranks %s had NaN or Inf in their parameters: they contributed nothing and start again from the merged model. "
                "If this repeats, lower --lr.",
                np.flatnonzero(~all_finite).tolist(),
            )
        if rank == 0:
            self._transport.forget(self._cursor_key)
        stats.merge_s += delta_s + time.perf_counter() - start
        return gathered, weight, self.flat_model.payload_bytes

    def _mark_rows(self, model: nn.Module) -> dict[int, TouchedRows]:
        config = self._config
        if config.overlap_merge or (config.sparse_merge == "never" and not config.row_weights):
            return {}
        touched, refused = {}, []
        for name, parameter in sparse_parameters(model).items():
            if (reason := why_dense(self.optimizer, parameter)) is None:
                touched[id(parameter)] = TouchedRows(name, parameter, self.optimizer)
            else:
                refused.append(f"{name} is stepped by {reason}")
        agree_equal(
            self._transport,
            {"sparse parameters": [t.name for t in touched.values()]},
            "Give every rank the same model with the same sparse=True.",
        )
        if not touched and (config.sparse_merge == "always" or config.row_weights):
            option = "sparse_merge 'always'" if config.sparse_merge == "always" else "row_weights"
            raise ValueError(
                f"{option} needs an nn.Embedding or nn.EmbeddingBag with sparse=True and SGD without momentum and weight "
                f"decay, Adagrad or SparseAdam, got {'; '.join(refused) or 'a model without sparse gradients'}"
            )
        if refused and self._transport.rank == 0:
            log.warning("all rows of sparse parameters are merged: %s", "; ".join(refused))
        return touched

    def _row_merge(self) -> RowMerge | None:
        ranges = self.flat_model.row_ranges
        if not ranges:
            return None
        rows_bytes = sum(r.num_rows * r.row_bytes for r in ranges)
        return RowMerge(
            ranges,
            self._transport,
            mode=self._config.sparse_merge,
            row_weights=self._config.row_weights,
            rest_bytes=self.flat_model.payload_bytes - rows_bytes,
        )

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
        config = self._config
        self._shares = speed_shares(gathered["work"], gathered["busy_s"])
        if not self._warming_up:
            low, high = config.batch_size_bounds
            self.batch_sizes = next_batch_sizes(
                config.batch_size_rule,
                self.batch_sizes,
                gathered["num_updates"],
                min_batch_size=low,
                max_batch_size=high,
                step=config.batch_size_step_samples,
            )

    def _merge_optimizer_state(self, *, finite: bool, weight: float) -> None:
        if self._config.optimizer_state == "average":
            optimizer_state.average_(self.optimizer, self._transport, weight)
        if self._config.optimizer_state == "reset" or (not finite and self._config.optimizer_state == "keep"):
            optimizer_state.reset_(self.optimizer, self._initial_state)
