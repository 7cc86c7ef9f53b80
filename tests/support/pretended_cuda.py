"""A pretended cuda:0 for a torch that has none. Data stay on the CPU; what a real GPU would do at that place is taken down.

Storages are marked, ``Tensor.device`` and ``is_cuda`` say cuda:0, and torch's function and dispatch modes see every operation.
What is found: places where the host would wait for the GPU, copies of memory that is not pinned, operations on tensors of several
devices, and uses of a tensor on a stream that has neither waited for the stream that made it nor told the allocator. What is not
found: anything that only real kernels show. One at a time in a process.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
A = torch.ops.aten
_device_of, _is_cuda_of = torch._C.TensorBase.device, torch._C.TensorBase.is_cuda  # type: ignore[attr-defined]
# Ranks as threads take each other's tensors, which no GPU's ranks do.
_TRANSPORT = "comm/threads.py"
# What reads a value of the device, or makes a tensor whose shape follows from values there.
_WAITING = {
    A._local_scalar_dense.default, A.nonzero.default, A.masked_select.default, A.equal.default, A._unique2.default,
    A.bincount.default, A.repeat_interleave.Tensor, A._coalesce.default, A.unique_consecutive.default, A.unique_dim.default,
}  # fmt: skip
_BY_INDEX = {A.index.Tensor, A.index_put_.default, A._index_put_impl_.default}
_FREE = {A.copy_.default, A._to_copy.default, A.set_.source_Tensor, *_BY_INDEX}
_VIEWS = {
    *("view", "slice", "detach", "t", "transpose", "select", "split", "split_with_sizes", "alias", "expand", "permute"),
    *("unsqueeze", "squeeze", "_unsafe_view", "as_strided", "unbind", "reshape", "view_as", "_reshape_alias", "empty"),
    *("empty_like", "empty_strided", "_values", "_indices", "record_stream", "detach_", "set_", "is_pinned", "_pin_memory"),
    *("sparse_dim", "dense_dim", "_nnz", "is_coalesced", "indices", "values"),
}  # fmt: skip


class Stream:
    """A stream: how far it has got, and how far it has waited for others."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.now = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self.seen[other] = other.now
        for stream, when in other.seen.items():
            self.seen[stream] = max(when, self.seen.get(stream, 0))

    def synchronize(self) -> None:
        note("wait", "Stream.synchronize")


class Event:
    """An event, which the device has always passed."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._is_known = False

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        self._is_known = True
        return True

    def synchronize(self) -> None:
        # Of an event that is known to be past nobody waits.
        if not self._is_known:
            note("wait", "Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Log:
    """What one rank did, by phase of its run.

    Attributes:
        phase: set by the test; what is found counts there.
        found: number of findings by (phase, kind, what, where).
        kernels: launches in code of this package, by phase.
        num_steps: counted by the test.
    """

    def __init__(self) -> None:
        self.phase = "start"
        self.num_steps = 0
        self.found: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
        self.kernels: collections.Counter[str] = collections.Counter()
        self.default_stream = Stream()

    def count(self, kind: str, phase: str) -> int:
        """Returns how often something was found in a phase."""
        return sum(times for (where, what, *_), times in self.found.items() if (where, what) == (phase, kind))

    def lines(self, *phases: str) -> list[str]:
        """Returns the findings of some phases for people."""
        found = self.found.items()
        return [f"{times} x {kind} {what} at {line}" for (phase, kind, what, line), times in found if phase in phases]


_local = threading.local()


def note(kind: str, what: object) -> None:
    """Takes down a finding: of this package's code, and of a race or mix also where it shows in the test's."""
    log = getattr(_local, "log", None)
    line = _line() or ("the loop" if kind in ("race", "mix") else "")
    if log is not None and line and line != _TRANSPORT:
        log.found[_phase(log), kind, str(what).replace("aten.", ""), line] += 1


def _phase(log: Log) -> str:
    return getattr(_local, "phase", None) or log.phase


def _line() -> str:
    """The line of this package that torch was called from; empty if it was somebody else's, such as the test's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/optim/" in name:
            # A step of torch's own optimizers, whoever calls it.
            return ""
        if name.endswith(_TRANSPORT):
            return _TRANSPORT
        if name != __file__ and "site-packages" not in name and "contextlib" not in name and name[:1] != "<":
            is_ours = "hvd_adaptive/" in name and "/tests/" not in name
            return f"{name.rsplit('hvd_adaptive/', 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}" if is_ours else ""
        frame = frame.f_back
    return ""


def _storage(tensor: torch.Tensor) -> Any:
    # Asked for at every operation: no generator here.
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return (tensor if tensor.layout is torch.strided else tensor._values()).untyped_storage()


class _Marks:
    """Storages that are on the device: who made them when, and who has told the allocator of them; and pinned ones."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[StorageWeakRef, Stream, int, set[Stream]]] = {}
        self._pinned: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Any, *, written: bool = True) -> Any:
        for leaf in tree_leaves(tensor):
            if isinstance(leaf, torch.Tensor):
                storage, stream = _storage(leaf), current_stream()
                known = self._made.get(storage._cdata)
                if known is None or known[0].expired():
                    stream.now += 1
                    self._made[storage._cdata] = (StorageWeakRef(storage), stream, stream.now, {stream})
                elif written:
                    stream.now += 1
                    self._made[storage._cdata] = (known[0], stream, stream.now, known[3])
        return tensor

    def of(self, tensor: Any) -> tuple[Any, Stream, int, set[Stream]] | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if _device_of.__get__(tensor).type != "cpu":
                return None
            try:
                known = self._made.get((tensor if tensor.layout is torch.strided else tensor._values()).untyped_storage()._cdata)
            except (RuntimeError, NotImplementedError):
                return None
        return None if known is None or known[0].expired() else known

    def drop(self, tensor: torch.Tensor) -> torch.Tensor:
        self._made.pop(_storage(tensor)._cdata, None)
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return self.drop(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        known = self._pinned.get(_storage(tensor)._cdata)
        return known is not None and not known.expired()


_marks = _Marks()


def is_on(tensor: Any) -> bool:
    """Returns whether a tensor is on the pretended device."""
    return not getattr(_local, "is_plain", False) and _marks.of(tensor) is not None


def current_stream(device: Any = None) -> Stream:
    """This thread's stream."""
    stream = getattr(_local, "stream", None)
    if stream is None:
        log = getattr(_local, "log", None)
        stream = Stream() if log is None else log.default_stream
    return stream


@contextlib.contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    before, _local.stream = getattr(_local, "stream", None), stream
    try:
        yield
    finally:
        _local.stream = before


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    known = _marks.of(tensor)
    if known is None:
        note("mix", "record_stream of what is on the host")
    else:
        known[3].add(stream)


def _check_stream(tensor: torch.Tensor) -> None:
    known, stream = _marks.of(tensor), current_stream()
    assert known is not None
    _, maker, when, told = known
    if maker is not stream and stream.seen.get(maker, 0) < when:
        note("race", "the stream has not waited for the one that made it")
    if stream not in told:
        note("race", "no record_stream")


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on = [is_on(tensor) for tensor in tensors]
        name = func.name().split("::")[1].split(".")[0]
        made_there = _names_cuda(kwargs.get("device"))
        if made_there:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if any(on):
            known_size = func is A.repeat_interleave.Tensor and kwargs.get("output_size") is not None
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if func in _BY_INDEX else []
            if (func in _WAITING and not known_size) or masks:
                note("wait", f"{func} by a mask" if masks else func)
            if func is A.copy_.default and on[0] != on[1]:
                self._copied(tensors, kwargs, to_device=on[0], non_blocking=kwargs.get("non_blocking") or args[2:3] == (True,))
            elif func not in _FREE and any(not own and tensor.dim() > 0 for own, tensor in zip(on, tensors, strict=True)):
                note("mix", func)
            if name not in _VIEWS:
                log = getattr(_local, "log", None)
                if log is not None and (line := _line()) and line != _TRANSPORT:
                    log.kernels[_phase(log)] += 1
                    log.found[_phase(log), "kernel", name, line] += 1
                for own, tensor in zip(on, tensors, strict=True):
                    if own:
                        _check_stream(tensor)
        result = func(*args, **kwargs)
        if made_there or (any(on) and func is not A.copy_.default):
            _marks.add(result, written=name not in _VIEWS)
        elif func is A.copy_.default and on[0]:
            _marks.add(args[0])
        return result

    @staticmethod
    def _copied(tensors: list[torch.Tensor], kwargs: Any, *, to_device: bool, non_blocking: bool) -> None:
        host = tensors[1] if to_device else tensors[0]
        # A single number is an argument of the kernel.
        if to_device and host.dim() == 0:
            return
        if not _marks.is_pinned(host):
            note("pageable", "host to device" if to_device else "device to host")
        elif not non_blocking:
            note("wait", "a copy that blocks")


def _names_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, bool) and torch.device(device).type == "cuda"


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None:
            if name == "numpy" and is_on(tensor):
                raise TypeError(f"can't convert cuda:0 device type tensor to numpy (at {_line()})")
            if name == "tolist" and is_on(tensor):
                note("wait", "tolist")
            if name == "pin_memory":
                return _marks.pin(tensor.clone())
            if name == "is_pinned":
                return _marks.is_pinned(tensor)
            if name == "new" and is_on(tensor):
                return _marks.add(func(*args, **kwargs))
            if name in ("to", "cpu", "cuda"):
                return self._moved(func, name, tensor, list(args[1:]), kwargs)
        device = kwargs.get("device")
        if _names_cuda(device):
            kwargs["device"] = "cpu"
            if name in ("tensor", "as_tensor", "new_tensor") and not isinstance(args[-1], (int, float)):
                note("pageable", f"{name} of numbers")
            return _marks.add(func(*args, **kwargs))
        if kwargs.pop("pin_memory", False):
            return _marks.pin(func(*args, **kwargs))
        if name == "new_tensor" and tensor is not None and is_on(tensor):
            note("pageable", "new_tensor of numbers")
            return _marks.add(func(*args, **kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _moved(func: Any, name: str, tensor: torch.Tensor, rest: list[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = "cpu" if name == "cpu" else CUDA if name == "cuda" else kwargs.pop("device", None)
        if name == "to" and target is None:
            for place, value in enumerate(rest):
                if isinstance(value, torch.Tensor):
                    target, rest[place] = value.device, value.dtype
                    break
                if isinstance(value, (torch.device, str)):
                    target = rest.pop(place)
                    break
        non_blocking = bool(kwargs.pop("non_blocking", False))
        was = is_on(tensor)
        if target is None or _names_cuda(target) == was:
            dtypes = [value for value in rest if isinstance(value, torch.dtype)]
            dtype = kwargs.pop("dtype", None) or (dtypes[0] if dtypes else tensor.dtype)
            return func(tensor, dtype, copy=kwargs.get("copy", False)) if name == "to" else tensor
        if not was:
            if not _marks.is_pinned(tensor):
                note("pageable", "host to device")
            elif not non_blocking:
                note("wait", "a copy that blocks")
        else:
            note("wait", "a copy to the host")
            note("pageable", "device to host")
        dtype = kwargs.get("dtype") or next((value for value in rest if isinstance(value, torch.dtype)), tensor.dtype)
        with torch._C._DisableTorchDispatch():
            moved = tensor.clone().to(dtype) if tensor.requires_grad else tensor.detach().clone().to(dtype)
        return _marks.drop(moved) if was else _marks.add(moved)


@contextlib.contextmanager
def recording(log: Log, phase: str | None = None) -> Iterator[Log]:
    """Takes down what this thread does."""
    before = getattr(_local, "log", None), getattr(_local, "phase", None)
    _local.log, _local.phase = log, phase
    try:
        with _Functions(), _Operations():
            yield log
    finally:
        _local.log, _local.phase = before


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


class _Fetcher(ThreadPoolExecutor):
    """Its threads record for the thread that gives them work."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        log = _local.log

        def run() -> Any:
            with recording(log, "fetch"):
                return function(*args, **kwargs)

        return super().submit(run)


@contextlib.contextmanager
def pretended_cuda(monkeypatch: Any) -> Iterator[None]:
    """Has torch see a GPU, until the test's end."""
    from hvd_adaptive.compress.kernels import dispatch
    from hvd_adaptive.engine import batches

    monkeypatch.setattr(torch.Tensor, "device", property(lambda t: CUDA if is_on(t) else _device_of.__get__(t)), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(is_on), raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", _record_stream, raising=False)
    monkeypatch.setattr(dispatch, "_cuda", lambda: _one_kernel_each(dispatch.reference))
    monkeypatch.setattr(batches, "ThreadPoolExecutor", _Fetcher)
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def backward(*args: Any, **kwargs: Any) -> Any:
        with _Functions():
            return run_backward(*args, **kwargs)

    # torch switches modes of functions off while its engine runs.
    for module in (torch.autograd, torch.autograd.graph):
        if hasattr(module, "_engine_run_backward"):
            monkeypatch.setattr(module, "_engine_run_backward", backward)
    monkeypatch.setattr(torch, "Generator", _Generator)
    properties = types.SimpleNamespace(uuid="GPU-0", name="Pretended GPU", major=9, minor=0)
    for name, value in {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "synchronize": lambda device=None: note("wait", "torch.cuda.synchronize"), "set_device": lambda device: None,
        "empty_cache": lambda: None, "current_stream": current_stream, "stream": _on_stream, "Stream": Stream, "Event": Event,
        "device": lambda device: contextlib.nullcontext(), "mem_get_info": lambda device=None: (10 << 30, 16 << 30),
        "get_device_name": lambda device=None: properties.name, "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(), "set_rng_state": lambda state, device=None: None,
        "is_current_stream_capturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    yield


def _one_kernel_each(reference: Any) -> Any:
    """The codecs' kernels: the plain reference computes, and each call counts as one launch."""

    def launched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log = getattr(_local, "log", None)
            if log is not None:
                log.kernels[_phase(log)] += 1
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    if not is_on(leaf):
                        note("mix", name)
                    else:
                        _check_stream(leaf)
            _local.is_plain = True
            try:
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    result = getattr(reference, name)(*args, **kwargs)
            finally:
                _local.is_plain = False
            return _marks.add(result)

        return call

    names = (
        "levels_encode", "levels_decode", "cast_encode", "cast_decode", "sum_of_squares", "select_large", "decode_large",
    )  # fmt: skip
    return types.SimpleNamespace(**{name: launched(name) for name in names})
