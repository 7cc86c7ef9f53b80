"""PowerSGD (arXiv 1905.13727, algorithm 1): matrices as products of two thin factors, in two small sums for all of a run.

With M_i a rank's matrix plus its residual: P = sum M_i Q, made orthonormal; Q = sum M_i^T P; the result is P Q^T. A rank keeps
what its own matrix has lost, M_i - P (M_i^T P)^T, so that the residuals add up to what the sum has lost (the paper keeps
M_i minus the mean of all results). Rank 0 makes P orthonormal for all, since libraries differ in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hvd_adaptive.compress.codec import TensorCodec
from hvd_adaptive.compress.feedback import ErrorFeedback
from hvd_adaptive.compress.kernels.reference import mix_key, uniform

if TYPE_CHECKING:
    from hvd_adaptive.comm.protocols import Group
    from hvd_adaptive.compress.codec import Steps


@dataclass(frozen=True, slots=True)
class PowerSgd(TensorCodec):
    """Factors of that rank. Biased: use it with error feedback.

    Attributes:
        factor_rank: columns of the factors, >= 1.

    Raises:
        ValueError: naming the requirement.
    """

    factor_rank: int = 4

    def __post_init__(self) -> None:
        if self.factor_rank < 1:
            raise ValueError(f"powersgd: rank must be >= 1, got {self.factor_rank}")

    @property
    def spec(self) -> str:
        return f"powersgd:{self.factor_rank}"

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The factors are summed as fp32."""
        return torch.float32

    def tensor_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Returns the size of both factors of all matrices."""
        return 4 * sum(math.prod(factor) for shape in shapes for factor in factor_shapes(shape, self.factor_rank))

    def sum_tensors(
        self,
        world: Group,
        flat: Tensor,
        shapes: Sequence[tuple[int, ...]],
        *,
        name: str,
        key: int,
        weight: float,
        feedback: ErrorFeedback | None,
        memory: dict[str, Tensor],
    ) -> Steps:
        """See :class:`~hvd_adaptive.compress.codec.TensorCodec`; the memory holds Q of the last sum, where the next goes on."""
        kept = nullcontext() if feedback is None else feedback.lent(f"{name}.worker", flat.numel(), flat.device)
        with kept as residual:
            yield from self._sum(world, flat, shapes, residual, name=name, key=key, weight=weight, memory=memory)

    def _sum(
        self,
        world: Group,
        flat: Tensor,
        shapes: Sequence[tuple[int, ...]],
        residual: Tensor | None,
        *,
        name: str,
        key: int,
        weight: float,
        memory: dict[str, Tensor],
    ) -> Steps:
        values = flat.to(torch.float32)
        if weight != 1.0:
            values.mul_(weight)
        if residual is not None:
            values.add_(residual)
        m_shapes = list(map(matrix_shape, shapes))
        matrices = _views(values, m_shapes)
        p_shapes, q_shapes = zip(*(factor_shapes(shape, self.factor_rank) for shape in shapes), strict=True)
        num_q = sum(map(math.prod, q_shapes))
        start = memory.get(name)
        # A checkpoint's is on the CPU.
        start = _random(num_q, key, flat.device) if start is None else start.to(flat.device)
        p_flat = torch.cat([(m @ q).reshape(-1) for m, q in zip(matrices, _views(start, q_shapes), strict=True)])
        yield world.allreduce_sum_async_(p_flat, f"{name}.p")
        # The same on all ranks, as the sum is. To read it would wait for a GPU.
        finite = torch.isfinite(p_flat).all()
        is_known = not p_flat.is_cuda and bool(finite)
        if not is_known:
            p_flat = torch.where(finite, p_flat, 0.0)
        if world.rank == 0:
            p_flat = torch.cat([orthonormal(p).reshape(-1) for p in _views(p_flat, p_shapes)])
        sent = p_flat.view(torch.uint8) if world.rank == 0 else p_flat.new_empty(0, dtype=torch.uint8)
        receive_bytes = [p_flat.nbytes] + [0] * (world.world_size - 1)
        received = yield world.allgather_bytes_async(sent, receive_bytes=receive_bytes, name=f"{name}.basis")
        bases = _views(received.view(torch.float32), p_shapes)
        own = torch.cat([(m.T @ p).reshape(-1) for m, p in zip(matrices, bases, strict=True)])
        q_flat = own.clone()
        yield world.allreduce_sum_async_(q_flat, f"{name}.q")
        if residual is not None:
            before = residual if is_known else residual.clone()
            residual.copy_(values)
            for out, p, q in zip(_views(residual, m_shapes), bases, _views(own, q_shapes), strict=True):
                subtract_product_(out, p, q)
            if not is_known:
                residual.copy_(torch.where(finite, residual, before))
        for matrix, p, q, part in zip(matrices, bases, _views(q_flat, q_shapes), _views(flat, m_shapes), strict=True):
            matrix.zero_()
            subtract_product_(matrix, p, q, sign=-1)
            part.copy_(matrix if is_known else torch.where(finite, matrix, torch.nan))
        memory[name] = q_flat if is_known else torch.where(finite, q_flat, _random(num_q, key, flat.device))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows and columns that a tensor has as a matrix: the first dimension, and all others."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def factor_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of P and Q of a tensor: (rows, r) and (columns, r), r no more than the matrix allows."""
    rows, columns = matrix_shape(shape)
    rank = min(rank, rows, columns)
    return (rows, rank), (columns, rank)


def orthonormal(matrix: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns, computed in fp64; not the same bits on every machine.

    Args:
        matrix: fp32, finite, shape (rows, rank), rows >= rank.
    """
    basis, _ = torch.linalg.qr(matrix.detach().double())
    return basis.to(matrix.dtype)


def subtract_product_(out: Tensor, p: Tensor, q: Tensor, *, sign: int = 1) -> None:
    """Subtracts p @ q.T from ``out`` (adds it with sign -1), in place, with the same bits on every device.

    Columns in order, product and sum rounded each by itself: a library's matrix product promises no order.

    Args:
        out: fp32, shape (rows, columns).
        p: fp32, shape (rows, rank).
        q: fp32, shape (columns, rank).
        sign: 1 or -1.
    """
    product = torch.empty_like(out)
    for k in range(p.shape[1]):
        torch.mul(p[:, k : k + 1], q[:, k], out=product)
        out.sub_(product) if sign > 0 else out.add_(product)


def _random(num_elements: int, key: int, device: torch.device) -> Tensor:
    return uniform(num_elements, mix_key(key, num_elements), device) - 0.5


def _views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split(list(map(math.prod, shapes)))
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
