"""Chooses the kernels of a tensor's device: numba on CPU, Triton on CUDA."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import math
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.compress.kernels import reference

log = logging.getLogger(__name__)

_NONE = np.empty(0, np.float32)
# Older PyTorch's _foreach_norm has places of 32 bits.
_MOST_IN_A_LIST = 2**31 - 1


def levels_encode(
    values: Tensor,
    payload: Tensor,
    *,
    bits: int,
    bucket: int,
    key: int | None,
    spread: float | None = None,
    residual: Tensor | None = None,
    weight: float = 1.0,
    piece: int | None = None,
) -> None:
    """Writes the code of ``values``; see :func:`hvd_adaptive.compress.kernels.reference.levels_encode`."""
    if values.is_cuda:
        _cuda().levels_encode(values, payload, bits, bucket, key, spread, residual, weight, piece)
        return
    values = reference.with_residual(values, None, weight)
    first, second = (np.uint32(word) for word in ((key or 0) & 0xFFFFFFFF, (key or 0) >> 32))
    each = reference.each_piece(
        payload, values.numel(), piece, lambda num: reference.levels_bytes(num, bits, bucket)
    )
    for own, span in each:
        part, lost = values[span].numpy(), _NONE if residual is None else residual[span].numpy()
        meta, packed = _split(own, len(part), bits, bucket)
        place = np.uint32(span.start & 0xFFFFFFFF)
        _cpu().levels_encode(
            part, lost, meta, packed, bits, bucket, spread or 0.0, key is not None, first, second, place
        )


def levels_decode(
    payload: Tensor, out: Tensor, *, bits: int, bucket: int, add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Decodes payloads; see :func:`hvd_adaptive.compress.kernels.reference.levels_decode`."""
    if out.is_cuda:
        _cuda().levels_decode(payload, out, bits, bucket, add, num_peers, piece)
    elif out.numel():
        each = reference.each_payload(
            payload, out, add, num_peers, piece, lambda num: reference.levels_bytes(num, bits, bucket)
        )
        for own, part, sign in each:
            meta, packed = _split(own, part.numel(), bits, bucket)
            _cpu().levels_decode(meta, packed, part.numpy(), bits, bucket, sign)


def cast_encode(
    values: Tensor,
    payload: Tensor,
    *,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    weight: float = 1.0,
    piece: int | None = None,
) -> None:
    """Writes numbers of a type; see :func:`hvd_adaptive.compress.kernels.reference.cast_encode`."""
    (_cuda() if values.is_cuda else reference).cast_encode(values, payload, dtype, residual, weight, piece)


def cast_decode(
    payload: Tensor, out: Tensor, *, dtype: torch.dtype, add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Reads numbers of a type; see :func:`hvd_adaptive.compress.kernels.reference.cast_decode`."""
    (_cuda() if out.is_cuda else reference).cast_decode(payload, out, dtype, add, num_peers, piece)


def sum_of_squares(values: Tensor) -> Tensor:
    """Returns the sum of squares in fp64; see :func:`hvd_adaptive.compress.kernels.reference.sum_of_squares`."""
    return (_cuda() if values.is_cuda else reference).sum_of_squares(values)


def all_finite(*tensors: Tensor) -> bool:
    """Returns whether all elements of tensors are finite; reads them once, and waits once for a GPU.

    Args:
        tensors: of any shape, dense or sparse, all on one device.
    """
    values = [v for v in (t._values() if t.is_sparse else t for t in tensors) if v.numel()]
    if not values:
        return True
    # A finite sum proves all elements finite; an overflow does not prove the contrary.
    if values[0].is_cuda:
        alone = [v for v in values if v.numel() > _MOST_IN_A_LIST or len(values) == 1]
        listed = [v for v in values if v.numel() <= _MOST_IN_A_LIST and len(values) > 1]
        norms = torch._foreach_norm(listed) if listed else ()
        if torch.stack([*norms, *map(sum_of_squares, alone)]).isfinite().all():
            return True
        return bool(torch.stack([v.isfinite().all() for v in values]).all())
    finite = all(math.isfinite(v.sum(dtype=torch.float32 if v.dtype == torch.float16 else None)) for v in values)
    return finite or all(bool(v.isfinite().all()) for v in values)


def select_large(
    values: Tensor, threshold: Tensor, payload: Tensor, *, sampled: bool, take: bool
) -> None:
    """Writes places and values of the largest; see :func:`hvd_adaptive.compress.kernels.reference.select_large`."""
    (_cuda() if values.is_cuda else reference).select_large(values, threshold, payload, sampled=sampled, take=take)


def decode_large(
    payload: Tensor,
    out: Tensor,
    num_entries: Callable[[int], int],
    *,
    add: int,
    num_peers: int = 1,
    piece: int | None = None,
) -> None:
    """Reads places and values into ``out``; see :func:`hvd_adaptive.compress.kernels.reference.decode_large`."""
    (_cuda() if out.is_cuda else reference).decode_large(payload, out, num_entries, add, num_peers, piece)


def _split(payload: Tensor, num_elements: int, bits: int, bucket: int) -> tuple[Any, Any]:
    data = payload.numpy()
    meta_bytes = 8 * -(-num_elements // bucket)
    end = meta_bytes + bits * -(-num_elements // 8)
    data[end:] = 0
    return data[:meta_bytes].view(np.float32).reshape(-1, 2), data[meta_bytes:end]


@functools.cache
def _cpu() -> ModuleType:
    # Imported at first use: numba takes about a second to load, and no run without a codec needs it.
    try:
        from hvd_adaptive.compress.kernels import cpu
    except RuntimeError as error:
        import numba

        settings: Any = numba.config
        if settings.CACHE_DIR:
            raise RuntimeError(
                f"numba cannot keep its compiled code: {error}. Set NUMBA_CACHE_DIR to a folder that can be written."
            ) from error
        # Neither the package nor the home can be written.
        folder = tempfile.TemporaryDirectory(prefix="hvd-adaptive-numba-")
        atexit.register(folder.cleanup)
        settings.CACHE_DIR = folder.name
        log.warning("codecs are compiled anew, for some seconds: set NUMBA_CACHE_DIR to a writable folder, which keeps them")
        from hvd_adaptive.compress.kernels import cpu
    return cpu


@functools.cache
def _cuda() -> ModuleType:
    if importlib.util.find_spec("triton") is None:
        log.warning(
            "Triton is not installed: the codecs run as plain torch operations on the GPU, several times slower. "
            "Install the triton that PyTorch's CUDA wheels require."
        )
        return reference
    from hvd_adaptive.compress.kernels import cuda

    return cuda
