"""The exchange of PowerSGD's factors (arXiv 1905.13727, algorithm 1): two small sums for all matrices of a run together.

With M_i a rank's matrix plus its residual: P = sum M_i Q, made orthonormal; Q = sum M_i^T P; the result is P Q^T. A rank keeps
what its own matrix has lost, M_i - P (M_i^T P)^T, so that the residuals add up to what the sum has lost (the paper keeps
M_i minus the mean of all results). Rank 0 makes P orthonormal for all, since libraries differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_adaptive.comm.protocols import Group
from hvd_adaptive.compress.kernels.reference import mix_key, uniform
from hvd_adaptive.compress.low_rank import factor_shapes, matrix_shape, orthonormal, subtract_product_
from hvd_adaptive.exchange.pipeline import Task
from hvd_adaptive.exchange.reducers import Job


def sum_low_rank(
    world: Group, job: Job, *, shapes: Sequence[tuple[int, ...]], rank: int, factors: dict[str, Tensor]
) -> Task:
    """Replaces matrices by a low-rank approximation of their sum over ranks, with the same bits on every rank.

    A value that is not finite on any rank makes all matrices NaN, and leaves residuals as they were.

    Args:
        world: the ranks.
        job: the matrices one after the other, and error feedback.
        shapes: of the tensors in ``job.flat``.
        rank: of the factors.
        factors: Q of the last call by the job's name, fp32, equal on all ranks: where it goes on from. Replaced by the new Q.
    """
    flat = job.flat
    residual = job.residual("worker", flat.numel())
    values = flat.to(torch.float32)
    if job.weight != 1.0:
        values.mul_(job.weight)
    if residual is not None:
        values.add_(residual)
    sizes = [rows * columns for rows, columns in map(matrix_shape, shapes)]
    matrices = [part.view(matrix_shape(shape)) for part, shape in zip(values.split(sizes), shapes, strict=True)]
    p_shapes, q_shapes = zip(*(factor_shapes(shape, rank) for shape in shapes), strict=True)
    num_p, num_q = (sum(rows * columns for rows, columns in factors) for factors in (p_shapes, q_shapes))
    start = factors.get(job.name)
    if start is None:
        start = _random_factors(job, num_q)
    p_flat = torch.cat([(m @ q).reshape(-1) for m, q in zip(matrices, _views(start, q_shapes), strict=True)])
    yield world.allreduce_sum_async_(p_flat, f"{job.name}.p")
    # The same on all ranks, as the sum is. To read it would wait for a GPU.
    finite = torch.isfinite(p_flat).all()
    is_known = not p_flat.is_cuda and bool(finite)
    if not is_known:
        p_flat = torch.where(finite, p_flat, 0.0)
    if world.rank == 0:
        p_flat = torch.cat([orthonormal(p).reshape(-1) for p in _views(p_flat, p_shapes)])
    sent = p_flat.view(torch.uint8) if world.rank == 0 else p_flat.new_empty(0, dtype=torch.uint8)
    receive_bytes = [4 * num_p] + [0] * (world.world_size - 1)
    received = yield world.allgather_bytes_async(sent, receive_bytes=receive_bytes, name=f"{job.name}.basis")
    bases = _views(received.view(torch.float32), p_shapes)
    own = torch.cat([(m.T @ p).reshape(-1) for m, p in zip(matrices, bases, strict=True)])
    q_flat = own.clone()
    yield world.allreduce_sum_async_(q_flat, f"{job.name}.q")
    if residual is not None:
        before = residual if is_known else residual.clone()
        residual.copy_(values)
        lost = [part.view(matrix_shape(shape)) for part, shape in zip(residual.split(sizes), shapes, strict=True)]
        for out, p, q in zip(lost, bases, _views(own, q_shapes), strict=True):
            subtract_product_(out, p, q)
        if not is_known:
            residual.copy_(torch.where(finite, residual, before))
    for matrix, p, q, part in zip(matrices, bases, _views(q_flat, q_shapes), flat.split(sizes), strict=True):
        matrix.zero_()
        subtract_product_(matrix, p, q, sign=-1)
        part.copy_(matrix.view(-1) if is_known else torch.where(finite, matrix.view(-1), torch.nan))
    factors[job.name] = q_flat if is_known else torch.where(finite, q_flat, _random_factors(job, num_q))


def _random_factors(job: Job, num_elements: int) -> Tensor:
    return uniform(num_elements, mix_key(job.key, num_elements), job.flat.device) - 0.5


def low_rank_bytes(shapes: Sequence[tuple[int, ...]], rank: int) -> int:
    """Returns the size of both factors of all matrices."""
    pairs = [factor_shapes(shape, rank) for shape in shapes]
    return 4 * sum(rows * columns for pair in pairs for rows, columns in pair)


def _views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
