"""Numbers that know that they are the size of a batch: what a script decides by them would differ between unequal ranks.

A script that leaves out a short batch (``if x.size(0) != batch_size``), or counts samples to know when to validate
(``if seen >= limit``), works with equal shares only. So while a batch is watched, the sizes that the script is given are
numbers which remember where they come from, through sums, products and quotients. Integers tell when they are compared with
a number that does not come from a batch. One batch later the script's next sum makes plain numbers of them. ``len(x)`` is a
plain integer in any case, for which see decisions.py.
"""

from __future__ import annotations

import functools
import numbers
import operator
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# What a script asks for sizes by.
SHAPES = {Tensor.size, Tensor.shape.__get__}  # type: ignore[attr-defined]
COUNTS = {Tensor.numel, Tensor.nelement}
SIZES = {*SHAPES, *COUNTS, Tensor.__len__}
# Functions that are given a size, not data.
FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace, torch.range,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal,
}  # fmt: skip
# Who is told of a decision, while a batch is watched.
_told: Callable[[], None] | None = None
# Where installed packages are, and this one; others may be in further folders, which the packages' own records tell.
_INSTALLED = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).resolve().parents[1]),
)
# What stands between a script's line and the function that it calls.
_PASSED = (
    str(Path(__file__).resolve().parents[1]),
    *(str(Path(torch.__file__).parent / name) for name in ("overrides.py", "_tensor.py", "functional.py", "nn/functional.py")),
)


class Size(int):
    """A batch's size, or a number made of one.

    Attributes:
        is_count: made by adding and multiplying alone, so at least 1 whatever the rank's share.
        of: what it would be for a batch of another size.
    """

    is_count = True
    of: Callable[[int], int]

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def __bool__(self) -> bool:
        if not self.is_count:
            _tell()
        return int(self) != 0

    __hash__ = int.__hash__


class Ratio(float):
    """A fraction that is made of a batch's size.

    Attributes:
        of: what it would be for a batch of another size.
    """

    of: Callable[[int], float]

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


class Dimension(int):
    """A length along another dimension of a tensor, which is as long as the batch by chance."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


@functools.lru_cache(maxsize=4096)
def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package: what progress bars compare, say, is not what the script decides."""
    if path.startswith((*_INSTALLED, "<frozen")) or not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts):
        return True
    # The first entry is the script's own folder.
    folders = [entry for entry in sys.path[1:] if entry and entry != sys.path[0] and path.startswith(f"{entry.rstrip('/')}/")]
    return any(True for _ in Path(max(folders, key=len)).glob("*.dist-info")) if folders else False


def _tell() -> None:
    # This function, the number's own, and who compares.
    if _told is not None and not is_installed(sys._getframe(2).f_code.co_filename):
        _told()


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(int, name)

    @functools.wraps(compare)
    def method(self: Size, other: Any) -> Any:
        is_number = isinstance(other, numbers.Real) and not isinstance(other, Size)
        # Any share has more than no samples.
        if is_number and (not self.is_count or other > 0):
            _tell()
        return compare(self, other)

    return method


def _arithmetic(name: str, *, is_count: bool) -> Callable[..., Any]:
    compute = getattr(int, name)

    @functools.wraps(compute)
    def method(self: Size, other: Any, *modulo: int) -> Any:
        if isinstance(other, float):
            return _fraction(name)(self, other)
        result = compute(self, other, *modulo)
        if _told is None or type(result) is not int:
            return result
        size = Size(result)
        size.is_count = is_count and self.is_count and getattr(other, "is_count", True)
        size.of = lambda count: compute(self.of(count), other.of(count) if isinstance(other, Size) else other, *modulo)
        return size

    return method


@functools.cache
def _fraction(name: str) -> Callable[..., Any]:
    compute = getattr(float, name)

    def method(self: Any, other: Any) -> Any:
        result = compute(float(self), other)
        if _told is None or type(result) is not float:
            return result
        ratio = Ratio(result)
        ratio.of = lambda count: compute(float(self.of(count)), other.of(count) if is_size(other) else other)
        return ratio

    return method


for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Size, _name, _comparison(_name))
for _name in ("__add__", "__radd__", "__mul__", "__rmul__"):
    setattr(Size, _name, _arithmetic(_name, is_count=True))
for _name in ("__sub__", "__rsub__", "__pow__", "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__"):
    setattr(Size, _name, _arithmetic(_name, is_count=False))
for _name in ("__truediv__", "__rtruediv__"):
    setattr(Size, _name, _fraction(_name))
for _name in (
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__",
):  # fmt: skip
    setattr(Ratio, _name, _fraction(_name))


def watch(tell: Callable[[], None]) -> None:
    """Begins to watch.

    Args:
        tell: called when the script decides by a size.
    """
    global _told
    _told = tell


def stop() -> None:
    """Ends the watching."""
    global _told
    _told = None


def calling_frame() -> FrameType | None:
    """Returns the innermost frame of the script's own code; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def caller_frame() -> FrameType | None:
    """Returns the frame of the code, the script's or a library's, that has called the torch function at hand."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return frame


def own_frame() -> FrameType | None:
    """Returns the frame of the script's own code that has called the torch function at hand; None: a library has."""
    frame = caller_frame()
    return None if frame is None or is_installed(frame.f_code.co_filename) else frame


def counts(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function counts in a tensor, as words that are no padding."""
    is_sum = getattr(func, "__name__", "") in ("sum", "count_nonzero") and args and isinstance(args[0], Tensor)
    return bool(is_sum) and not args[0].is_floating_point() and not args[0].is_complex()


def as_dimension(value: Any) -> Any:
    """Returns an integer as a length that is not the batch's."""
    return Dimension(operator.index(value))


def is_size(value: Any) -> bool:
    """Whether a number is a batch's size, or made of one."""
    return isinstance(value, (Size, Ratio))


def first_of(places: Any) -> Any:
    """Returns what ``x[places]`` has for the first dimension."""
    return places[0] if isinstance(places, tuple) and places else places


def fills_by_length(places: Any, num_samples: int, *, length_asked: bool) -> bool:
    """Whether places are a stretch as long as the batch: a tensor of a fixed length that is filled so has no room for more."""
    first = first_of(places)
    if not isinstance(first, slice) or not isinstance(first.stop, int) or first.step is not None:
        return False
    start = 0 if first.start is None else first.start
    return (length_asked or is_size(first.stop)) and int(first.stop) - int(start) == num_samples


def as_size(value: Any, num_samples: int | None = None) -> Any:
    """Returns an integer as a batch's size, or as what it is of a batch of so many samples."""
    size = Size(operator.index(value))
    number, whole = int(size), int(num_samples or size)
    size.of = lambda count: number * count // max(whole, 1)
    return size


def along(place: int | None, args: tuple[Any, ...], result: Any, dim: Any = None) -> Any:
    """Returns what a question for a tensor's size has given, with the size along one dimension as a batch's."""
    if isinstance(result, tuple):
        return torch.Size([as_size(size) if dim == place else size for dim, size in enumerate(result)])
    asked = args[1] if len(args) > 1 else dim
    is_place = isinstance(asked, int) and args[0].dim() and asked % args[0].dim() == place
    return as_size(result) if is_place else result
