"""Strategy ``sma``: CROSSBOW's synchronous model averaging (Koliousis et al., arXiv 1901.02244), for comparison."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.outer_step import OuterStep
from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine import optimizer_state
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.flat_model import FlatModel
from hvd_adaptive.engine.rank_warnings import BrokenRounds, warn_of_broken
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.engine.strategy import OwnState
from hvd_adaptive.strategies.synchronous import FixedWorkStrategy

log = logging.getLogger(__name__)


class SmaStrategy(FixedWorkStrategy):
    """Replicas that train by themselves and are pulled towards a central average model z after every round.

    The paper's Algorithm 1: c_i = alpha (w_i - z); w_i -= c_i; z += sum c_i + mu (z - z_previous); alpha = 1 / k for k
    learners, mu = ``outer_momentum``. When the learning rate is lowered, all replicas start again from z: at the end of a round
    whose last step has at most half of the highest rate since they did so before, schedule and ``lr_decay`` included.

    Deviations: a rank is one learner; a round of tau steps stands between two corrections, as the paper's released code has it
    with its synchronisation frequency; c_i takes w_i after the round's last step (the paper: before it). Batch
    normalization's buffers are averaged, and the last batches of a round are padded from its beginning. A replica that is
    not finite contributes nothing and starts again from z, with a new optimizer state. The momentum starts anew with the
    replicas.

    Between rounds the model is z, so that evaluation and saving see it; a replica waits in a copy. Construction is COLLECTIVE.

    Attributes:
        optimizer: the user's own.
        batch_sizes: the batch size, for every rank, shape (world_size,).
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        super().__init__(model, config, transport)
        self.optimizer = optimizer
        self.flat_model = FlatModel(model, transport)
        self._outer = self._new_outer()
        self.batch_sizes = np.full(transport.world_size, float(config.batch_size))
        self._replica: list[Tensor] | None = None
        self._lr = 0.0
        self._initial_state = copy.deepcopy(optimizer.state_dict()["state"])
        self._broken = BrokenRounds("replicas")

    def round_batches(
        self, rows: Rows, *, work: np.ndarray | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's equal share of the round, trained on its own replica; ``work`` is not used."""
        start = time.perf_counter()
        if self._replica is not None:
            self.flat_model.load_(self._replica)
        stats.merge_s += time.perf_counter() - start
        yield from self._equal_batches(rows, round_id, source=source, stats=stats)

    def end_round(self, stats: RoundStats) -> tuple[Gathered, Array, int]:
        """Corrects the replicas and moves the average model. COLLECTIVE.

        Args:
            stats: this rank's round, with the learning rate of its last step; gets the seconds of waiting, control and merge.

        Returns:
            The statistics of all ranks, each rank's alpha, and the bytes this rank sent.

        Raises:
            AgreedError: on all ranks, if no rank's parameters are finite, or one's were not in ten rounds in a row.
        """
        start = time.perf_counter()
        stats.finite = float(self.flat_model.compute_delta())
        stats.merge_s += time.perf_counter() - start
        stats.wait_s = self._transport.rendezvous("round")

        start = time.perf_counter()
        gathered = stats.gather(self._transport.allgather_stats)
        self._forget_round()
        finite = gathered["finite"] > 0
        if not finite.any():
            raise AgreedError(
                "the parameters of ALL ranks hold NaN or Inf: the run has diverged. Lower the learning rate, or "
                "warm it up for longer."
            )
        alpha = self._config.sma_alpha if self._config.sma_alpha is not None else 1.0 / finite.sum()
        weight = np.where(finite, alpha, 0.0)
        self._broken.count(finite, gathered["num_updates"] > 0)
        lr = float(gathered["lr"].min())
        # A schedule that moves with every batch is no restart in every round.
        restart = 0 < lr <= self._lr / 2
        self._lr = lr if restart else max(lr, self._lr)
        stats.control_s = time.perf_counter() - start

        start = time.perf_counter()
        rank = self._transport.rank
        self._replica = None if restart or not finite[rank] else self._corrected(alpha)
        if not finite[rank]:
            # NaN in its momentum would break each later round.
            optimizer_state.reset_(self.optimizer, self._initial_state)
        self.flat_model.merge_(
            self._outer, weight=float(weight[rank]), buffer_weight=float(finite[rank] / finite.sum())
        )
        if restart:
            self._outer = self._new_outer()
        if rank == 0:
            if restart:
                log.info("the learning rate has fallen to half or less: all replicas start again from the average model")
            warn_of_broken(finite, "replicas")
        stats.merge_s += time.perf_counter() - start
        return gathered, weight, self.flat_model.payload_bytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the average model and its momentum (shared), and this rank's replica and optimizer state."""
        return {
            "shared": {"model": self.flat_model.state_dict(), "outer": self._outer.state_dict(), "lr": self._lr},
            "own": {"replica": self._replica, "optimizer": self.optimizer.state_dict()},
        }

    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a state; with another number of ranks all replicas start from the average model."""
        self.flat_model.load_state_dict(shared["model"])
        self._outer.load_state_dict(shared["outer"], device=self.flat_model.device)
        self._lr = shared["lr"]
        own = own_of(self._transport.rank % world_size)
        same = world_size == self._transport.world_size and own["replica"] is not None
        device = self.flat_model.device
        self._replica = [t.to(device, copy=True) for t in own["replica"]] if same else None
        self.optimizer.load_state_dict(own["optimizer"])

    @torch.no_grad()
    def _corrected(self, alpha: float) -> list[Tensor]:
        # w - alpha (w - z), as z + (1 - alpha) (w - z).
        return [g.delta.mul(1.0 - alpha).add_(g.weights) for g in self.flat_model.parameter_groups]

    def _new_outer(self) -> OuterStep:
        return OuterStep("momentum", momentum=self._config.momentum_of_merges)
