"""State as people nest it, split into JSON and named tensors, and put together again; never pickled.

A leaf that JSON has no form for, and a dict whose keys are not all strings, becomes ``{"$": kind, ...}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KIND = "$"
# What safetensors calls the dtypes that it knows.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    **{
        getattr(torch, name): code
        # Not every torch that is supported has them.
        for name, code in (
            ("uint16", "U16"), ("uint32", "U32"), ("uint64", "U64"),
            ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"),
        )
        if hasattr(torch, name)
    },
}  # fmt: skip


def flatten_state(
    state: Any, reuse: Mapping[str, Tensor] | None = None, *, copy: bool = True
) -> tuple[Any, dict[str, Tensor]]:
    """Splits nested state into a skeleton for JSON and its tensors. COPIES every tensor and array, unless ``copy`` is False.

    Args:
        state: dicts (keys: str, int, float, bool, None), lists, tuples, str, int, float, bool, None, NumPy arrays and
            scalars, dense tensors on any device, complex ones too.
        reuse: the tensors of an earlier call that nobody needs any more, which are overwritten where they fit: the system
            takes longer to find new memory than to copy into it.
        copy: False to get tensors that hold nothing yet, to be given as ``reuse`` later.

    Returns:
        The skeleton, and the tensors by name: contiguous, on the CPU, sharing no memory with ``state``.

    Raises:
        TypeError: for anything else, naming where it stands.
    """
    tensors: dict[str, Tensor] = {}

    def keep(value: Tensor, where: str) -> str:
        name = first = where[1:]
        number = 1
        # safetensors keeps its metadata under that name.
        while name in tensors or name == "__metadata__":
            number += 1
            name = f"{first}#{number}"
        copied = None if reuse is None else reuse.get(name)
        if copied is None or (copied.shape, copied.dtype) != (value.shape, value.dtype):
            copied = torch.empty(value.shape, dtype=value.dtype)
        tensors[name] = copied.copy_(value.detach()) if copy else copied
        return name

    def split(value: Any, where: str) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (str, bool, int)):
            return value
        if isinstance(value, float):
            # JSON has no NaN and no infinity.
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if isinstance(value, dict):
            if all(isinstance(key, str) for key in value) and _KIND not in value:
                return {key: split(item, f"{where}.{key}") for key, item in value.items()}
            return {
                _KIND: "dict",
                "items": [[split(k, where), split(v, f"{where}.{k}")] for k, v in value.items()],
            }
        if isinstance(value, (list, tuple)):
            items = [split(item, f"{where}.{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            # from_numpy refuses foreign byte order and read-only memory.
            native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {_KIND: "array", "name": keep(torch.from_numpy(native), where)}
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            real = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value
            if real.dtype not in DTYPES:
                raise TypeError(f"state {where[1:]} cannot be saved: safetensors has no dtype {real.dtype}")
            return {_KIND: "complex" if value.is_complex() else "tensor", "name": keep(real, where)}
        raise TypeError(
            f"state {where[1:]} cannot be saved, got {type(value).__name__}: use numbers, strings, None, "
            "lists, tuples, dicts, NumPy arrays of numbers and dense tensors"
        )

    return split(state, ""), tensors


def unflatten_state(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    """Puts together what :func:`flatten_state` split. Tensors come back on the CPU and are not copied.

    Raises:
        ValueError: if a tensor is missing or the skeleton is none of :func:`flatten_state`'s.
    """
    if isinstance(skeleton, list):
        return [unflatten_state(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = skeleton.get(_KIND)
    try:
        if kind is None:
            return {key: unflatten_state(item, tensors) for key, item in skeleton.items()}
        if kind == "float":
            return float(skeleton["value"])
        if kind == "dict":
            return {
                unflatten_state(k, tensors): unflatten_state(v, tensors) for k, v in skeleton["items"]
            }
        if kind == "tuple":
            return tuple(unflatten_state(item, tensors) for item in skeleton["items"])
        if kind in ("tensor", "array", "complex"):
            tensor = tensors[skeleton["name"]]
            return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else torch.view_as_complex(tensor)
    except KeyError as error:
        raise ValueError(f"state names {error.args[0]!r}, which is not there") from None
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"state holds a {_KIND!r} of kind {kind!r} that is none: {error}") from None
    raise ValueError(f"state holds a {_KIND!r} of unknown kind {kind!r}")


def check_like(state: Any, like: Any, where: str) -> None:
    """Checks that a state of unknown origin has the form of one that is known: every name, and the kind of value under it.

    What is optional, or keyed by data and not by names (an optimizer's state, logical ranks), is left to whoever takes it over,
    as are shapes and the lengths of lists.

    Args:
        state: nested, as :func:`unflatten_state` returns it.
        like: a state of the right form, as of an object that has just been made.
        where: what they are called.

    Raises:
        ValueError: naming the first name that is missing, or that holds something else.
    """
    if like is None or (state is None and not isinstance(like, _SCALARS)):
        return
    kind: Any = next((kind for kind in _KINDS if isinstance(like, kind)), object)
    if not isinstance(state, kind):
        raise ValueError(f"{where} should be of type {type(like).__name__}, and is {type(state).__name__}")
    if isinstance(like, dict) and all(isinstance(name, str) and name.isidentifier() for name in like):
        for name, value in like.items():
            if name not in state:
                raise ValueError(f"{where} has no {name!r}")
            check_like(state[name], value, f"{where}.{name}")


_SCALARS = (bool, int, float, str, np.generic)
# A number that happened to be whole is a number.
_KINDS: tuple[Any, ...] = ((bool, np.bool_), (int, float, np.number), str, dict, (list, tuple), Tensor, np.ndarray)
