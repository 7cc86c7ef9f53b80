"""The library's face for a person's own loop, as in docs/library.md: batches in, merged models out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.batch_sizes import lr_schedule
from hvd_adaptive.algorithm.ledger import Ledger, epoch_order, round_size
from hvd_adaptive.algorithm.slowdown import Slowdown
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.comm.shared_gpus import settle_shared_gpus
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import Batch, BatchSource
from hvd_adaptive.engine.device_clock import device_clock
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.emulation import compute_seconds
from hvd_adaptive.engine.learning_rate import LearningRateMultiplier
from hvd_adaptive.engine.out_of_memory import begun_step_error, is_out_of_memory
from hvd_adaptive.engine.records import RoundRecord, RoundStats
from hvd_adaptive.engine.replay import Replay, round_claims, run_identity
from hvd_adaptive.engine.strategy import OwnState
from hvd_adaptive.session.handed_out import HandedOut
from hvd_adaptive.session.island_mesh import join
from hvd_adaptive.session.loader import loader
from hvd_adaptive.session.open_sessions import SessionHooks
from hvd_adaptive.session.sameness import agree_on_data, agree_on_start, check_same_model, checked_config
from hvd_adaptive.session.schedules import Schedules, schedule
from hvd_adaptive.session.session_state import SessionState, Stateful
from hvd_adaptive.session.straggler_report import StragglerReport
from hvd_adaptive.session.strategy_names import make_strategy
from hvd_adaptive.state.preemption import PREEMPTION
from hvd_adaptive.strategies.sync_optimizer import explain_passes

__all__ = ["Batch", "Session"]


class Session:
    """One training run over all ranks. Construction is COLLECTIVE: the ranks compare configuration and model, and start
    from rank 0's weights.

    Args:
        model: any module whose parameters are on one device; changed in place, at the start and by every merge.
        optimizer: any torch optimizer over the model's parameters.
        config: how ranks share and merge; HVD_ADAPTIVE_* variables are not read here (``Config`` is what counts).
        transport: the world of ranks; found from the launcher's environment by default.

    Attributes:
        optimizer: the optimizer to call: the given one, or for strategies ``sync`` and ``horovod`` a wrapper of it.
        ledger: what has been consumed, by completed merges.
        round: number of rounds completed.
        train_s: seconds of training so far, without pauses.
        preempted: the signal, on any rank, for which the run ended early; 0: none. See :func:`hvd_adaptive.catch_signals`.
        stopped: whether :meth:`stop` or such a signal ended the last loop over the batches; the same on every rank.
        identity: what a replay must have in common with this run; empty where nothing is recorded or replayed.
        slowdown: how much slower ranks are made to compute.
        records: callables that get each :class:`RoundRecord`, on every rank.
        before_gather: callables that may add to this rank's statistics of a round just before they are gathered.

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
        self.config = checked_config(model, optimizer, config)
        self.transport = transport or join(self.config)
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.ledger = Ledger()
        self.round = self.preempted = self.num_samples = 0
        self.records: list[Callable[[RoundRecord], None]] = []
        self.before_gather: list[Callable[[RoundStats], None]] = []
        self.preemption = PREEMPTION
        PREEMPTION.watch_over(self.transport, self.config.drain_limit_s)
        settle_shared_gpus(self.transport, self.device)
        trained = agree_on_start(self.transport, self.config, model, optimizer)
        self.slowdown = Slowdown(self.config.slowdown, world_size=self.world_size)
        if self.config.compute_threads is not None:
            torch.set_num_threads(self.config.compute_threads)
        self._strategy = make_strategy(model, optimizer, self.config, self.transport)
        self.optimizer = self._strategy.optimizer
        self.identity: dict[str, str] = {}
        if self.config.repeatable:
            threads = self.transport.allgather_object((self.device.type, torch.get_num_threads()))
            carried = {"backend": self.transport.backend, "ranks' devices and threads": threads}
            self.identity = run_identity(self.config, {**trained, **carried})
        self._replay = None if self.config.replay is None else Replay(self.config.replay, self.identity, self.transport)
        self._data, self._lr = "", LearningRateMultiplier(self.optimizer)
        self._state = SessionState(self, self._strategy, self._lr)
        self._schedules = Schedules(self.optimizer, rank=self.rank, steps_alone=self.config.strategy == "local")
        self._stragglers = StragglerReport(self.transport, self.device, self.config.straggler_limit)
        self._times = DeviceTimes(device_clock(self.device))
        self._stats, self._handed_out = RoundStats(), HandedOut(self.rank, self.config.strategy, self.world_size)
        self._hooks = SessionHooks(model, optimizer, [self._lr, *self._strategy.hooks], self._handed_out)
        self.stopped = self._stop = False
        self.train_s = self._round_start = 0.0
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
        """The batch size of each rank, or of its island, for the next round, samples, shape (world_size,)."""
        return self._strategy.batch_sizes

    @property
    def inexact(self) -> list[str]:
        """What keeps a step over N ranks from being one rank's at the same global batch, as sentences; empty if nothing that
        can be seen, and for strategies that do not promise it."""
        return self._strategy.inexact

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
            num_epochs: passes over the data since the session began: 5 after 2 gives 3 more. Or a fraction; None: until `stop`.
            work: cost of each sample, int64, shape (len(dataset),), for ``work="nonzeros"``.
            collate: as in torch's DataLoader; what it returns is (x, y) if it is a tuple of two, else x alone.

        Raises:
            TypeError, ValueError: for a data set that cannot be shared this way, or if all these passes were made before.
            AgreedError: on all ranks, if their data sets differ in length, or are other random splits of one.
            RuntimeError: if ranks' models stop being equal after a merge, or all ranks' parameters are not finite.
        """
        source = BatchSource(dataset, self.device, collate, self._times, micro_batch_size=self.config.micro_batch_size)
        return self._batches_from(source, num_epochs=num_epochs, work=work)

    loader, schedule = loader, schedule

    def _batches_from(
        self, source: BatchSource, *, num_epochs: float | None, work: NDArray[np.int64] | None = None
    ) -> Iterator[Batch]:
        """Yields this rank's batches as :meth:`batches` does, whatever reads them."""
        if (work is not None) != (self.config.work == "nonzeros"):
            given = "None" if work is None else "an array"
            raise ValueError(f"batches(work=...) goes with config.work='nonzeros', got work={given} with {self.config.work!r}")
        source.begin_pass()
        self._handed_out.begin_loop(num_epochs, self._progress(len(source)))
        source.reader.rank = self.rank
        agree_on_data(self.transport, source._dataset)
        self._state.begin_loop(len(source))
        self._data = source.description
        # A last round may go on beyond it.
        order_epoch, end = -1, np.inf if num_epochs is None else num_epochs
        while not self._stop and (num_epochs is None or self._progress(len(source)) < num_epochs - 1e-9):
            if self.ledger.epoch != order_epoch:
                order_epoch = self.ledger.epoch
                order = epoch_order(len(source), seed=self.config.seed, epoch=order_epoch)
            self._strategy.warm_up(self._progress(len(source)) < self.config.warmup_epochs)
            size = round_size(
                self.ledger.cursor,
                dataset_size=len(source),
                mega_batch=self._strategy.mega_batch_of(len(source)),
                unit=self._strategy.round_unit,
            )
            recorded = None if self._replay is None else self._replay.next_round(self.round, self._data)
            if recorded is not None:
                size = recorded.num_planned
                self._strategy.repeat_round(recorded)
            elif self._replay is not None:
                break
            rows, rest = np.split(order[self.ledger.cursor :], [size])
            source.following = (rest, None if work is None else work[rest])
            self._stats = RoundStats(batch_size=float(self.batch_sizes[self.rank]), stop=self._stats.stop)
            self._round_start = time.perf_counter()
            part = None if work is None else work[rows]
            for batch in self._strategy.round_batches(rows, work=part, source=source, round_id=self.round, stats=self._stats):
                now = self._progress(len(source)) + batch._place / len(source)
                factor = lr_schedule(now, warmup_epochs=self.config.warmup_epochs, decay=self.config.lr_decay)
                self._lr.value = factor * self._strategy.lr_multiplier(batch)
                batch.num_samples_before = self.num_samples + batch._place
                self._schedules.reach(min(end, now))
                with self._handed_out.give(batch, self._stats, self.round):
                    yield batch
                if self.preemption.signal_number:
                    self._strategy.close_round()
            self._end_round(len(rows), len(source), end)
        if self._stop:
            self._stats.stop = 0.0
        self.stopped, self._stop = self._stop, self.preempted > 0
        source.end_pass()
        self._strategy.drain()

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Batch]:
        """Wraps one local step: its timing, its learning rate, and the emulated slowdown.

        With strategy ``local`` an out-of-memory error inside the block is caught if ``optimizer.step`` had not begun: the
        gradients are dropped, and the batch's samples come again in smaller batches.

        Args:
            batch: the batch in work. Set ``batch.loss`` inside to have the loss in the round's record.

        Raises:
            RuntimeError: if memory ran out after ``optimizer.step`` had begun, when parameters may have been changed.
        """
        start = self._times.mark()
        self._handed_out.begin(batch)
        factor = self.slowdown.factors(self.train_s + time.perf_counter() - self._round_start)[self.rank]
        # Reading this clock waits for a GPU, which only an emulated slowdown needs.
        compute_start = compute_seconds(self.device) if factor > 1 else 0.0
        num_begun, fits = self._lr.num_begun, True
        try:
            yield batch
        except Exception as error:
            explain_passes(error)
            if not is_out_of_memory(error) or not self._can_repeat(batch, num_begun, error):
                raise
            fits = False
        finally:
            self._lr.restore()
            batch._is_open = False
        if not fits:
            self.optimizer.zero_grad(set_to_none=True)
            self._times.add(self._stats, "busy_s", start)
            return
        if factor > 1:
            spent = compute_seconds(self.device) - compute_start - self._strategy.take_foreign_seconds()
            time.sleep(max(0.0, (factor - 1) * spent))
        batch.finish()
        self._times.end_step(self._stats, start, batch.num_samples, batch.work, batch.loss, batch.num_targets)
        self.transport.progress(f"step {int(self._stats.num_steps)} of round {self.round}")

    def synchronize(self) -> bool:
        """Waits, inside :meth:`step`, until the gradients are those that ``optimizer.step`` will use: clip or unscale them
        after it. Not needed otherwise. COLLECTIVE for ``sync`` and ``horovod``; for ``local`` at once, or inside an island.

        Returns:
            Whether a step is due; False between the micro-batches of a step (``accumulation_steps``), whose gradients are
            neither complete nor reduced.
        """
        return self._strategy.synchronize()

    def _can_repeat(self, batch: Batch, num_begun: int, error: Exception) -> bool:
        if batch.num_samples < 2 or not self._strategy.take_back(batch):
            return False
        if self._lr.num_begun > num_begun:
            raise begun_step_error(self.rank, batch.num_samples) from error
        self._handed_out.take_back(batch, self._stats)
        batch.x = batch.y = batch.loss = None  # What is kept alive keeps the failed step's memory.
        return True

    def stop(self, *, agreed: bool = False) -> None:
        """Asks all ranks to end the loop over the batches, or the next one if none runs. A loop after it goes on where it ended:
        around it, in a loop over epochs, ``if session.stopped: break`` ends the run on all ranks.

        Args:
            agreed: False: one rank's wish is enough, and the loops end after the next merge. True: every rank calls this now,
                from a callable in ``records``, and the loops end there.
        """
        self._stats.stop = 1.0
        self._stop = self._stop or agreed  # Others may have asked before, and all ranks end then.

    def progress(self, what: str) -> None:
        """Tells the heartbeats that this rank gets on with ``what``, as text; for work of your own between batches that others
        wait for, such as an evaluation on one rank that takes longer than ``stall_limit_s``."""
        self.transport.progress(what)

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, of any kind that pickle knows, in rank order: to score a test set together. COLLECTIVE."""
        self._handed_out.check_open()
        with self.transport.waiting("session.gather"):
            return self.transport.allgather_object(value)

    def register_state(self, name: str, value: Stateful, *, shared: bool = False) -> None:
        """Makes an object of your own part of the checkpoints: a scheduler, a moving average. Before any is loaded.

        Args:
            name: the same on every rank, and at a resume.
            value: has ``state_dict()`` and ``load_state_dict(state)``; see
                :func:`hvd_adaptive.state.nested.flatten_state` for what a state may hold.
            shared: it is equal on all ranks, so that rank 0's is saved once; else each rank's own is.

        Raises:
            ValueError: if the name is taken. TypeError: for a state, as it is now, that cannot be saved. RuntimeError: if a
                checkpoint that has a state of this name is loaded already.
        """
        self._handed_out.check_not_closed()
        self._state.register(name, value, shared=shared)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that is needed to go on from here, between two rounds: ``shared`` by all ranks, and this rank's
        ``own``. Tensors are not copied. :class:`hvd_adaptive.Checkpointer` saves it."""
        self._handed_out.check_left()
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any], own_of: OwnState | None = None) -> None:
        """Goes on from a state of :meth:`state_dict`, between two rounds. COLLECTIVE: every rank loads the same ``shared``.

        Args:
            state: of any number of ranks. A rank that the saved run did not have seeds its random generators from seed,
                rank and round.
            own_of: gives the ``own`` of a saved rank; by default that of ``state``, which must then be of the saved rank
                ``rank % state["world_size"]``.

        Raises:
            ValueError, KeyError: if it does not fit.
        """
        self._state.load_state_dict(state, own_of or (lambda _: state["own"]))

    def close(self) -> None:
        """Checks that all ranks hold the same model and leaves the world. COLLECTIVE. A second call does nothing.

        Raises:
            RuntimeError: if they do not, or this rank has left its loop over the batches within a round.
        """
        if self._handed_out.is_closed:
            return
        self._handed_out.check_left()
        self._strategy.drain()
        self._check_hash()
        self._hooks.remove()
        self.transport.close()
        self._handed_out.close()

    def _progress(self, dataset_size: int) -> float:
        return self.ledger.epoch + self.ledger.cursor / dataset_size

    def _end_round(self, num_planned: int, dataset_size: int, end: float) -> None:
        stats, num_samples = self._stats, self._strategy.round_samples(num_planned)
        self._handed_out.end_round(stats, self.round, num_updates=self._lr.num_begun)
        self._times.end_round(stats)
        stats.num_updates, stats.lr = stats.num_samples / stats.batch_size, self._lr.applied_lr
        stats.train_s = self.train_s + time.perf_counter() - self._round_start
        self._strategy.take_foreign_seconds()
        _, weight, stats.payload_bytes = self._strategy.end_round(stats)
        self.ledger = self.ledger.advance(num_samples, dataset_size)
        stats.base_lr = self._schedules.end_round(min(end, self._progress(dataset_size)))
        self.num_samples += num_samples
        every, number = self.config.hash_interval, self.round + 1
        # Also after rounds 1, 2, 4, ...: the loop's mistakes show early. Merges of ``local`` find them by themselves.
        is_due = every and (number % every == 0 or (self.config.strategy != "local" and not number & self.round))
        model_hash = self._check_hash() if is_due else None
        claims = self.transport.allgather_object(self._strategy.claimed) if self.config.repeatable else None
        stats.train_s = self.train_s + time.perf_counter() - self._round_start
        stats.preempted = float(self.preemption.signal_number)
        for add_to in self.before_gather:
            add_to(stats)
        final = stats.gather(self.transport.allgather_stats)
        self.train_s, self._round_start = float(final["train_s"].max()), 0.0
        self.preempted = int(final["preempted"].max())
        self._schedules.compare(final["base_lr"])
        self._stop = bool(final["stop"].any()) or self.preempted > 0
        stats.stop -= float(final["stop"][self.rank])  # A wish that came since then is for the next round.
        record = RoundRecord.of(
            final,
            round=self.round,
            epoch=self._progress(dataset_size),
            num_samples=self.num_samples,
            weight=weight,
            stragglers=self._stragglers.add_round(final),
            model_hash=model_hash,
        )
        if claims is not None:
            record.claims = round_claims(record, claims, num_samples=num_samples, num_planned=num_planned, data=self._data)
            if self._replay is not None:
                self._replay.check(record.claims, int(final["handed_samples"].sum()))
        self.round += 1
        self._strategy.after_round(record)
        for receive in self.records:
            receive(record)

    def _check_hash(self) -> str:
        # Plain Horovod leaves each rank its own BatchNorm statistics.
        buffers = self.config.strategy != "horovod"
        return check_same_model(self.model, self.transport, buffers=buffers, round_number=self.round)
