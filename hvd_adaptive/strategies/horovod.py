"""Strategy ``horovod``: what everybody has today, Horovod's DistributedOptimizer with equal batches, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.statistics import Array, Gathered
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource, Rows
from hvd_adaptive.engine.flat_model import check_trainable
from hvd_adaptive.engine.records import RoundStats
from hvd_adaptive.engine.strategy import OwnState
from hvd_adaptive.strategies.sync_optimizer import detach, start_state_
from hvd_adaptive.strategies.synchronous import FixedWorkStrategy, SynchronousClock


class HorovodStrategy(FixedWorkStrategy):
    """Plain synchronous data parallelism, with nothing of ours in a step but claims ahead of it. Construction is COLLECTIVE.

    A "round" is only the interval of statistics and evaluation, as many samples as in strategy ``local``, but whole
    global batches. The last one of an epoch is filled with samples used before, so that all ranks make as many steps.

    Attributes:
        optimizer: Horovod's wrapper of the user's optimizer.
        batch_sizes: the batch size, for every rank, shape (world_size,).

    Raises:
        AgreedError: on all ranks, for trainable parameters in bfloat16.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> None:
        summed = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.bfloat16]
        if summed and transport.world_size > 1:
            # Every rank has the same model, so every rank is here.
            raise AgreedError(
                f"strategy 'horovod': Horovod cannot sum bfloat16, which {summed[0]} is: set strategy 'sync', or keep fp32 "
                "parameters and compute within torch.autocast"
            )
        super().__init__(model, config, transport)
        self._trainable = [p.requires_grad for p in model.parameters()]
        transport.broadcast_([*(p.detach() for p in model.parameters()), *model.buffers()])
        self.optimizer = transport.distributed_optimizer(optimizer, model)
        start_state_(self.optimizer, optimizer, transport)
        self.batch_sizes = np.full(transport.world_size, float(config.batch_size))
        self._clock = SynchronousClock(
            self.optimizer,
            next(model.parameters()).device,
            transport,
            exchanged=model.parameters(),
            emulates=config.slowdown is not None,
        )
        self._reduced = ExitStack()
        if self.optimizer is not optimizer:
            self.hooks.append(_Exchange(self.optimizer, optimizer, self._reduced))

    def synchronize(self) -> bool:
        """Waits for Horovod's exchange of this step's gradients, once. COLLECTIVE."""
        optimizer: Any = self.optimizer
        if hasattr(optimizer, "synchronize"):
            self._reduced.close()
            optimizer.synchronize()
            # Until this step is over, so that it does not exchange them again.
            self._reduced.enter_context(optimizer.skip_synchronize())
        return True

    def round_batches(
        self, rows: Rows, *, work: np.ndarray | None, source: BatchSource, round_id: int, stats: RoundStats
    ) -> Iterator[Batch]:
        """Yields this rank's equal share of each step's global batch; ``work`` is not used."""
        for batch in self._equal_batches(rows, round_id, source=source, stats=stats):
            self._reduced.close()
            yield batch

    def end_round(self, stats: RoundStats) -> tuple[Gathered, Array, int]:
        """Gathers the statistics. COLLECTIVE. Waiting is the time in Horovod's synchronize, the exchange included.

        Raises:
            RuntimeError: if a parameter was frozen or unfrozen since construction.
        """
        check_trainable(self._model, self._trainable)
        payload_bytes = self._clock.payload_bytes
        self._clock.end_round(stats)
        gathered = stats.gather(self._transport.allgather_stats)
        self._forget_round()
        return gathered, np.full(self._transport.world_size, 1.0 / self._transport.world_size), payload_bytes

    def state_dict(self) -> dict[str, Any]:
        """Returns the model's parameters and rank 0's optimizer state (shared: the ranks' are equal), and this rank's
        buffers, which plain Horovod leaves each rank its own."""
        return {
            "shared": {
                "parameters": [p.detach() for p in self._model.parameters()],
                "optimizer": self.optimizer.state_dict(),
            },
            "own": {"buffers": list(self._model.buffers())},
        }

    @torch.no_grad()
    def load_state_dict(self, shared: dict[str, Any], own_of: OwnState, *, world_size: int) -> None:
        """Takes over a state of any number of ranks."""
        buffers = own_of(self._transport.rank % world_size)["buffers"]
        for own, values in (
            (self._model.parameters(), shared["parameters"]),
            (self._model.buffers(), buffers),
        ):
            for tensor, value in zip(own, values, strict=True):
                tensor.copy_(value)
        self.optimizer.load_state_dict(shared["optimizer"])


class _Exchange:
    """Horovod's exchange, whose hooks are on the model.

    Args:
        wrapped: Horovod's optimizer.
        own: the script's own.
        reduced: what is to be closed before a step's end.
    """

    def __init__(self, wrapped: Any, own: Optimizer, reduced: ExitStack) -> None:
        self._wrapped, self._own, self._reduced = wrapped, own, reduced
        # Horovod's hooks hold it.
        wrapped._exchange = self

    def remove(self) -> None:
        """Ends the exchange, once."""
        if self._wrapped is None:
            return
        self._reduced.close()
        detach(self._wrapped)
        # Horovod's copy has made the steps.
        self._own.state.update(self._wrapped.state)
        self._wrapped = None
