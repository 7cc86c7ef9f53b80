"""The wrapped run on this rank: what is intercepted comes here, and the ranks' shares change between steps.

All that ranks tell each other goes within synchronize, where Horovod needs every rank anyway.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hvd_adaptive.algorithm.slowdown import Slowdown
from hvd_adaptive.comm.protocols import Store
from hvd_adaptive.comm.script_world import ScriptWorld
from hvd_adaptive.engine.emulation import compute_seconds
from hvd_adaptive.wrap.closing_report import Report, describe_optimizer
from hvd_adaptive.wrap.compiled_modules import MicroBatches
from hvd_adaptive.wrap.encoded import EncodedGradients
from hvd_adaptive.wrap.follow import Follower
from hvd_adaptive.wrap.left_out import tell_of_left_out
from hvd_adaptive.wrap.loaders import IndexStream, KnownLoaders
from hvd_adaptive.wrap.local_steps import LocalSteps
from hvd_adaptive.wrap.long_waits import LongWaits
from hvd_adaptive.wrap.meter import Meter
from hvd_adaptive.wrap.own_use import OwnUse
from hvd_adaptive.wrap.process_sets import is_over_set
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.run_options import BadOptions, RunConfig
from hvd_adaptive.wrap.share_exchange import Shares
from hvd_adaptive.wrap.share_weights import GradientWeights
from hvd_adaptive.wrap.stopwatch import Stopwatch, Stretch
from hvd_adaptive.wrap.training_thread import TrainingThread


class Engine:
    """See the module. One instance a process; the interceptions call it.

    Args:
        config: the options.
        describe: says what in a model makes unequal shares differ from equal ones.

    Attributes:
        report: what is told at the end.
        follower: follows the script's batches.
        own_use: watches what the script does with gradients by itself.
        micro_batches: calls the script's compiled modules; None: they are called as the script does.
        copied: is told of modules that are copies of others.
        refuse: takes note of something for which all shares must be equal.
        on_start: called when Horovod has been initialized, on every rank.
        on_step: called after each step of a wrapped optimizer.
        on_failure: called on a rank whose script ends with an exit code other than 0.
        find_store: returns what ranks share beside Horovod, once it runs; None: nothing.
    """

    def __init__(self, config: RunConfig, *, describe: Callable[[nn.Module], list[str]] = lambda module: []) -> None:
        self.config = config
        self.world_size, self.rank = 1, 0
        is_sync = config.strategy == "sync"
        is_plain = is_sync and not config.merging().encodes
        self.report = Report(is_dry_run=config.dry_run, pinned=config.shares, is_plain=is_plain)
        self.on_start: list[Callable[[], None]] = []
        self.on_step: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self.find_store: Callable[[], Store | None] = lambda: None
        self._shares = Shares(config, self.report)
        self.refuse = self._shares.refuse
        self._loaders = KnownLoaders(self.report.loaders)
        self._weights, self._meter = GradientWeights(self._weigh), Meter()
        # Ranks whose slowness is emulated may share cores: then only what a rank computes itself counts.
        own_clock = lambda: compute_seconds(torch.device("cpu"))  # noqa: E731
        self._watch = Stopwatch(time.perf_counter if config.slowdown is None else own_clock)
        self.follower = Follower(describe if is_sync else lambda module: [], self.report.condition, weighs=is_sync)
        self.own_use = OwnUse(self.refuse_batch if is_sync else lambda reason: None)
        size = config.micro_batch_size
        self.micro_batches = None if size is None else MicroBatches(size, self.follower, self.report)
        self._tail: Stretch | None = None
        self._tail_counts, self._untimed = False, True
        # The last step was on batches of no loader, so that all since then is computing.
        self._was_unfed = False
        self._training = TrainingThread()
        self._local = LocalSteps(config, make_world=self._make_world, note=self.report.note)
        self.copied = self._local.copies.add
        self._encoded = EncodedGradients(config, self._make_world)
        of_run = [part for part in (self._local, self._encoded, self.micro_batches) if part is not None]
        self.report.more = lambda: [line for part in of_run for line in part.lines()]
        # The pass that fed the last step.
        self._fed_by: IndexStream | None = None
        self._exchange_due = self._exchanging = False
        self._waits = LongWaits(config.stall_limit_s)

    # -- of Horovod

    def started(self, world_size: int, rank: int) -> None:
        """Horovod has been initialized. May be called again, after a restart.

        Raises:
            BadOptions: if options do not fit the number of ranks.
        """
        self.world_size, self.rank = world_size, rank
        try:
            self._shares.started(world_size, rank)
            if self.config.slowdown is not None:
                self._watch.emulate(Slowdown(self.config.slowdown, world_size=world_size), rank)
        except ValueError as error:
            raise BadOptions(str(error)) from None
        self.report.started(world_size)
        self._local.forget()
        for action in self.on_start:
            action()
        self._waits.start(rank, world_size, self.find_store())
        if self.config.strategy == "local" and world_size > 1:
            self._local.meet_through(self.find_store(), world_size)

    def joining(self) -> None:
        """Takes note of the script's hvd.join(); the ranks that go on see it in the next exchange.

        Raises:
            RuntimeError: if the gradients are exchanged encoded, in which a rank that has joined cannot take part.
        """
        self._encoded.joining()
        self.report.note(Reason.JOIN.value)
        self._settle()
        self._local.joining()

    def wrapped(self, text: str) -> None:
        """The script has wrapped an optimizer of a kind that is not intercepted."""
        self.report.left_alone(text)
        self._shares.tell_unencoded(text)

    def stepped_alone(self) -> None:
        """An optimizer has stepped that is not intercepted."""
        if self.report.is_started:
            self._shares.count_alone()

    def joined(self) -> None:
        """All ranks have joined, after different numbers of steps."""
        self._shares.meet()
        with self._merging():
            self._local.joined()

    def exchanged(self, what: str, tensors: list[Tensor], *, is_sum: bool) -> None:
        """The script gives tensors to a collective."""
        if not is_sum and (self.follower.is_at_unequal_batch or self.follower.is_after_unequal_pass):
            self.report.averaged(what, in_pass=self.follower.is_at_unequal_batch)
        self.own_use.exchanged(tensors)
        if self.world_size > 1 and self.follower.exchanges(tensors):
            self.follower.refuse(Reason.GATHERED)

    def refuse_batch(self, reason: Reason) -> None:
        """Takes note of why the batch that the script is at must have equal shares."""
        if self.world_size > 1:
            self.follower.refuse(reason)

    def losses(self, tensors: Sequence[Tensor]) -> None:
        """The script is about to call backward on tensors."""
        if self.world_size > 1:
            before_s = self._watch.waiting_s
            self.follower.losses(tensors)
            self._meter.waited(self._watch.waiting_s - before_s)
            self.own_use.backward(tensors, num_samples=self.follower.num_samples, closely=self.follower.is_tracing)

    def registered(self, optimizer: Any, parameters: list[Tensor]) -> None:
        """The script has wrapped an optimizer."""
        import horovod.torch as hvd

        self.report.optimizer(optimizer)
        self._training.is_this(self.report.loaders)
        self._watch.trains(parameters)
        self.follower.trains(parameters)
        self.own_use.trains(parameters)
        if self._shares.are_refused or is_over_set(optimizer):
            self._shares.tell_unencoded(describe_optimizer(optimizer))
        elif self.config.strategy == "local":
            if self.world_size > 1 or self.config.merges_alone:
                self._local.registered(optimizer)
        elif self.config.merging().encodes and self.world_size > 1:
            self._encoded.registered(optimizer)
        # Of a sum over ranks the rank's own gradient is one part.
        local_weight = float(self.world_size) if optimizer.op == hvd.Sum else 1.0
        if self.world_size > 1:
            self._weights.registered(optimizer, parameters, local_weight=local_weight)

    def passes_set(self, optimizer: Any) -> None:
        """The script has changed an optimizer's ``backward_passes_per_step``."""
        self._encoded.passes_set(optimizer)

    def accumulated(self, optimizer: Any) -> bool:
        """A gradient of an optimizer's has been added up; returns whether Horovod shall leave it alone."""
        self.follower.backward()
        return self._local.accumulated(optimizer, self.follower.stream) or self._encoded.exchanges(optimizer)

    def synchronize(self, optimizer: Any, action: Callable[[], None]) -> bool:
        """Runs the optimizer's synchronize, and around it what the ranks have to tell each other.

        Returns:
            False if Horovod exchanged nothing.
        """
        self._training.is_this(self.report.loaders)
        local = self._local.steps_alone(optimizer)
        if self.world_size == 1 and not local:
            action()
            self._shares.count_alone()
            return True
        self._settle()
        self.own_use.synchronized()
        stretch = self._watch.stop()
        untimed = self._untimed or self.follower.was_traced
        stream, batches = self.follower.take_step(optimizer)
        if stream is None:
            untimed = not self._was_unfed
        self._was_unfed = stream is None
        if stream is not None:
            stream.loader.num_steps += 1
            stream.loader.num_shared += any(handed.is_unequal for handed in batches)
        # A step that began with the start of workers, or before it was known to be one, says nothing of speed.
        stretches = [] if untimed or stretch is None else [part for part in (self._tail, stretch) if part is not None]
        tell_unencoded = lambda: self._shares.tell_unencoded(describe_optimizer(optimizer))  # noqa: E731
        if local:
            local = self._local.begin_step(optimizer, stream, batches, refused=self._shares.agree_on_refusal)
            if not local:
                tell_unencoded()
                self._weights.averages(optimizer)
        of_set = is_over_set(optimizer)
        is_alone = of_set or self.world_size == 1
        exchange = not is_alone and self._shares.count(is_local=local)
        finish = None
        if stream is not None or self._fed_by is None or not self._fed_by.is_open:
            # Else a synchronize without gradients of its own, as of a GAN's other optimizer: it is of the same pass.
            self._fed_by = stream
        if local:
            self._exchange_due = exchange
        elif exchange:
            finish = self._shares.begin(self._fed_by, self._meter.take(), self.follower.rates)
        before_s = self._watch.waiting_s
        by_horovod = not local and not self._encoded.synchronize(
            optimizer, refused=self._shares.agree_on_refusal, tell=tell_unencoded
        )
        if by_horovod:
            # One wait around those for each gradient, of which there may be hundreds.
            with self._watch.waiting():
                action()
        self._meter.waited(self._watch.waiting_s - before_s)
        if tell_of_left_out(optimizer, self.report.note, speaks=self.rank == 0):
            self.refuse_batch(Reason.UNEXCHANGED)
        if not untimed:
            self._meter.ends()
        tell = functools.partial(self._local.timed, optimizer) if local else None
        self._meter.step(None if stream is None else batches, stretches, tell)
        # What a step is followed by says as little of speed as its end does.
        self._tail, self._tail_counts = None, not untimed
        if finish is not None:
            finish()
        self._watch.start()
        if of_set and stream is not None:
            stream.loader.reasons.add(Reason.PROCESS_SET)
        if is_alone:
            self._shares.count_alone()
        return by_horovod

    def stepped(self, optimizer: Any) -> None:
        """The optimizer has moved its parameters: ends what counts as computing after the wait for the gradients. What comes now
        counts if another step follows on the same batch."""
        tail = self._watch.stop()
        self._tail = tail if self._tail_counts else None
        self._watch.start()
        self._local.end_step(optimizer)
        self._settle()
        self.on_step()

    def waited(self, action: Callable[[], Any], what: object = "a collective") -> Any:
        """Runs an action that waits for other ranks, in a collective of that name; its seconds do not count as computing.

        Raises:
            RuntimeError: as the action does; where unequal shares may be the cause, it says so.
        """
        if not self._watch.is_waiting:
            self._settle()
            if not self._exchanging:
                self._local.goes_on()
        with self._watch.waiting(), self._waits.of(what):
            return action()

    # -- of modules

    def looked_at(self, kind: str, module: nn.Module) -> None:
        """The script is about to validate (``eval()``) or save a model (``state_dict()``): merges it first, if all are here."""
        if self._exchanging or not self._training.is_here:
            return
        # Else a rank that has left out its last step would wait here for the others, and they for its merge.
        self._settle()
        if mergers := self._local.looked_at(kind, module):
            with self._merging():
                self._local.merge_if_all_here(kind, mergers)

    def loaded(self, module: nn.Module) -> None:
        """The script has loaded weights into a model."""
        self._local.loaded(module)

    def over(self) -> None:
        """The script has ended on this rank."""
        self.follower.end()
        self._local.over()

    # -- of loaders

    def open_stream(self, loader: DataLoader[Any], index_sampler: Any) -> IndexStream | None:
        """Begins a pass of a loader; returns what hands out its indices, or None to leave it alone."""
        if not self.report.is_started or self.world_size == 1:
            return None
        stream = IndexStream(
            self._loaders.of(loader),
            index_sampler,
            world_size=self.world_size,
            rank=self.rank,
            upper=self.config.max_batch_size,
            unit=self.config.micro_batch_size or 1,
        )
        self.follower.opened(stream)
        return stream

    def fetching(self, stream: IndexStream) -> None:
        """The script asks for a batch: begins what counts as computing for a step."""
        if self._training.reads_ahead(stream):
            return
        self._settle()
        self.own_use.settle()
        self.follower.finish_trace()
        if stream.loader.num_steps and self.follower.is_between_steps:
            self._watch.start()
            self._untimed = stream.num_delivered == 0
            self._meter.begins(counts=not self._untimed)

    def delivered(self, stream: IndexStream, batch: Any) -> None:
        """Takes note of the batch that the script has got."""
        self.follower.delivered(stream, batch)
        if stream.weight_differs and not self._weights.are_needed:
            self._weights.need()
            self._waits.shares_differ()

    def exhausted(self, stream: IndexStream) -> None:
        """Takes note that a pass is over."""
        if stream.is_beside:
            # The script may still be at earlier batches of it.
            stream.release()
            return
        self.follower.exhausted(stream)
        self._watch.drop()
        self._settle(stream if stream.loader.ends_together else None)

    # -- inside

    @contextmanager
    def _merging(self) -> Iterator[None]:
        self._exchanging = True
        try:
            with self._watch.waiting():
                yield
        finally:
            self._exchanging = False

    def _make_world(self) -> ScriptWorld:
        import horovod.torch as hvd

        return ScriptWorld(hvd, self._watch.waiting)

    def _weigh(self, optimizer: Any, local_weight: float) -> float:
        weight = self.follower.backward()
        return local_weight if self._local.steps_alone(optimizer) else weight

    def _settle(self, over: IndexStream | None = None) -> None:
        """Local steps: makes the merges that are due on every rank, and those of a pass that is over on every rank.

        Called after each step; where a rank left the step out, before anything in which it could wait for others.
        """
        local = self._local
        if local.is_merging or self._exchanging or not self._training.is_here:
            return
        mergers = local.due(over)
        if not mergers and not self._exchange_due:
            return
        # One that looks at the model may stand where the others come to this.
        local.goes_on()
        self._exchange_due, self._exchanging = False, True
        before_s = self._watch.waiting_s
        try:
            if self.world_size > 1:
                self._shares.begin(self._fed_by, self._meter.take(), self.follower.rates)()
            if mergers:
                local.merge(mergers)
        finally:
            self._exchanging = False
        self._meter.waited(self._watch.waiting_s - before_s)
