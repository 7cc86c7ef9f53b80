"""The wrapped run on this rank: what is intercepted comes here, and the ranks' shares change between steps.

All that ranks tell each other goes within synchronize, where Horovod needs every rank anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap.control import Array, Controller, Window, judge, pack, unpack
from hvd_adaptive.wrap.follow import Follower
from hvd_adaptive.wrap.loaders import Handed, IndexStream, Loader
from hvd_adaptive.wrap.options import RunConfig, parse_shares
from hvd_adaptive.wrap.reasons import Reason, mask
from hvd_adaptive.wrap.report import Report
from hvd_adaptive.wrap.stopwatch import Emulation, Stopwatch

# Looks at the speeds come early at first, as every equal step before them is slow.
_FIRST_EXCHANGES = (4, 8, 12, 16)


class DryRunOver(SystemExit):
    """Ends a dry run on all ranks at the same step."""


class Engine:
    """See the module. One instance a process; the interceptions call it.

    Args:
        config: the options.
        make_emulation: makes the emulation for a number of ranks; None: ranks are as fast as they are.
        clock: seconds of this process, wall clock or, where ranks share cores and slowness is emulated, computing time.
        describe: says what in a model makes unequal shares differ from equal ones.

    Attributes:
        report: what is told at the end.
        on_start: called when Horovod has been initialized, on every rank.
        on_failure: called on a rank whose script ends with an exit code other than 0.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        make_emulation: Callable[[int], Emulation] | None,
        clock: Callable[[], float],
        describe: Callable[[nn.Module], list[str]] = lambda module: [],
    ) -> None:
        self.config = config
        self.world_size, self.rank = 1, 0
        self.report = Report(is_dry_run=config.dry_run)
        self.on_start: list[Callable[[], None]] = []
        self.on_failure: list[Callable[[], None]] = []
        self._make_emulation = make_emulation
        self._pinned = None if config.shares is None else parse_shares(config.shares)
        self._loaders: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        self._reasons: set[Reason] = set()
        self._weighted = WeakTensorKeyDictionary()
        self._num_steps = 0
        self._window = Window()
        self._watch = Stopwatch(clock)
        self._follower = Follower(describe, self.report.condition)
        self._tail_s = 0.0
        self._untimed = True

    # -- of Horovod

    def started(self, world_size: int, rank: int) -> None:
        """Horovod has been initialized. May be called again, after a restart.

        Raises:
            ValueError: if options do not fit the number of ranks.
        """
        self.world_size, self.rank = world_size, rank
        if self._pinned is not None and len(self._pinned) != world_size:
            raise ValueError(
                f"shares must have one number a rank: {world_size} ranks, got {len(self._pinned)} in {self.config.shares!r}"
            )
        if self._make_emulation is not None:
            self._watch.emulate(self._make_emulation(world_size), rank)
        self.report.started(world_size)
        for loader in self.report.loaders:
            loader.controller, loader.fractions = None, None
        for action in self.on_start:
            action()

    def refuse(self, reason: Reason) -> None:
        """Takes note of something for which all shares must be equal."""
        self._reasons.add(reason)
        self.report.note(reason.value)

    def joining(self) -> None:
        """Takes note of the script's hvd.join(); the ranks that go on see it in the next exchange."""
        self.report.note(Reason.JOIN.value)

    def registered(self, optimizer: Any, parameters: list[Tensor]) -> None:
        """Hooks the parameters of a wrapped optimizer, each once."""
        self.report.optimizer(optimizer)
        self._follower.trains(parameters)
        for parameter in parameters:
            if self.world_size > 1 and parameter not in self._weighted:
                self._weighted[parameter] = True
                parameter.register_hook(self.scale)

    def scale(self, gradient: Tensor) -> Tensor | None:
        """Weights a parameter's gradient of one backward, before Horovod takes it; None: as it is."""
        weight = self._follower.backward()
        return None if weight == 1.0 else gradient * weight

    def synchronize(self, action: Callable[[], None]) -> None:
        """Runs the optimizer's synchronize, and around it what the ranks have to tell each other."""
        if self.world_size == 1:
            action()
            return
        stretch = self._watch.stop()
        untimed = self._untimed or self._follower.was_traced
        stream, batches = self._follower.take_step()
        self._num_steps += 1
        exchange = self._num_steps in _FIRST_EXCHANGES or self._num_steps % self.config.interval == 0
        finish = self._begin_exchange(stream) if exchange else None
        before_s = self._watch.waiting_s
        action()
        self._window.wait_s += self._watch.waiting_s - before_s
        self._window.num_steps += 1
        if stream is not None:
            self._count_step(stream, batches, None if untimed or stretch is None else stretch.seconds() + self._tail_s)
        self._tail_s = 0.0
        if finish is not None:
            finish()
        self._watch.start()

    def stepped(self) -> None:
        """Ends what counts as computing after the wait for the gradients."""
        stretch = self._watch.stop()
        self._tail_s = 0.0 if stretch is None else stretch.seconds()

    def waited(self, action: Callable[[], Any]) -> Any:
        """Runs an action that waits for other ranks; its seconds do not count as computing."""
        return self._watch.waited(action)

    # -- of loaders

    def open_stream(self, loader: DataLoader[Any], index_sampler: Any) -> IndexStream | None:
        """Begins a pass of a loader."""
        if not self.report.is_started or self.world_size == 1:
            return None
        known = self._loaders.get(loader)
        if known is None:
            known = self._loaders[loader] = Loader(loader, len(self.report.loaders) + 1)
            self.report.loaders.append(known)
        stream = IndexStream(
            known,
            index_sampler,
            world_size=self.world_size,
            rank=self.rank,
            upper=self.config.max_batch_size,
        )
        self._follower.opened(stream)
        return stream

    def fetching(self, stream: IndexStream) -> None:
        """Begins what counts as computing for a step."""
        self._follower.finish_trace()
        if stream.loader.num_steps and self._follower.is_between_steps:
            self._watch.start()
            self._untimed = stream.num_delivered == 0

    def delivered(self, stream: IndexStream, batch: Any) -> None:
        """Takes note of the batch that the script has got."""
        self._follower.delivered(stream, batch)

    def exhausted(self, stream: IndexStream) -> None:
        """Takes note that a pass is over."""
        self._follower.exhausted(stream)
        self._watch.drop()

    # -- inside

    def _count_step(self, stream: IndexStream, batches: list[Handed], seconds: float | None) -> None:
        window = self._window
        stream.loader.num_steps += 1
        num_samples = sum(handed.num_samples for handed in batches)
        global_samples = sum(handed.global_samples for handed in batches)
        window.num_samples += num_samples
        window.global_samples += global_samples
        # The step that began with the start of workers, or before it was known to be one, says nothing of speed.
        if seconds:
            window.timed_steps += 1
            window.timed_samples += num_samples
            window.timed_global_samples += global_samples
            window.compute_s += seconds

    def _begin_exchange(self, stream: IndexStream | None) -> Callable[[], None]:
        import horovod.torch as hvd

        window, self._window = self._window, Window()
        reasons, proposal = set(self._reasons), np.zeros(self.world_size)
        if stream is None:
            reasons.add(Reason.NO_LOADER)
        else:
            loader = stream.loader
            reasons |= loader.reasons | (set() if loader.is_traced else {Reason.NO_FORWARD})
            window.num_delivered, window.num_handed = stream.num_delivered, stream.num_handed
            window.dataset = loader.fingerprint()
            window.smallest = loader.smallest
            window.checksum = stream.last_checksum() or 0
            proposal = self._controller(loader).proposal
        window.reasons = mask(reasons)
        vector = torch.from_numpy(pack(window, proposal, world_size=self.world_size, rank=self.rank))
        handle = hvd.allreduce_async_(vector, name="hvd_adaptive.exchange", op=hvd.Sum)

        def finish() -> None:
            gathered, agreed = unpack(hvd.synchronize(handle).numpy(), world_size=self.world_size)
            self._decide(stream, gathered, agreed)

        return finish

    def _controller(self, loader: Loader) -> Controller:
        if loader.controller is None:
            loader.controller = Controller(self.world_size, pinned=self._pinned)
        return loader.controller

    def _decide(self, stream: IndexStream | None, gathered: dict[str, Array], agreed: Array) -> None:
        """Changes the shares, on every rank alike, from the first batch that no rank has handed out yet."""
        reasons = judge(gathered)
        if Reason.JOIN in reasons:
            self.refuse(Reason.JOIN)
        if stream is None:
            self.report.note(Reason.NO_LOADER.value)
        else:
            self._change_shares(stream, gathered, reasons, agreed)
        if self.config.dry_run and self._num_steps >= _FIRST_EXCHANGES[-1]:
            raise DryRunOver(0)

    def _change_shares(
        self, stream: IndexStream, gathered: dict[str, Array], reasons: set[Reason], agreed: Array
    ) -> None:
        loader = stream.loader
        loader.smallest = int(gathered["smallest"].max())
        # A forward that was not seen yet may still be.
        loader.reasons |= reasons - {Reason.NO_FORWARD}
        usable = not reasons and not loader.reasons and not self._reasons and not self.config.dry_run and agreed.any()
        loader.fractions = tuple(float(part) for part in agreed) if usable else None
        stream.change_fractions(loader.fractions, first=int(gathered["num_handed"].max()))
        self.report.window(loader, gathered)
        if not reasons:
            self._controller(loader).propose(gathered, self.config.max_batch_size)
