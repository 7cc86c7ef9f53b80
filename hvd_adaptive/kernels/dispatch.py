"""Chooses the kernels of a tensor's device: numba on CPU, Triton on CUDA."""

from __future__ import annotations

import functools
import importlib.util
import logging
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from hvd_adaptive.kernels import reference

log = logging.getLogger(__name__)

_NONE = np.empty(0, np.float32)


def maxmin_encode(
    values: Tensor, payload: Tensor, *, bits: int, bucket: int, key: int | None, residual: Tensor | None = None
) -> None:
    """Writes the max-min code of ``values``; see :func:`hvd_adaptive.kernels.reference.maxmin_encode`.

    A residual, fp32, of the values' shape, is added to them, and then holds what the code has lost.
    """
    if values.is_cuda:
        if residual is not None:
            values = residual.add_(values)
        _cuda().maxmin_encode(values, payload, bits, bucket, key)
        if residual is not None:
            _cuda().maxmin_decode(payload, residual, bits, bucket, -1)
    elif values.numel():
        meta, packed = _split(payload, values.numel(), bucket, meta_size=2, num_bits=bits)
        first, second = (np.uint32(word) for word in ((key or 0) & 0xFFFFFFFF, (key or 0) >> 32))
        own = _NONE if residual is None else residual.numpy()
        _cpu().maxmin_encode(
            values.numpy(), own, meta.reshape(-1, 2), packed, bits, bucket, key is not None, first, second
        )


def maxmin_decode(payload: Tensor, out: Tensor, *, bits: int, bucket: int, add: int) -> None:
    """Decodes a max-min payload; see :func:`hvd_adaptive.kernels.reference.maxmin_decode`."""
    if out.is_cuda:
        _cuda().maxmin_decode(payload, out, bits, bucket, add)
    elif out.numel():
        meta, packed = _split(payload, out.numel(), bucket, meta_size=2, num_bits=bits)
        _cpu().maxmin_decode(meta.reshape(-1, 2), packed, out.numpy(), bits, bucket, add)


def sign_encode(values: Tensor, payload: Tensor, *, bucket: int) -> None:
    """Writes the sign code of ``values``; see :func:`hvd_adaptive.kernels.reference.sign_encode`."""
    if values.is_cuda:
        reference.sign_encode(values, payload, bucket)
    elif values.numel():
        means, packed = _split(payload, values.numel(), bucket, meta_size=1, num_bits=1)
        _cpu().sign_encode(values.numpy(), means, packed, bucket)


def sign_decode(payload: Tensor, out: Tensor, *, bucket: int, add: int) -> None:
    """Decodes a sign payload; see :func:`hvd_adaptive.kernels.reference.sign_decode`."""
    if out.is_cuda:
        reference.sign_decode(payload, out, bucket, add)
    elif out.numel():
        means, packed = _split(payload, out.numel(), bucket, meta_size=1, num_bits=1)
        _cpu().sign_decode(means, packed, out.numpy(), bucket, add)


def _split(payload: Tensor, num_elements: int, bucket: int, *, meta_size: int, num_bits: int) -> tuple[Any, Any]:
    data = payload.numpy()
    meta_bytes = 4 * meta_size * -(-num_elements // bucket)
    end = meta_bytes + num_bits * -(-num_elements // 8)
    data[end:] = 0
    return data[:meta_bytes].view(np.float32), data[meta_bytes:end]


@functools.cache
def _cpu() -> ModuleType:
    # Imported at first use: numba takes about a second to load, and no run without a codec needs it.
    try:
        from hvd_adaptive.kernels import cpu
    except RuntimeError as error:
        raise RuntimeError(
            f"numba cannot keep its compiled code: {error}. Set NUMBA_CACHE_DIR to a folder that can be written."
        ) from error
    return cpu


@functools.cache
def _cuda() -> ModuleType:
    if importlib.util.find_spec("triton") is None:
        log.warning(
            "Triton is not installed: the codecs run as plain torch operations on the GPU, several times slower. "
            "Install the triton that PyTorch's CUDA wheels require."
        )
        return reference
    from hvd_adaptive.kernels import cuda

    return cuda
