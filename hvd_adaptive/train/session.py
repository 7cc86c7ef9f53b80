"""The library's face for a person's own loop: batches in, merged models out.

session = hvd_adaptive.Session(model, optimizer, hvd_adaptive.Config(batch_size=64))
for batch in session.batches(dataset, num_epochs=5):
    with session.step(batch):
        session.optimizer.zero_grad()
        loss_fn(model(batch.x), batch.y).backward()
        session.optimizer.step()
session.close()
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.config import Config
from hvd_adaptive.core.balance import lr_schedule
from hvd_adaptive.core.dispatch import Ledger, epoch_order, round_size
from hvd_adaptive.train.baseline import HorovodStrategy
from hvd_adaptive.train.batches import Batch, BatchSource
from hvd_adaptive.train.emulation import Slowdown, compute_seconds
from hvd_adaptive.train.flat_model import model_hash
from hvd_adaptive.train.learning_rate import LearningRateMultiplier
from hvd_adaptive.train.local import LocalStrategy
from hvd_adaptive.train.records import GatheredStats, RoundRecord, RoundStats
from hvd_adaptive.train.sma import SmaStrategy
from hvd_adaptive.train.strategy import Strategy
from hvd_adaptive.transport import connect
from hvd_adaptive.transport.base import Transport, agree, agree_equal

__all__ = ["Batch", "Session"]

STRATEGIES: dict[str, Callable[[nn.Module, Optimizer, Config, Transport], Strategy]] = {
    "local": LocalStrategy,
    "horovod": HorovodStrategy,
    "sma": SmaStrategy,
}


class Session:
    """One training run over all ranks. Construction is COLLECTIVE: the ranks compare configuration and model, and start
    from rank 0's weights.

    Args:
        model: any module whose parameters are on one device; changed in place, at the start and by every merge.
        optimizer: any torch optimizer over the model's parameters.
        config: how ranks share and merge; HVD_ADAPTIVE_* variables are not read here (``Config`` is what counts).
        transport: the world of ranks; found from the launcher's environment by default.

    Attributes:
        optimizer: the optimizer to call: the given one, or for strategy ``horovod`` Horovod's wrapper of it.
        ledger: what has been consumed, by completed merges.
        round: number of rounds completed.
        train_s: seconds of training so far, without pauses.
        records: callables that get each :class:`RoundRecord`, on every rank.

    Raises:
        ValueError: for a model that cannot be trained this way, or a slowdown for another number of ranks.
        AgreedError: on all ranks, if their configurations or models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config | None = None,
        *,
        transport: Transport | None = None,
    ) -> None:
        self.config = config or Config()
        self.transport = transport or connect(stall_limit_s=self.config.stall_limit_s)
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.ledger = Ledger()
        self.round = 0
        self.train_s = 0.0
        self.num_samples = 0
        self.records: list[Callable[[RoundRecord], None]] = []
        agree_equal(
            self.transport,
            {
                **{f"configuration {k}": v for k, v in dataclasses.asdict(self.config).items()},
                **{
                    f"model {name}": (tuple(p.shape), str(p.dtype), p.requires_grad)
                    for name, p in model.named_parameters()
                },
                **{f"model {name}": (tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()},
                "optimizer": type(optimizer).__name__,
                "optimizer groups": repr(
                    [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
                ),
            },
            "Start every rank with the same options and the same model.",
        )
        self._slowdown = Slowdown(self.config.slowdown, world_size=self.world_size)
        self._strategy = STRATEGIES[self.config.strategy](model, optimizer, self.config, self.transport)
        self.optimizer = self._strategy.optimizer
        self._lr = LearningRateMultiplier(self.optimizer)
        self._stats = RoundStats()
        self._stop = False
        self._round_start = 0.0
        self._check_hash()

    @property
    def rank(self) -> int:
        """This rank, in [0, world_size)."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks; ask again rather than keep it."""
        return self.transport.world_size

    @property
    def batch_sizes(self) -> NDArray[np.float64]:
        """The ranks' batch sizes for the next round, samples, shape (world_size,)."""
        return self._strategy.batch_sizes

    def batches(
        self,
        dataset: Any,
        *,
        num_epochs: float | None = 1,
        work: NDArray[np.int64] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Batch]:
        """Yields this rank's batches until the epochs are consumed; merges between them. COLLECTIVE as a whole: every
        rank iterates to the end, and a rank that wants to end earlier calls :meth:`stop`.

        Args:
            dataset: the same map-style data set on every rank: ``get_batch(rows) -> (x, y)``, or indexing and ``collate``.
            num_epochs: passes over the data, may be fractional; None: until :meth:`stop`.
            work: cost of each sample, int64, shape (len(dataset),), for ``work="nonzeros"``.
            collate: as in torch's DataLoader.

        Raises:
            TypeError, ValueError: for a data set that cannot be shared this way.
            AgreedError: on all ranks, if their data sets differ in length.
            RuntimeError: if ranks' models stop being equal after a merge, or all ranks' parameters are not finite.
        """
        source = BatchSource(dataset, self.device, collate)
        if (work is not None) != (self.config.work == "nonzeros"):
            given = "None" if work is None else "an array"
            raise ValueError(
                f"batches(work=...) goes with config.work='nonzeros', got work={given} with {self.config.work!r}"
            )
        agree_equal(self.transport, {"number of samples": len(source)}, "Give every rank the same data.")
        order_epoch, order = -1, np.empty(0, dtype=np.int64)
        while not self._stop and (num_epochs is None or self._progress(len(source)) < num_epochs - 1e-9):
            if self.ledger.epoch != order_epoch:
                order_epoch, order = (
                    self.ledger.epoch,
                    epoch_order(len(source), seed=self.config.seed, epoch=self.ledger.epoch),
                )
            size = round_size(
                self.ledger.cursor, dataset_size=len(source), mega_batch=self.config.mega_batch_samples
            )
            rows = order[self.ledger.cursor : self.ledger.cursor + size]
            schedule = lr_schedule(
                self._progress(len(source)),
                warmup_epochs=self.config.warmup_epochs,
                decay=self.config.lr_decay,
            )
            self._begin_round(len(source))
            for batch in self._strategy.round_batches(
                rows,
                work=None if work is None else work[rows],
                source=source,
                round_id=self.round,
                stats=self._stats,
            ):
                self._lr.value = schedule * self._strategy.lr_multiplier(batch)
                yield batch
            self._end_round(len(rows), len(source))
        self._strategy.drain()

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Batch]:
        """Wraps one local step: its timing, its learning rate, and the emulated slowdown.

        Args:
            batch: the batch in work. Set ``batch.loss`` inside to have the loss in the round's record.
        """
        start = time.perf_counter()
        factor = self._slowdown.factors(self.train_s + start - self._round_start)[self.rank]
        # Reading this clock waits for a GPU, which only an emulated slowdown needs.
        compute_start = compute_seconds(self.device) if factor > 1 else 0.0
        try:
            yield batch
        finally:
            self._lr.restore()
        if factor > 1:
            spent = compute_seconds(self.device) - compute_start - self._strategy.take_foreign_seconds()
            time.sleep(max(0.0, (factor - 1) * spent))
        stats = self._stats
        stats.busy_s += time.perf_counter() - start
        stats.num_samples += batch.num_samples
        stats.num_steps += 1
        stats.work += batch.work
        if batch.loss is not None:
            loss = batch.loss.detach() if isinstance(batch.loss, torch.Tensor) else batch.loss
            stats.loss_sum += float(loss) * batch.num_samples
            stats.loss_samples += batch.num_samples
        self.transport.progress(f"step {int(stats.num_steps)} of round {self.round}")

    def stop(self, *, agreed: bool = False) -> None:
        """Asks all ranks to end.

        Args:
            agreed: False: one rank's wish is enough, and the ranks end after the next merge. True: every rank calls this now,
                from a callable in ``records``, and the run ends there.
        """
        self._stats.stop = 1.0
        self._stop = agreed

    def progress(self, what: str) -> None:
        """Tells the heartbeats that this rank gets on; for work of your own between batches that others wait for, such as
        an evaluation on one rank that takes longer than ``stall_limit_s``.

        Args:
            what: what it does, for the heartbeats' messages.
        """
        self.transport.progress(what)

    def capacity_samples(self, samples_per_s: NDArray[np.float64], start_s: float, stop_s: float) -> float:
        """Returns the samples that the ranks could compute in a span of training time, each alone and never waiting.

        Args:
            samples_per_s: the ranks' own speeds without an emulated slowdown, shape (world_size,).
            start_s: the span's first training second.
            stop_s: its last.
        """
        return float(samples_per_s @ self._slowdown.capacity_s(start_s, stop_s))

    def close(self) -> None:
        """Checks that all ranks hold the same model and leaves the world. COLLECTIVE."""
        self._strategy.drain()
        self._check_hash()
        self._lr.remove()
        self.transport.close()

    def _progress(self, dataset_size: int) -> float:
        return self.ledger.epoch + self.ledger.cursor / dataset_size

    def _begin_round(self, dataset_size: int) -> None:
        warming_up = self._progress(dataset_size) < self.config.warmup_epochs
        self._strategy.warm_up(warming_up)
        stop = self._stats.stop
        self._stats = RoundStats(batch_size=float(self._strategy.batch_sizes[self.rank]), stop=stop)
        self._round_start = time.perf_counter()

    def _end_round(self, num_samples: int, dataset_size: int) -> None:
        stats = self._stats
        if self.device.type == "cuda":
            start = time.perf_counter()
            torch.cuda.synchronize(self.device)
            stats.busy_s += time.perf_counter() - start
        stats.num_updates = stats.num_samples / stats.batch_size
        stats.lr = self._lr.applied_lr
        stats.train_s = self.train_s + time.perf_counter() - self._round_start
        self._strategy.take_foreign_seconds()
        gathered, weight, payload_bytes = self._strategy.end_round(stats)
        self.ledger = self.ledger.advance(num_samples, dataset_size)
        self.num_samples += num_samples
        if self.config.hash_interval and (self.round + 1) % self.config.hash_interval == 0:
            self._check_hash()
        # The merge's seconds are known only now; all ranks just met, so this costs microseconds.
        stats.train_s = self.train_s + time.perf_counter() - self._round_start
        final = GatheredStats(self.transport.allgather_stats(stats.vector()))
        self.train_s = float(final["train_s"].max())
        self._round_start = 0.0
        self._stop = bool(gathered["stop"].any())
        stats.stop = 0.0
        loss_samples = final["loss_samples"].sum()
        record = RoundRecord(
            round=self.round,
            epoch=self._progress(dataset_size),
            train_s=self.train_s,
            num_samples=self.num_samples,
            loss=float(final["loss_sum"].sum() / loss_samples) if loss_samples else None,
            weight=weight,
            payload_bytes=payload_bytes,
            stats=final,
        )
        self.round += 1
        for receive in self.records:
            receive(record)

    def _check_hash(self) -> None:
        # Plain Horovod leaves each rank its own BatchNorm statistics.
        own = model_hash(self.model, buffers=self.config.strategy != "horovod")
        hashes = self.transport.allgather_object(own)
        if len(set(hashes)) > 1:
            odd = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
            agree(
                self.transport,
                f"after round {self.round} the models of ranks {odd} differ from rank 0's; was a parameter changed outside "
                "session.step, or does a host compute differently? Compare a run with one rank a host.",
            )
