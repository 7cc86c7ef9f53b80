"""Which loader's batch a backward belongs to, and what the script does with it on the way.

The order of events is the script's own: batches are delivered, forwards run, backward runs, the optimizer steps. A batch of a
validation loop may come between any of them.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.wrap.forward_hook import WatchedForwards
from hvd_adaptive.wrap.forwards import Tracer
from hvd_adaptive.wrap.index_lists import Handed
from hvd_adaptive.wrap.loaders import IndexStream, Loader
from hvd_adaptive.wrap.places import Place
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.target_means import TargetWeights
from hvd_adaptive.wrap.tensors import tensors_in

# Batches of a loader that are tried to be followed all of their way to backward: in a pass, and passes' worth of them.
_MOST_TRACES, _MOST_PASSES = 10, 3
# What following a batch again in a later pass may cost: so many seconds, or that part of the time since the last one.
_CHEAP_S, _CHEAP = 0.1, 0.05


class Follower:
    """Follows the script on this rank.

    Args:
        describe: says what in a model makes unequal shares differ from equal ones.
        condition: is told what `describe` says.
        weighs: gradients are weighted by the shares.

    Attributes:
        weight: the factor on the gradients of the present backward.
        stream: the pass whose batch the last backward was of; None before the first, or if there is none.
        was_traced: a batch was traced since the last step, which makes the step slow.
        results: the graph's nodes of what compiled modules have given for the present batch.
    """

    def __init__(
        self, describe: Callable[[nn.Module], list[str]], condition: Callable[[str], None], *, weighs: bool = True
    ) -> None:
        self.weight = 1.0
        self.stream: IndexStream | None = None
        self.was_traced = False
        self.results: set[Any] = set()
        self._stepped_last: Callable[[], Any] = lambda: None
        self._describe = describe
        self._condition = condition
        self._weighs = weighs
        self._streams: weakref.WeakSet[IndexStream] = weakref.WeakSet()
        self._is_backward = self._has_gradients = self._is_kept = False
        # Events are numbered, to know what came after what.
        self._event = self._last_backward = 0
        self._used: list[tuple[IndexStream, Handed]] = []
        self._tracer, self._targets = Tracer(weighs=weighs), TargetWeights()
        self._traced: IndexStream | None = None
        # The pass whose batch last had a forward with gradients, of those with unequal shares.
        self._forwarded: IndexStream | None = None
        # The last batch is one of those whose losses are learnt, also of those that come after it was followed.
        self._learns = False
        # When the last batch was followed; this thread's seconds at its beginning, and those that it took.
        self._traced_at_s = self._begun_s = self._cost_s = 0.0
        # Optimizers that have stepped on the traced batch.
        self._stepped: set[int] = set()
        self._mismatch: str | None = None
        # The present batch went through a module that is trained, but without gradients.
        self._is_evaluated = False
        # Along any dimension of the present batch, if it has not the script's own size.
        self._lengths: set[int] = set()
        # Looked at from the first batch on that needs it, as this takes time in every forward.
        self._forwards = WatchedForwards(self._check_forward, self.evaluated)

    def trains(self, parameters: list[Tensor]) -> None:
        """Adds parameters that an optimizer trains."""
        self._tracer.train(parameters)
        # A backward before that was not seen, as of scripts that make an optimizer in their first step.
        for stream in self._streams:
            stream.num_unused = 0

    def opened(self, stream: IndexStream) -> None:
        """A pass of a loader begins."""
        for other in self._streams:
            if other.loader is stream.loader and not other.is_over:
                other.look_at_unused(is_evaluated=self._is_evaluated)
                other.is_over = other.is_beside
        # Another one, as another thread may be at the old one.
        self._streams = weakref.WeakSet([*self._streams, stream])

    def delivered(self, stream: IndexStream, batch: Any) -> None:
        """The script has got a batch, or another thread has read one for it."""
        if stream.is_beside:
            # Nothing is followed there: the script is at another batch.
            stream.deliver()
            stream.delivered_at = self._event = self._event + 1
            return
        self.finish_trace()
        stream.look_at_unused(is_evaluated=self._is_evaluated)
        self._is_evaluated = False
        self.results.clear()
        stream.deliver()
        stream.delivered_at = self._event = self._event + 1
        self._is_backward, self._learns, self._mismatch = False, False, None
        self._lengths = {n for tensor in tensors_in([batch]) for n in tensor.shape} if stream.weight_differs else set()
        (loader := stream.loader).looks.delivered(batch)
        if self._is_to_follow(stream):
            self._learns = not loader.is_traced
            loader.num_traces += self._learns
            self._traced, self.was_traced = stream, True
            self._stepped.clear()
            self._traced_at_s, self._begun_s = time.monotonic(), time.thread_time()
            self._tracer.begin(batch, stream.current.num_samples)
        self._targets.delivered(stream)
        # Of two open passes one may be a validation's. After the tracer, by whose own hook a model is known for what it is.
        if stream.current.is_unequal or sum(other.is_open and other.num_delivered > 0 for other in self._streams) > 1:
            self._forwards.watch()

    def _is_to_follow(self, stream: IndexStream) -> bool:
        """Whether the batch that was just delivered is to be followed to its loss: an early one, or the first of a later pass."""
        loader, has_samples = stream.loader, stream.current.num_samples > 0
        if not loader.is_traced:
            # A pass before the first step, as an evaluation's, shows nothing.
            return has_samples and stream.num_delivered <= _MOST_TRACES and loader.num_traces < _MOST_PASSES * _MOST_TRACES
        # Each rank looks at its own time: what one of them finds counts for all.
        is_cheap = self._cost_s <= max(_CHEAP_S, _CHEAP * (time.monotonic() - self._traced_at_s))
        return has_samples and is_cheap and stream.begins_followed and stream.num_delivered == 1 and not loader.reasons

    def exhausted(self, stream: IndexStream) -> None:
        """A pass is over."""
        self.finish_trace()
        self._targets.ends(stream)
        stream.is_over = True
        self._is_kept = stream.delivered_at > self._last_backward and not stream.is_evaluated

    def backward(self) -> float:
        """A parameter has got a gradient; returns the factor on it.

        Raises:
            RuntimeError: if the weight of its batch, which is not the equal one, is not certain.
        """
        self._has_gradients = True
        if self._weighs:
            self._tracer.gradients.arrive()
        if not self._is_backward:
            self._is_backward = True
            self._begin_backward()
        return self.weight

    def take_step(self, optimizer: Any = None) -> tuple[IndexStream | None, list[Handed]]:
        """An optimizer synchronizes; returns the pass that fed it since the last time, and its batches.

        No batches where another optimizer has stepped on the same batch before, or where the script left out its backward.
        """
        # Several optimizers may each take a step on a batch, but one that takes its second has seen it all.
        if self._traced is not None and id(optimizer) in self._stepped:
            self.finish_trace()
        self._stepped.add(id(optimizer))
        if hasattr(optimizer, "param_groups"):
            self._stepped_last = weakref.ref(optimizer)
        stream = self.stream if self._has_gradients else self._step_without_gradients()
        batches = [handed for used, handed in self._used if used is stream]
        self._targets.ends(stream)
        if stream is not None and stream.is_beside:
            # Which ones cannot be seen. They are the script's own, equally long.
            stream.loader.reasons.add(Reason.FETCHED_AHEAD)
            batches = [stream.current] * getattr(optimizer, "backward_passes_per_step", 1)
            self._is_backward = False
        self._used.clear()
        self._has_gradients = self._tracer.gradients.are_here = False
        self.was_traced = self._traced is not None
        return stream, batches

    @property
    def rates(self) -> int:
        """A checksum of the learning rates of the optimizer that stepped last; 0 if there is none any more."""
        groups = getattr(self._stepped_last(), "param_groups", [])
        return zlib.crc32(repr([float(group.get("lr") or 0.0) for group in groups]).encode())

    def losses(self, tensors: Sequence[Tensor]) -> None:
        """The script is about to call backward on tensors."""
        if self.stream is not None and not self.stream.is_open:
            # What comes after a pass is of no loader's batch, until there is another one.
            self._is_backward = False
        found, learns = self._candidates(), self._traced is not None and self._learns
        if not found and self._is_backward and self.stream is not None and self.stream.is_open:
            # A further loss of the batch.
            found, learns = [self.stream], self._learns
        for stream in found:
            stream.loader.num_losses += 1
        if found:
            self._targets.look(tensors, found[-1], is_followed=found[-1] is self._traced, is_after_step=bool(self._stepped))
        # The following of a first batch may have ended with a validation before its loss.
        if not found or found[-1].loader.reasons or found[-1].is_beside or not (learns or found[-1].loader.is_traced):
            return
        loader = found[-1].loader
        for tensor in tensors:
            loader.heads.look(tensor, found[-1].current.num_samples, learn=learns, ends=self.results)
        # One that comes later was not followed; whether shares were equal at its first step is for the report.
        if loader.heads.is_new and loader.is_traced:
            loader.reasons.add(Reason.OTHER_LOSS)
        if loader.heads.is_hidden and self._weighs:
            loader.reasons.add(Reason.HIDDEN_LOSS)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Nothing is watched within."""
        with self._forwards.unwatched(), self._tracer.unwatched():
            yield

    # -- of compiled modules, in which nothing is watched

    @property
    def is_tracing(self) -> bool:
        """Whether a batch is followed, outside of any forward."""
        return self._traced is not None and self._tracer.root is None

    @property
    def num_samples(self) -> int:
        """Samples of the batch that the script is at; 0: of none."""
        return next((stream.current.num_samples for stream in reversed(self._candidates())), 0)

    @property
    def keeps_equal_shares(self) -> bool:
        """Whether the batch that the script is at is of a loader whose shares stay equal, or of none."""
        found = self._candidates()
        return not found or bool(found[-1].loader.reasons) or not found[-1].loader.is_traced

    def places(self, module: nn.Module) -> set[Place]:
        """Returns where a batch's samples are in the arguments of a module; empty for one that was not followed."""
        return self._tracer.places.get(module, set())

    def forward_begins(self, module: nn.Module, tensors: list[Tensor]) -> None:
        """A module is called with tensors."""
        self._check_forward(module, lambda: tensors)

    def evaluated(self, module: nn.Module) -> None:
        """A module is called without gradients."""
        if module not in self._tracer.places:
            return
        self._is_evaluated = True
        # Only after model.eval(): in training mode the model may be making labels for a batch that goes into the step.
        if self._streams and not module.training:
            max(self._streams, key=lambda stream: stream.delivered_at).is_evaluated = True

    @property
    def is_at_unequal_batch(self) -> bool:
        """Whether the script is at a training batch with unequal shares."""
        return self.stream is not None and self.stream.is_open and self.stream.current.is_unequal

    @property
    def is_after_unequal_pass(self) -> bool:
        """Whether the last training pass, with unequal shares, is over, and no other pass of its loader has begun."""
        last = self.stream
        if last is None or last.is_open or not last.num_shared:
            return False
        return not any(stream.loader is last.loader and stream.is_open for stream in self._streams)

    def refuse(self, reason: Reason) -> None:
        """Takes note of why the shares of the batch that the script is at must be equal."""
        stream = [self.stream, *self._candidates()][-1]
        if stream is not None and stream.is_open:
            stream.loader.reasons.add(reason)

    def exchanges(self, tensors: Sequence[Tensor]) -> bool:
        """The script gives tensors to a collective: returns whether one of them holds something of each sample of the batch."""
        self._targets.collective(self._forwarded or self.stream, is_followed=self._traced is not None)
        with torch._C.DisableTorchFunction():
            is_made = any(map(self._tracer.is_made_of_batch, tensors))
        found = [s for s in self._candidates() if s.weight_differs]
        return is_made or any(t.dim() and t.shape[0] == s.current.num_samples for s in found[-1:] for t in tensors)

    def end(self) -> None:
        """Watches nothing any more."""
        self.finish_trace()
        self._forwards.stop()

    @property
    def is_between_steps(self) -> bool:
        """Whether no backward has run since the last step."""
        return not self._used

    def finish_trace(self) -> None:
        """Ends the tracing of a batch; what it showed counts if the batch was trained on."""
        stream, self._traced = self._traced, None
        if stream is None:
            return
        self._tracer.end()
        self._cost_s = time.thread_time() - self._begun_s
        self.was_traced &= not self._stepped
        if self.stream is not stream or not self._is_backward:
            return
        loader = stream.loader
        if self._tracer.num_forwards:
            self._targets.learn(loader, self._tracer.backwards.targets)
            loader.looked_at(self._tracer.findings, self._tracer.backwards.kinds, self._tracer.least_samples)
            for module in self._tracer.called():
                self._look_at_layers(module, loader)
        elif not loader.is_traced and loader.num_traces >= _MOST_TRACES and not loader.reasons:
            loader.reasons.add(Reason.NO_FORWARD)

    def _candidates(self) -> list[IndexStream]:
        """The passes that may feed the next backward, the latest last."""
        found = [s for s in self._streams if s.delivered_at > self._last_backward and s.is_open]
        # One that the script itself has got rather than one that another thread reads.
        found.sort(key=lambda stream: (not stream.is_beside, stream.delivered_at))
        # An iterator for validation may stay alive within the training loop. Its loader has never fed a step.
        return [s for s in found if not s.is_evaluated or s.loader.num_steps] or found

    def _begin_backward(self) -> None:
        candidates = self._candidates()
        self._last_backward = self._event = self._event + 1
        if candidates:
            self._begin_with(candidates)
        elif self.stream is not None and (self._is_kept or not self.stream.is_open):
            # Neither a new batch nor a loop that is still open. Or a pass was read to its end for later, as by list(loader).
            self.stream, self.weight = None, 1.0
        self._is_kept = False

    def _begin_with(self, candidates: list[IndexStream]) -> None:
        self.stream = stream = candidates[-1]
        self.weight = stream.weight
        self._used.append((stream, stream.current))
        unequal = any(candidate.weight_differs for candidate in candidates)
        for other in candidates[:-1]:
            other.num_unrelated += 1
            # Once, it may be a script that has only looked at a batch.
            if other.num_unrelated > 1:
                other.loader.reasons.add(Reason.INTERLEAVED)
                stream.loader.reasons.add(Reason.INTERLEAVED)
                self._mismatch = f"{Reason.INTERLEAVED.value}. Its first steps did not show this"
        if self._mismatch is not None and unequal:
            raise RuntimeError(
                f"{stream.loader.label}: {self._mismatch}, and its shares are unequal by now; run the "
                "script with --shares equal"
            )
        if stream.num_unused > 1 and Reason.SKIPPED not in stream.loader.reasons:
            stream.loader.reasons.add(Reason.FETCHED_AHEAD)
        stream.num_unused = 0
        stream.num_shared += stream.current.is_unequal
        if stream.begins_followed and stream.num_delivered == 1:
            stream.loader.was_followed()

    def _step_without_gradients(self) -> IndexStream | None:
        """Returns the pass at whose batch a step has no backward, which other ranks may have: a loss that is not finite."""
        found = next((stream for stream in reversed(self._candidates()) if stream.loader.num_steps), None)
        if found is not None:
            found.loader.reasons.add(Reason.FETCHED_AHEAD)
            # The batch is used, so what this rank alone saw changes no shares before the next exchange.
            found.num_unused = 0
            found.num_shared += found.current.is_unequal
        return found

    def _look_at_layers(self, module: nn.Module, loader: Loader) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                # Normalizing one sample of a training batch is an error in torch.
                loader.smallest_seen = max(loader.smallest_seen, 2)
                if type(layer).__name__ == "SyncBatchNorm":
                    loader.reasons.add(Reason.SYNC_BATCH_NORM)
                elif self._weighs and layer.training and layer.track_running_stats:
                    self._condition("BatchNorm's running statistics are noisier on a rank with few samples; rank 0 saves its own")
        for sentence in self._describe(module):
            self._condition(sentence)

    def _check_forward(self, module: nn.Module, find_tensors: Callable[[], list[Tensor]]) -> None:
        """Compares a forward's batch size with the loader's; a difference counts once backward follows."""
        # With equal shares the script may do what it likes.
        if not any(stream.weight_differs for stream in self._streams):
            return
        places, candidates = self._tracer.possible_places.get(module), self._candidates()
        if not places or not candidates:
            return
        tensors, self._forwarded = find_tensors(), candidates[-1]
        num_samples = candidates[-1].current.num_samples
        for number, dim, rows in places:
            shape = tensors[number].shape if number < len(tensors) else ()
            if dim < len(shape) and shape[dim] == rows * num_samples:
                return
            if dim < len(shape) and self._left_out(shape[dim] / rows, num_samples):
                # The batch came without them, so what follows is what plain Horovod's ranks do with such a batch.
                candidates[-1].loader.reasons.add(Reason.DROPPED)
                return
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        self._mismatch = (
            f"the loader gave {num_samples} samples, but a forward of {type(module).__name__} got tensors of shape {shapes}: "
            "its weight would be wrong. The script cuts or repeats batches in a way that its first ones did not show"
        )

    def _left_out(self, count: float, num_samples: int) -> bool:
        """Whether the batch that the loader gave had only so many of its samples."""
        return 0 < count < num_samples and count in self._lengths and num_samples not in self._lengths
