"""What a script does with a batch between loader and backward, watched for one batch, and its forwards' sizes from then on.

Whether a batch of another size goes through a script as one forward and one mean loss cannot be known from the loader. So
two early batches, while shares are still equal, and one of a later pass are followed from torch function to torch function:
which tensors are made of them, whether they are cut into pieces, what else goes into the forward, and which loss comes out.
For the forward's inside see inside.py, and tape.py for the loss computed again.
Nothing of this may break a script, and who reads the script rather than run it (Dynamo, the jit's tracer) does not see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap import batch_statistics, inside, losses, scales, sizes
from hvd_adaptive.wrap.backwards import Backwards
from hvd_adaptive.wrap.compilers import is_reading
from hvd_adaptive.wrap.decisions import decides_by_length
from hvd_adaptive.wrap.forward_hook import ForwardHook
from hvd_adaptive.wrap.losses import Kind
from hvd_adaptive.wrap.made_of_batch import MadeOfBatch
from hvd_adaptive.wrap.own_gradients import OwnGradients
from hvd_adaptive.wrap.picks import goes_through_batch, number_of_pick
from hvd_adaptive.wrap.places import Place, packed_in, places_of
from hvd_adaptive.wrap.rates import sets_rate_by_size
from hvd_adaptive.wrap.reasons import Reason
from hvd_adaptive.wrap.tape import Tape
from hvd_adaptive.wrap.tensors import tensors_in


class Tracer(TorchFunctionMode):
    """Follows one batch at a time.

    Args:
        weighs: ranks' gradients are averaged. Else a rank's own loss may give samples weights that depend on the others.

    Attributes:
        findings: why shares must be equal, as far as this batch shows.
        num_forwards: forwards with gradients, of modules that own trained parameters, that this batch led to.
        backwards: the losses that backward was called on.
        places: the modules that own trained parameters and are called by the script itself, and where the batch size stands in
            their arguments.
        possible_places: and all dimensions as long as the batch.
        least_samples: how many samples a batch must have for those that the script takes by their number.
        root: the module that the script itself has called, while its forward is under way.
        gradients: what watches for changes of gradients that Horovod has not averaged yet.
    """

    def __init__(self, *, weighs: bool = True) -> None:
        super().__init__()
        self._weighs = weighs
        self.findings: set[Reason] = set()
        self.num_forwards = 0
        self.least_samples = 1
        self.places: weakref.WeakKeyDictionary[nn.Module, set[Place]] = weakref.WeakKeyDictionary()
        # Modules without any, as a teacher or a frozen part, and their parts.
        self._untrained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.possible_places: weakref.WeakKeyDictionary[nn.Module, set[Place]] = weakref.WeakKeyDictionary()
        self._trained = WeakTensorKeyDictionary()
        self.gradients = OwnGradients(self._trained)
        self._entered, self._watching, self._num_samples = False, False, 0
        self._tape = Tape(lambda tensor: self._made.kind(tensor) is Kind.SUM, weighs=weighs)
        self._made = MadeOfBatch(self._tape.is_made)
        self.backwards = Backwards(self._tape, self._made, weighs=weighs)
        # The nodes of sums that were divided by a batch's size, or by what its targets add up to.
        self._means: set[Any] = set()
        self._size_asked = self._length_asked = self._own_reduction = self._mean_seen = False
        # How often the root is within itself.
        self.root: nn.Module | None = None
        self._depth = 0
        self._parameters: list[Tensor] = []
        self._hooks: list[Any] = []

    def train(self, parameters: list[Tensor]) -> None:
        """Adds parameters that an optimizer trains: modules that own some are of interest."""
        for parameter in parameters:
            self._trained[parameter] = True

    def called(self) -> list[nn.Module]:
        """Returns the modules that the script has called itself."""
        parts = {part for module in self._untrained for part in module.modules() if part is not module}
        return [*self.places, *(module for module in self._untrained if module not in parts)]

    def begin(self, batch: Any, num_samples: int) -> None:
        """Begins to follow a batch."""
        self.end()
        self.findings, self.num_forwards = set(), 0
        self.root, self._depth, self.least_samples = None, 0, 1
        self._size_asked = self._length_asked = self._own_reduction = self._mean_seen = False
        self._num_samples = num_samples
        self._guarded(lambda: self._made.begin(tensors_in([batch]), num_samples))
        self._guarded(lambda: self._tape.begin(tensors_in([batch]), num_samples))
        self.backwards.begin()
        self._watching = True
        self._go_on()

    def end(self) -> None:
        """Stops following; what was found stays."""
        was_watching, self._watching = self._watching, False
        self._pause()
        if was_watching:
            if self._own_reduction and not self._mean_seen:
                self.findings.add(Reason.NONE_LOSS)
            if self._tape.holds_state():
                self.findings.add(Reason.HELD)
            self.findings |= self.backwards.targets.end()
        self._made.clear()
        self._means.clear()
        self._tape.begin((), 0)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Nothing is watched within; for what would take the watching for a part of the script."""
        if not self._watching:
            yield
            return
        self._pause()
        try:
            yield
        finally:
            if self._watching:
                self._go_on()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_reading():
            return func(*args, **(kwargs or {}))
        if self._is_followed() and losses.plain_name(func) == "backward":
            # Before it runs, as a script may change or free the loss by it.
            self._guarded(lambda: self.backwards.judge(args, kwargs or {}, self.findings))
        result = func(*args, **(kwargs or {}))
        if self._watching and torch._C._current_graph_task_id() == -1:
            within, chosen = self.root is not None, self._made.chosen
            with suppress(Exception), torch._C.DisableTorchFunction():
                if by_targets := self.backwards.targets.divides(func, args, result, self._num_samples, chosen):
                    self._means.add(result.grad_fn)
                self._tape.record(
                    func, args, kwargs or {}, result, is_inside=within, as_long=self._made.as_long,
                    length_asked=self._length_asked, by_targets=by_targets, over_chosen=chosen.means(func, args, kwargs or {}),
                )  # fmt: skip
            if not within:
                self._guarded(lambda: self.backwards.scales.look(func, args, kwargs or {}, result))
        if not self._is_followed():
            if self._watching and self.root is not None and torch.is_grad_enabled():
                self._guarded(lambda: self._look_inside(func, args, kwargs or {}, result))
                if func in sizes.SHAPES:
                    return inside.sizes_of(args, kwargs or {}, result, self._num_samples)
            return result
        self._guarded(lambda: self._follow(func, args, kwargs or {}, result))
        if func in sizes.SIZES or sizes.counts(func, args):
            self._guarded(lambda: self._look_at_size(func, args[0]))
        if func in sizes.SHAPES or func in sizes.COUNTS:
            return self._made.size_of(func, args, kwargs or {}, result)
        return result

    def _is_followed(self) -> bool:
        return self._watching and self.root is None and torch._C._current_graph_task_id() == -1

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Looks at something; a stranger's objects may raise anything."""
        try:
            with torch._C.DisableTorchFunction():
                action()
        except Exception:
            self.findings.add(Reason.NOT_FOLLOWED)

    # -- forwards

    def _before(self, module: nn.Module, args: Any) -> None:
        # Within backward a part of a model may run again, as in gradient checkpointing.
        if not self._watching or is_reading() or torch._C._current_graph_task_id() != -1:
            return
        if self.root is module:
            self._depth += 1
        elif self.root is None and (
            module in self.places or any(parameter in self._trained for parameter in module.parameters())
        ):
            self.root, self._depth = module, 1
            self._parameters = list(module.parameters())
        elif self.root is None:
            self._untrained.add(module)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, result: Any = None) -> None:
        # Also after a forward that has failed, and then torch leaves out the keyword arguments.
        if module is not self.root or is_reading():
            return
        self._depth -= 1
        if self._depth:
            return
        self.root = None
        if self._watching:
            self._guarded(lambda: self._look_at_forward(module, args, kwargs or {}, result))

    def _look_at_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A forward is over of a module that owns trained parameters: looks at its arguments; its result is made of the batch."""
        places = self.places.setdefault(module, set())
        # One that the forward has made anew, as of a codebook, holds what follows from the batch.
        if {id(parameter) for parameter in module.parameters() if not parameter.requires_grad} - set(map(id, self._parameters)):
            self.findings.add(Reason.HELD)
        if torch.is_grad_enabled():
            self.num_forwards += 1
            self._look_at_arguments(module, [args, kwargs], places)
            if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
                self.findings.add(Reason.SCRIPTED)
        for tensor in tensors_in([result]):
            if tensor.numel() == 1:
                kind = Kind.MEAN
                read = inside.kind_of_number(tensor, self._means) if tensor.requires_grad else kind
                self._made.needs_proof |= read is not kind
                if read is Kind.SUM and self._weighs:
                    self.findings.add(Reason.MIXED)
            else:
                kind = Kind.OTHER if losses.rows_dim(tensor, self._num_samples) is None else Kind.ROWS
                is_row = not self._tape.is_made(tensor) or self._made.may_have_rows(tensor, tensors_in([args, kwargs]))
                self._made.needs_proof |= not is_row
            self._made.keep(kind, tensor)
        self._tape.gives(tensors_in([result]))

    def _look_at_arguments(self, module: nn.Module, arguments: Any, places: set[Place]) -> None:
        found, ragged = False, packed_in(arguments)
        for number, tensor in enumerate(tensors_in(arguments)):
            kind = self._made.kind(tensor)
            if id(tensor) not in ragged and kind is None and self._num_samples in tensor.shape:
                if id(tensor) not in self._made.as_long:
                    self.findings.add(Reason.OTHER_INPUT)
                    continue
                kind = Kind.ROWS
            if kind is None or id(tensor) in ragged:
                continue
            self.findings |= batch_statistics.findings_of_argument(tensor, kind)
            if new := places_of(tensor, number, self._num_samples):
                found = True
                places.add(min(new, key=lambda place: (place[2] > 1, place)))
                self.possible_places.setdefault(module, set()).update(new)
        if not found:
            self.findings.add(Reason.UNSEEN)

    def _look_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if losses.goes_by_rows_of_batch(func, args, kwargs):
            self.findings.add(Reason.FREQUENCY)
        if func in losses.LOSSES:
            self.backwards.targets.look(func, args, kwargs, result, self._num_samples)
            if losses.reduction(func, args, kwargs) == "sum":
                self.findings.add(Reason.SUM_LOSS)
            elif isinstance(result, Tensor):
                # "batchmean" is a sum that is divided.
                self._means.add(result.grad_fn)
            # What the forward makes of it is seen at its result.
            self._mean_seen = True
            rows = args[0] if args else None
            self._made.needs_proof |= isinstance(rows, Tensor) and losses.rows_dim(rows, self._num_samples) is None
            return
        results, frame = list(tensors_in([result])), sizes.own_frame()
        if losses.mixes_inside(func, args, results, self._num_samples):
            self.findings.add(Reason.MIXED)
        self._made.needs_proof |= self._pairs(func, args, results)
        if frame is None:
            return
        self._made.needs_proof |= inside.may_be_of_whole_batch(func, args, kwargs, results, self._num_samples)
        self._made.needs_proof |= any(map(self._tape.is_made, inside.scales_of_rows(args, results, self._num_samples)))
        self._length_asked |= func is Tensor.__len__
        self.findings |= inside.findings(func, args, kwargs, results, self._num_samples, length_asked=self._length_asked)
        if inside.divides_by_number(func, args, frame):
            self._means.add(result.grad_fn)
        if inside.holds_samples(args[0] if args else None, self._num_samples):
            self._look_at_pick(func, args, frame)
            if func is Tensor.__len__ and decides_by_length(frame, args[0]):
                self.findings.add(Reason.SIZE_DECIDES)

    # -- all else

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given, results = list(tensors_in([args, kwargs])), list(tensors_in([result]))
        if any(isinstance(tensor, FakeTensor) for tensor in (*given, *results)):
            return
        holds = self._tape.holds_values(tensors_in([args[1:], kwargs]))
        by_size = any(scales.may_be_size(value, self._num_samples) for value in args[1:2])
        if self.gradients.are_changed(func, args, results):
            self.findings.add(Reason.CLIPPED)
        elif (holds or by_size) and self.gradients.are_made_by(func, args):
            self.findings.add(Reason.HELD if holds else Reason.SIZE_DECIDES)
        is_setitem = func is Tensor.__setitem__
        if is_setitem and self._made.fills_fixed_length(*args[:2], length_asked=self._length_asked):
            self.findings.add(Reason.SIZE_DECIDES)
        from_inside = self._made.are_from_inside(tensor for tensor in given if not any(tensor is one for one in results))
        # A type or a place that is taken from the batch holds nothing of it.
        given = [args[0]] if losses.plain_name(func) in ("to", "type_as") else given
        made = [(tensor, found) for tensor in given if (found := self._made.kind(tensor)) is not None]
        if not made:
            # What comes from a tensor that was there before is as fixed as that.
            is_new = all(id(tensor) in self._made.as_long for tensor in given if self._num_samples in tensor.shape)
            if is_new and (self._size_asked or func not in sizes.FACTORIES):
                self._made.as_long.update((id(tensor), tensor) for tensor in results if self._num_samples in tensor.shape)
            if not from_inside:
                self._made.beside.update((id(tensor), tensor) for tensor in results if tensor.requires_grad)
            return
        self._size_asked |= func in sizes.SIZES
        self._length_asked |= func is Tensor.__len__
        if args and self._made.holds_samples(args[0]):
            self._look_at_pick(func, args, sizes.calling_frame())
        for tensor in given:
            # Labels of a fixed number, an order of a fixed length. Weights and a layer's statistics are as long by chance.
            is_weight = tensor.requires_grad or isinstance(tensor, nn.Parameter) or func in losses.NORMS
            is_other = not is_weight and self._made.kind(tensor) is None and id(tensor) not in self._made.as_long
            if is_other and tensor.dim() > 0 and tensor.shape[0] == self._num_samples:
                self.findings.add(Reason.OTHER_INPUT)
        chosen = self._made.chosen.kind(func, args, kwargs, made, results, self._num_samples)
        cut = any(of is Kind.CUT for _, of in made) or losses.cuts(func, args, kwargs, results, self._num_samples)
        with_gradients = any(tensor.requires_grad for tensor in results)
        if losses.goes_by_rows_of_batch(func, args, kwargs):
            self.findings.add(Reason.FREQUENCY)
        if with_gradients and func in losses.LOSSES:
            self._own_reduction |= losses.reduction(func, args, kwargs) == "none"
            if chosen is None:
                self.backwards.targets.look(func, args, kwargs, result, self._num_samples)
        self._mean_seen |= with_gradients and losses.plain_name(func) in ("sum", "mean")
        self._made.has_unknown |= chosen is Kind.MEAN or (with_gradients and self._pairs(func, args, results))
        of_loss = [(tensor, of) for tensor, of in made if tensor.requires_grad]
        if with_gradients and of_loss:
            others = [(tensor, other) for tensor, other in made if not tensor.requires_grad]
            kind = chosen or losses.kind_of_loss(func, args, kwargs, [*of_loss, *others], self._num_samples)
            if chosen is Kind.MEAN:
                self.backwards.targets.choose(result, self._made.chosen.mask(given))
            if kind is Kind.OTHER and losses.may_keep_rows(func, args, [*of_loss, *others], results, self._num_samples):
                kind, self._made.has_unknown = Kind.ROWS, True
            kind = Kind.CUT if cut and kind is Kind.ROWS else kind
            scaled = inside.kind_with_len(kind, func, args, self._made)
            self.backwards.are_scaled |= scaled is not kind and scaled is Kind.OTHER
            kind = scaled
            if from_inside:
                kind = Kind.OTHER
            elif results[0].grad_fn in self._means and {of for _, of in of_loss} == {Kind.SUM}:
                kind = Kind.MEAN
        # An assignment to places of a tensor has no result.
        written = [args[0]] if is_setitem else []
        data = batch_statistics.kinds_of_data(func, args, kwargs, made, results or written, self._num_samples)
        for tensor, of_data in zip(results, data, strict=False):
            of_data = (Kind.CUT if cut else of_data) if chosen is None else chosen if chosen is Kind.SOME else Kind.REDUCED
            self._made.keep(kind if tensor.requires_grad and of_loss else of_data, tensor)
        if written and data == [Kind.OTHER] and not args[0].requires_grad:
            self._made.keep(Kind.OTHER, args[0])
        self._made.follow_row(func, args, results)
        self._made.needs_proof |= is_setitem and self._made.mixes_rows(*args[1:3])

    def _pairs(self, func: Any, args: tuple[Any, ...], results: list[Tensor]) -> bool:
        return inside.pairs_samples(func, args, results, self._num_samples, self._tape.is_made)

    def _look_at_size(self, func: Any, tensor: Tensor) -> None:
        """The script asks for a tensor's size, or counts in it: looks in its source for what follows from that."""
        frame = sizes.calling_frame()
        if frame is None or id(tensor) not in self._made.known or not self._made.holds_samples(tensor):
            return
        decides = func is Tensor.__len__ and decides_by_length(frame, tensor)
        if decides or sets_rate_by_size(frame.f_code.co_filename, frame.f_lineno, is_count=func not in sizes.SIZES):
            self.findings.add(Reason.SIZE_DECIDES)

    def _look_at_pick(self, func: Any, args: tuple[Any, ...], frame: FrameType | None) -> None:
        count = number_of_pick(func, args)
        if not count or goes_through_batch(frame, self.is_made_of_batch):
            return
        self.least_samples = max(self.least_samples, count)
        if count >= self._num_samples:
            self.findings.add(Reason.NUMBERED)

    def is_made_of_batch(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of the batch that is watched now: sample by sample, or in any way within a forward."""
        is_long = tensor.dim() > 0 and tensor.shape[0] == self._num_samples
        is_inside = self.root is not None and (is_long or self._tape.is_made(tensor))
        return self._watching and (is_inside or self._made.kind(tensor) in (Kind.ROWS, Kind.CUT, Kind.SOME))

    # -- being there

    def _go_on(self) -> None:
        if not self._hooks:
            self._hooks = [register_module_forward_pre_hook(self._before), ForwardHook(self._after, always_call=True)]
        sizes.watch(lambda: self.findings.add(Reason.SIZE_DECIDES))
        if not self._entered:
            self.__enter__()
            self._entered = True

    def _pause(self) -> None:
        sizes.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        # A mode of the script's own may lie above; then this one stays, and watches nothing.
        if self._entered and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self._entered = False
