"""PowerSGD (arXiv 1905.13727): a matrix as the product of two thin ones, which are summed over ranks one after the other.

Linear, but no code of single values: :mod:`hvd_adaptive.exchange.low_rank_reducer` exchanges it, whatever the reducer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PowerSgd:
    """Factors of that rank; see :class:`~hvd_adaptive.compress.codec.Codec` for what the attributes mean.

    Biased: use it with error feedback.

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
        """The codec as text."""
        return f"powersgd:{self.factor_rank}"

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The factors are summed as fp32."""
        return torch.float32

    @property
    def exact(self) -> bool:
        """Something is lost."""
        return False

    @property
    def granularity(self) -> int:
        """Not used."""
        return 1

    def payload_bytes(self, num_elements: int) -> NoReturn:
        """Not defined.

        Raises:
            ValueError: the size of the factors follows from a matrix's shape.
        """
        raise self._refusal()

    def encode_(
        self, values: Tensor, payload: Tensor, *, key: int, residual: Tensor | None = None, weight: float = 1.0
    ) -> NoReturn:
        """Not defined.

        Raises:
            ValueError: the factors of all ranks' sum take two rounds.
        """
        raise self._refusal()

    def decode_(
        self, payload: Tensor, out: Tensor, *, add: int = 0, num_peers: int = 1, piece: int | None = None
    ) -> NoReturn:
        """Not defined.

        Raises:
            ValueError: as `encode_`.
        """
        raise self._refusal()

    def _refusal(self) -> ValueError:
        return ValueError(f"{self.spec} codes matrices in two rounds, not single values: exchange it with Exchange.sum_")


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
