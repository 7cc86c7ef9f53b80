"""The wrapped run on this rank: follows the script from batch to step, and changes the ranks' shares between steps.

The order of events is the script's own: a batch is delivered, backward runs (the parameters' hooks see it), the optimizer
synchronizes. All that ranks tell each other goes within synchronize, where Horovod needs every rank anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap.control import Controller, Window, judge, pack, unpack
from hvd_adaptive.wrap.forwards import Tracer, set_guard
from hvd_adaptive.wrap.loaders import Handed, IndexStream, Loader
from hvd_adaptive.wrap.options import RunConfig, parse_shares
from hvd_adaptive.wrap.reasons import Reason, mask
from hvd_adaptive.wrap.report import Report
from hvd_adaptive.wrap.stopwatch import Emulation, Stopwatch

# Looks at the speeds come early at first, as every equal step before them is slow.
_FIRST_EXCHANGES = (3, 6, 9, 12)
# Batches of a loader that are followed until one shows all of its way from loader to backward.
_MOST_TRACES = 10


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
        self.report = Report()
        self.on_start: list[Callable[[], None]] = []
        self.on_failure: list[Callable[[], None]] = []
        self._make_emulation = make_emulation
        self._describe = describe
        self._pinned = None if config.shares is None else parse_shares(config.shares)
        self._loaders: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        self._reasons: set[Reason] = set()
        self._weighted = WeakTensorKeyDictionary()
        self._streams: weakref.WeakSet[IndexStream] = weakref.WeakSet()
        self._feeding: IndexStream | None = None
        self._handed: Handed | None = None
        self._backward_seen = False
        self._num_backwards = 0
        self._num_steps = 0
        self._weight = 1.0
        self._window = Window()
        self._watch = Stopwatch(clock)
        self._tail_s = 0.0
        self._untimed = True
        self._since_step: list[Handed] = []
        self._tracer = Tracer()
        self._traced: IndexStream | None = None
        self._mismatch: str | None = None
        set_guard(self._check_forward)

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
        for action in self.on_start:
            action()

    def refuse(self, reason: Reason) -> None:
        """Takes note of something for which all shares must be equal."""
        self._reasons.add(reason)
        self.report.note(reason.value)

    def registered(self, optimizer: Any, parameters: list[Tensor]) -> None:
        """Hooks the parameters of a wrapped optimizer, each once."""
        self.report.optimizer(optimizer)
        self._tracer.train(parameters)
        for parameter in parameters:
            if parameter not in self._weighted:
                self._weighted[parameter] = True
                parameter.register_hook(self.scale)

    def scale(self, gradient: Tensor) -> Tensor | None:
        """Weights a parameter's gradient of one backward, before Horovod takes it; None: as it is."""
        if not self._backward_seen:
            self._backward_seen = True
            self._backward_begins()
        return None if self._weight == 1.0 else gradient * self._weight

    def synchronize(self, action: Callable[[], None]) -> None:
        """Runs the optimizer's synchronize, and around it what the ranks have to tell each other."""
        if self.world_size == 1:
            action()
            return
        seconds = self._watch.stop()
        stream = self._feeding if self._since_step else None
        if stream is not None and self._num_backwards:
            self._count_step(stream, seconds)
        self._num_steps += 1
        exchange = self._num_steps in _FIRST_EXCHANGES or self._num_steps % self.config.interval == 0
        finish = self._begin_exchange(stream) if exchange else None
        before_s = self._watch.waiting_s
        action()
        self._window.wait_s += self._watch.waiting_s - before_s
        self._window.num_steps += 1
        self._since_step.clear()
        self._num_backwards, self._tail_s = 0, 0.0
        if finish is not None:
            finish()
        self._watch.start()

    def stepped(self) -> None:
        """Ends what counts as computing after the wait for the gradients."""
        self._tail_s = self._watch.stop()

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
        self._streams.add(stream)
        return stream

    def fetching(self, stream: IndexStream) -> None:
        """Begins what counts as computing for a step."""
        self._finish_trace()
        if stream.loader.num_steps and not self._since_step:
            self._watch.start()
            self._untimed = stream.num_delivered == 0

    def delivered(self, stream: IndexStream, batch: Any) -> None:
        """Takes note of the batch that the script computes on next, and of the weight of its gradients."""
        handed = stream.deliver()
        stream.delivered_at = self._num_steps
        self._since_step.append(handed)
        self._feeding, self._handed, self._weight = stream, handed, handed.weight
        self._backward_seen, self._mismatch = False, None
        loader = stream.loader
        if not loader.is_traced and loader.num_traces < _MOST_TRACES and handed.num_samples:
            loader.num_traces += 1
            self._traced = stream
            self._tracer.begin(batch, handed.num_samples)

    def exhausted(self, stream: IndexStream) -> None:
        """Forgets a pass that is over."""
        self._finish_trace()
        stream.pending = 0
        self._watch.drop()

    # -- inside

    def _backward_begins(self) -> None:
        self._num_backwards += 1
        stream = self._feeding
        if stream is None:
            return
        if self._mismatch is not None and self._weight != 1.0 and stream.loader.num_steps:
            raise RuntimeError(f"{stream.loader.label}: {self._mismatch}")
        if stream.pending != 1:
            stream.loader.reasons.add(Reason.FETCHED_AHEAD)
        for other in list(self._streams):
            # A loop that was left early has freed its iterator.
            used = other is not stream and other.pending > 0 and other.owner() is not None
            if used and other.delivered_at == self._num_steps > 1:
                other.loader.reasons.add(Reason.INTERLEAVED)
                stream.loader.reasons.add(Reason.INTERLEAVED)
        stream.pending = 0

    def _finish_trace(self) -> None:
        """Ends the tracing of a batch; what it showed counts if the batch was trained on."""
        stream, self._traced = self._traced, None
        if stream is None:
            return
        self._tracer.end()
        if self._feeding is not stream or not self._backward_seen:
            return
        loader = stream.loader
        if self._tracer.num_forwards and self._tracer.is_complete:
            loader.is_traced = True
            loader.reasons |= self._tracer.findings
            for module in self._tracer.places:
                self._look_at_layers(module, loader)
        elif loader.num_traces == _MOST_TRACES:
            loader.reasons.add(Reason.NO_FORWARD)

    def _look_at_layers(self, module: nn.Module, loader: Loader) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                # Normalizing one sample of a training batch is an error in torch.
                loader.smallest = 2
                if type(layer).__name__ == "SyncBatchNorm":
                    loader.reasons.add(Reason.SYNC_BATCH_NORM)
        for sentence in self._describe(module):
            self.report.condition(sentence)

    def _check_forward(self, module: nn.Module, tensors: list[Tensor]) -> None:
        """Compares a forward's batch size with the loader's; a difference counts once backward follows."""
        places, handed = self._tracer.places.get(module), self._handed
        if not places or handed is None or self._feeding is None:
            return
        for number, dim, rows in places:
            shape = tensors[number].shape if number < len(tensors) else ()
            if dim < len(shape) and shape[dim] == rows * handed.num_samples:
                return
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        self._mismatch = (
            f"the loader gave {handed.num_samples} samples, but a forward of {type(module).__name__} got tensors of shape "
            f"{shapes}: its weight would be wrong. The script cuts or repeats batches in a way that its first batches did "
            "not show; run it with --shares 1,1,... (one number a rank)"
        )

    def _count_step(self, stream: IndexStream, seconds: float) -> None:
        window, loader = self._window, stream.loader
        loader.num_steps += 1
        num_samples = sum(handed.num_samples for handed in self._since_step)
        global_samples = sum(handed.global_samples for handed in self._since_step)
        window.num_samples += num_samples
        window.global_samples += global_samples
        # The step that began with the start of workers, or before it was known to be one, says nothing of speed.
        if seconds and not self._untimed:
            window.timed_steps += 1
            window.timed_samples += num_samples
            window.timed_global_samples += global_samples
            window.compute_s += seconds + self._tail_s

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

    def _decide(self, stream: IndexStream | None, gathered: dict[str, NDArray[np.float64]], agreed: Any) -> None:
        """Changes the shares, on every rank alike, from the first batch that no rank has handed out yet."""
        reasons = judge(gathered)
        if Reason.JOIN in reasons:
            self.refuse(Reason.JOIN)
        if stream is None:
            self.report.note(Reason.NO_LOADER.value)
            return
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
        if self.config.dry_run and self._num_steps >= _FIRST_EXCHANGES[-1]:
            raise DryRunOver(0)
