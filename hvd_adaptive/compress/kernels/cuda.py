"""Launches the Triton kernels, with the interface of :mod:`.reference`. Imported where CUDA tensors are met.

Multiplication and addition are not fused (``enable_fp_fusion``), and divisions are rounded to nearest: the CPU's bits.
TRITON_INTERPRET=1 runs the kernels on CPU tensors, for tests. `benchmarks/triton_ahead.py` compiles all of them without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from hvd_adaptive.compress.kernels import cuda_codes, cuda_select
from hvd_adaptive.compress.kernels.reference import cast_bytes

# A program's values in registers: more spill, and take minutes to compile.
_TILE = 2048
_MOST_PROGRAMS = 1024
# Values to which one program adds entries: it searches each payload for them twice.
_SPAN = 4 * _TILE


def levels_encode(
    values: Tensor, payload: Tensor, bits: int, bucket: int, key: int | None, spread: float | None = None,
    residual: Tensor | None = None, weight: float = 1.0, piece: int | None = None,
) -> None:  # fmt: skip
    """Writes the code of ``values``; see :func:`hvd_adaptive.compress.kernels.reference.levels_encode`."""
    num = values.numel()
    if not num:
        return
    num_buckets, size, piece_bytes = _layout(num, bits, bucket, piece)
    first, second = (key or 0) & 0xFFFFFFFF, (key or 0) >> 32
    rows = _rows(bucket)
    with _device_of(values):
        cuda_codes.levels_encode[(num_buckets,)](
            values, values if residual is None else residual, payload.view(torch.float32), payload, num, size, piece_bytes,
            float(weight), _signed(first), _signed(second), BUCKET=bucket, BITS=bits, ROWS=rows, RANDOM=key is not None,
            SPREAD=spread or 0.0, FEEDBACK=residual is not None, num_warps=_warps(rows), enable_fp_fusion=False,
        )  # fmt: skip


def levels_decode(
    payload: Tensor, out: Tensor, bits: int, bucket: int, add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Decodes payloads; see :func:`hvd_adaptive.compress.kernels.reference.levels_decode`."""
    num = out.numel()
    if not num:
        return
    num_buckets, size, piece_bytes = _layout(num, bits, bucket, piece)
    rows = _rows(bucket)
    with _device_of(out):
        cuda_codes.levels_decode[(num_buckets, -(-bucket // (8 * rows)))](
            payload.view(torch.float32), payload, out, num, size, piece_bytes, num_peers, payload.numel() // num_peers,
            BUCKET=bucket, BITS=bits, ROWS=rows, ADD=add, num_warps=_warps(rows), enable_fp_fusion=False,
        )  # fmt: skip


def cast_encode(
    values: Tensor, payload: Tensor, dtype: torch.dtype,
    residual: Tensor | None = None, weight: float = 1.0, piece: int | None = None,
) -> None:  # fmt: skip
    """Writes numbers of a type; see :func:`hvd_adaptive.compress.kernels.reference.cast_encode`."""
    num = values.numel()
    if not num:
        return
    size = num if piece is None else min(piece, num)
    numbers = payload.view(torch.int16 if dtype == torch.bfloat16 else dtype)
    with _device_of(values):
        cuda_codes.cast_encode[(-(-size // _TILE), -(-num // size))](
            values, values if residual is None else residual, numbers, num, size, cast_bytes(size, dtype) // dtype.itemsize,
            float(weight), TILE=_TILE, FEEDBACK=residual is not None, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def cast_decode(
    payload: Tensor, out: Tensor, dtype: torch.dtype, add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Reads numbers of a type; see :func:`hvd_adaptive.compress.kernels.reference.cast_decode`."""
    num = out.numel()
    if not num:
        return
    size = num if piece is None else min(piece, num)
    numbers = payload.view(dtype)
    with _device_of(out):
        cuda_codes.cast_decode[(-(-size // _TILE), -(-num // size))](
            numbers, out, num, size, cast_bytes(size, dtype) // dtype.itemsize, num_peers, numbers.numel() // num_peers,
            TILE=_TILE, ADD=add, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def sum_of_squares(values: Tensor) -> Tensor:
    """Returns the sum of squares; see :func:`hvd_adaptive.compress.kernels.reference.sum_of_squares`."""
    values = values.detach().contiguous()
    num_programs = min(-(-values.numel() // _TILE), _MOST_PROGRAMS)
    partial = torch.empty(num_programs, dtype=torch.float64, device=values.device)
    if num_programs:
        with _device_of(values):
            cuda_select.squares[(num_programs,)](
                values, partial, values.numel(), TILE=_TILE, num_warps=8, enable_fp_fusion=False
            )  # fmt: skip
    return partial.sum()


def select_large(
    values: Tensor, threshold: Tensor, payload: Tensor, *, sampled: bool, take: bool
) -> None:
    """Writes places and values of the largest; see :func:`hvd_adaptive.compress.kernels.reference.select_large`."""
    num_rows, num = values.shape
    num_programs = -(-num // _TILE)
    payload.zero_()
    counts = torch.empty((2, num_rows, num_programs), dtype=torch.int32, device=values.device)
    with _device_of(values):
        cuda_select.count_large[(num_programs, num_rows)](
            values, threshold, counts, num, SAMPLED=sampled, TILE=_TILE, num_warps=8, enable_fp_fusion=False
        )  # fmt: skip
        cuda_select.store_large[(num_programs, num_rows)](
            values, threshold, counts.cumsum(2), payload.view(torch.int32), payload.view(torch.float32), num,
            payload.shape[1] // 8, SAMPLED=sampled, TAKE=take, TILE=_TILE, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def decode_large(
    payload: Tensor, out: Tensor, num_entries: Callable[[int], int], add: int, num_peers: int = 1, piece: int | None = None
) -> None:
    """Reads places and values into ``out``; see :func:`hvd_adaptive.compress.kernels.reference.decode_large`."""
    num = out.numel()
    if not num:
        return
    size = num if piece is None else min(piece, num)
    words = payload.view(torch.int32)
    with _device_of(out):
        cuda_select.decode_large[(-(-size // _SPAN), -(-num // size))](
            words, payload.view(torch.float32), out, num, size, num_entries(size), num_entries(num % size or size), num_peers,
            words.numel() // num_peers, ADD=add, SPAN=_SPAN, STEP=256, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def _layout(num: int, bits: int, bucket: int, piece: int | None) -> tuple[int, int, int]:
    """Returns the number of buckets, and how many values and bytes each payload of a peer holds, but for the last one."""
    num_buckets = -(-num // bucket)
    size = num_buckets * bucket if piece is None else piece
    return num_buckets, size, -(-(8 * (size // bucket) + bits * (size // 8)) // 4) * 4


def _rows(bucket: int) -> int:
    return min(int(triton.next_power_of_2(bucket // 8)), _TILE // 8)


def _warps(rows: int) -> int:
    # No more threads than values: a program that changes a tensor in place may not read a value twice.
    return max(1, min(8, 8 * rows // 128))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
