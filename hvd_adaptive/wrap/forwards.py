"""What a script does with a batch between loader and backward, watched for one batch, and its forwards' sizes from then on.

Whether a batch of another size goes through a script as one forward and one mean loss cannot be known from the loader. So
one early batch, while shares are still equal, is followed from torch function to torch function: which tensors are made of
it, whether it is cut into pieces, what else goes into the forward, and which loss comes out. It costs that batch some
microseconds a call; inside the model only losses are looked at.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_adaptive.wrap.reasons import Reason

_MAX_DEPTH = 6
_LOSSES = {
    getattr(F, name): inspect.signature(getattr(F, name))
    for name in (
        "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss",
        "gaussian_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "ctc_loss", "soft_margin_loss",
        "multilabel_soft_margin_loss", "multilabel_margin_loss", "multi_margin_loss", "hinge_embedding_loss",
        "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss",
    )
    if hasattr(F, name)
}  # fmt: skip
_CUTS = {Tensor.narrow, torch.narrow, Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.unbind, torch.unbind}
_CUTS |= {Tensor.select, torch.select, Tensor.tensor_split, torch.tensor_split, Tensor.__iter__}
_SUMS, _MEANS = {Tensor.sum, torch.sum}, {Tensor.mean, torch.mean}
_SIZES = {Tensor.size, Tensor.shape.__get__, Tensor.__len__}  # type: ignore[attr-defined]
# Functions that are given a size, not data.
_FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace, torch.range,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal,
}  # fmt: skip

# Where a forward's batch size stands: the number of the tensor among its arguments, the dimension, and samples a row.
Place = tuple[int, int, int]


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yields the tensors in a batch or in arguments: in lists, tuples, mappings and simple objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth >= _MAX_DEPTH or isinstance(value, (str, bytes, nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif depth and isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        yield from tensors_in(vars(value), depth + 1)


class Tracer(TorchFunctionMode):
    """Follows one batch at a time.

    Attributes:
        findings: why shares must be equal, as far as this batch shows.
        num_forwards: forwards with gradients, of modules that own trained parameters, that this batch led to.
        is_complete: no forward was missed; False while such modules are still being found.
        places: the modules that own trained parameters and are called by the script itself, and where the batch size stands in
            their arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.findings: set[Reason] = set()
        self.num_forwards = 0
        self.is_complete = True
        self.places: weakref.WeakKeyDictionary[nn.Module, set[Place]] = weakref.WeakKeyDictionary()
        self._trained = WeakTensorKeyDictionary()
        self._entered = False
        self._watching = False
        self._num_samples = 0
        # Tensors made of the batch, kept alive so that neither their ids nor their memory is used again; True: cut.
        self._made: dict[int, tuple[Tensor, bool]] = {}
        self._memory: set[int] = set()
        # Tensors as long as the batch and its like: made since, from data or by a script that has asked how long the batch is.
        self._as_long: dict[int, Tensor] = {}
        self._size_asked = False
        self._inside = False
        self._own_reduction = False
        self._mean_seen = False
        self._finder: Any = None

    def train(self, parameters: list[Tensor]) -> None:
        """Adds parameters that an optimizer trains: modules that own some are of interest."""
        for parameter in parameters:
            self._trained[parameter] = True

    def begin(self, batch: Any, num_samples: int) -> None:
        """Begins to follow a batch."""
        self.end()
        self.findings, self.num_forwards, self.is_complete = set(), 0, True
        self._inside = self._size_asked = False
        self._own_reduction = self._mean_seen = False
        self._num_samples = num_samples
        for tensor in tensors_in([batch]):
            self._keep(tensor, False)
        self._watching = True
        self._finder = register_module_forward_pre_hook(self._find_root)
        self._enter()

    def end(self) -> None:
        """Stops following; what was found stays."""
        if self._watching and self._own_reduction and not self._mean_seen:
            self.findings.add(Reason.NONE_LOSS)
        self._watching = False
        self._leave()
        if self._finder is not None:
            self._finder.remove()
            self._finder = None
        self._made.clear()
        self._as_long.clear()
        self._memory.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._watching and not self._inside:
            self._follow(func, args, kwargs or {}, result)
        elif self._watching and func in _LOSSES and torch.is_grad_enabled():
            self._look_at_loss(func, args, kwargs or {})
            # What the forward makes of it cannot be told from the model's own arithmetic.
            self._mean_seen = True
        return result

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins of a module that owns trained parameters; looks at its arguments, and inside only at losses."""
        self._inside = True
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            # torch.compile would compile for a mode that is gone with the next batch.
            self._leave()
        if not torch.is_grad_enabled():
            return
        self.num_forwards += 1
        places = self.places.setdefault(module, set())
        found = False
        for number, tensor in enumerate(tensors_in([args, kwargs])):
            cut = self._is_cut(tensor)
            if cut is None and self._num_samples in tensor.shape:
                if id(tensor) not in self._as_long:
                    self.findings.add(Reason.OTHER_INPUT)
                    continue
                cut = False
            if cut is None:
                continue
            if cut:
                self.findings.add(Reason.SUB_BATCHES)
            place = self._place(tensor, number)
            if place is not None:
                found = True
                places.add(place)
        if not found:
            self.findings.add(Reason.UNSEEN)

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """The forward is over: its result is made of the batch."""
        self._inside = False
        if self._watching:
            for tensor in tensors_in([result]):
                self._keep(tensor, False)
            self._enter()

    def _find_root(self, module: nn.Module, args: Any) -> None:
        # Only found here: hooks that are registered now take part from the module's next call on.
        if self._inside or module in self.places:
            return
        if any(parameter in self._trained for parameter in module.parameters()):
            self.places[module], self.is_complete = set(), False
            module.register_forward_pre_hook(_before_forward, with_kwargs=True)
            module.register_forward_hook(_after_forward, with_kwargs=True)
            self._finder.remove()
            self._finder = None

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given, results = list(tensors_in([args, kwargs])), list(tensors_in([result]))
        states = [cut for tensor in given if (cut := self._is_cut(tensor)) is not None]
        if not states:
            # What comes from a tensor that was there before is as fixed as that.
            is_new = all(id(tensor) in self._as_long for tensor in given if self._num_samples in tensor.shape)
            if is_new and (self._size_asked or func not in _FACTORIES):
                self._as_long.update((id(tensor), tensor) for tensor in results if self._num_samples in tensor.shape)
            return
        self._size_asked |= func in _SIZES
        for tensor in given:
            # Labels of a fixed number, an order of a fixed length. What trains is as long by chance.
            is_other = self._is_cut(tensor) is None and id(tensor) not in self._as_long and not tensor.requires_grad
            if is_other and tensor.dim() > 0 and tensor.shape[0] == self._num_samples:
                self.findings.add(Reason.OTHER_INPUT)
        cut = any(states) or self._cuts(func, args, kwargs, results)
        if any(tensor.requires_grad for tensor in results):
            self._look_at_loss(func, args, kwargs)
        for tensor in results:
            self._keep(tensor, cut)

    def _cuts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> bool:
        """Whether a function takes some of the rows of its first argument; a slice counts even if it takes all of them."""
        source = args[0] if args else None
        if not isinstance(source, Tensor) or source.dim() == 0 or source.shape[0] != self._num_samples:
            return False
        if func is Tensor.__getitem__:
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if isinstance(first, (Tensor, list)):
                # A permutation, as of mixup, or a choice.
                return any(tensor.dim() == 0 or tensor.shape[0] != self._num_samples for tensor in results)
            return not (first is None or first is Ellipsis or first == slice(None))
        if func in _CUTS:
            position = 1 if func.__name__ in ("narrow", "select", "unbind") else 2
            return bool(kwargs.get("dim", args[position] if len(args) > position else 0) == 0)
        return False

    def _look_at_loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _SUMS or func in _MEANS:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            over_samples = dims is None or 0 in ([dims] if isinstance(dims, int) else list(dims))
            if over_samples and args[0].dim() > 0:
                if func in _SUMS:
                    self.findings.add(Reason.SUM_LOSS)
                self._mean_seen = True
        signature = _LOSSES.get(func)
        if signature is None:
            return
        given = signature.bind(*args, **kwargs).arguments
        reduction = given.get("reduction", "mean")
        if reduction == "sum" or given.get("size_average") is False:
            self.findings.add(Reason.SUM_LOSS)
        elif reduction == "none" or given.get("reduce") is False:
            self._own_reduction = True
        if func in (F.cross_entropy, F.nll_loss):
            target, ignored = given["target"], given.get("ignore_index", -100)
            unequal = given.get("weight") is not None or ignored >= 0
            if unequal or (not target.is_floating_point() and bool((target == ignored).any())):
                self.findings.add(Reason.WEIGHTED_LOSS)

    def _keep(self, tensor: Tensor, cut: bool) -> None:
        self._made[id(tensor)] = (tensor, cut)
        if tensor.layout == torch.strided and not cut:
            self._memory.add(tensor.untyped_storage().data_ptr())

    def _is_cut(self, tensor: Tensor) -> bool | None:
        """Whether a tensor holds some of the batch's rows only; None if it is not made of the batch at all."""
        known = self._made.get(id(tensor))
        if known is not None:
            return known[1]
        # Aliases that no torch function makes, as the old torch.autograd.Variable.
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self._memory:
            return self._num_samples not in tensor.shape
        return None

    def _place(self, tensor: Tensor, number: int) -> Place | None:
        sizes = list(tensor.shape)
        if self._num_samples in sizes:
            return number, sizes.index(self._num_samples), 1
        if sizes and sizes[0] and sizes[0] % self._num_samples == 0:
            return number, 0, sizes[0] // self._num_samples
        return None

    def _enter(self) -> None:
        global _tracer
        _tracer = self
        if not self._entered:
            self.__enter__()
            self._entered = True

    def _leave(self) -> None:
        # A mode of the script's own may lie above; then this one stays, and watches nothing.
        if self._entered and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self._entered = False


_tracer: Tracer | None = None
# What looks at every forward once the tracing is over; set by the engine.
_guard: Callable[[nn.Module, Callable[[], list[Tensor]]], None] | None = None


def set_guard(guard: Callable[[nn.Module, Callable[[], list[Tensor]]], None]) -> None:
    """Sets what is called before each forward with gradients, with the module and what finds the tensors in its arguments."""
    global _guard
    _guard = guard


# Plain functions, as a model may be copied or saved together with its hooks.
def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _tracer is not None and _tracer._watching:
        _tracer.before(module, args, kwargs)
    elif _guard is not None and torch.is_grad_enabled():
        _guard(module, lambda: list(tensors_in([args, kwargs])))


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if _tracer is not None:
        _tracer.after(args, kwargs, result)
