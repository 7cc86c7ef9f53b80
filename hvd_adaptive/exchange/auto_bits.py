"""Bits for each layer while training goes on, from what its values lose at each width (L-GreCo, arXiv 2210.17357)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hvd_adaptive.comm.protocols import Collectives, from_rank_0
from hvd_adaptive.compress.bits import WIDTHS, choose_bits, error_curve, with_bits
from hvd_adaptive.compress.policy import Policy, TensorInfo
from hvd_adaptive.compress.quantize import MaxMin

log = logging.getLogger(__name__)


class BitChooser:
    """Chooses bits for the tensors that have the policy's default code, a max-min one, at no more error than its bits have.

    Args:
        policy: as the user gave it; its default's bits on all tensors are the error's budget.
        interval: rounds between two choices.

    Raises:
        ValueError: if the default is not a max-min code of a width that can be chosen.
    """

    def __init__(self, policy: Policy, interval: int) -> None:
        if not isinstance(policy.default, MaxMin) or policy.default.bits not in WIDTHS:
            raise ValueError(
                f"auto_bits needs a compression whose first codec is maxmin of {WIDTHS[0]} to {WIDTHS[-1]} bits, "
                f"got {policy.default.spec}"
            )
        self._policy = policy
        self._default = policy.default
        self._interval = interval
        self._curves: dict[TensorInfo, NDArray[np.float64]] = {}

    def candidates(self) -> list[MaxMin]:
        """Returns the codecs that are tried."""
        return [MaxMin(bits, self._default.bucket, self._default.rounding) for bits in WIDTHS]

    def is_due(self, num_rounds: int) -> bool:
        """Returns whether the values of this round shall be measured."""
        return num_rounds > 0 and num_rounds % self._interval == 0

    def measure(self, flat: Tensor, tensors: Sequence[TensorInfo]) -> None:
        """Takes down what this rank's values would lose; they stay as they are.

        Args:
            flat: before they are exchanged, one dimension.
            tensors: what is in it, in order.
        """
        for tensor, values in zip(tensors, flat.split([tensor.size for tensor in tensors]), strict=True):
            if tensor.size and self._policy.codec(tensor) == self._default:
                self._curves[tensor] = error_curve(
                    values, bucket=self._default.bucket, rounding=self._default.rounding
                )

    def choose(self, transport: Collectives) -> Policy | None:
        """Returns the policy for the values measured since the last choice, equal on all ranks. COLLECTIVE.

        Returns:
            None if nothing was measured, or something was not finite.
        """
        curves, self._curves = self._curves, {}
        if not curves:
            return None
        tensors = sorted(curves)
        own = np.stack([curves[tensor] for tensor in tensors])
        errors = transport.allgather_stats(own.reshape(-1)).sum(axis=0).reshape(own.shape)
        if not np.isfinite(errors).all():
            return None
        sizes = [tensor.size for tensor in tensors]
        # Processors may differ in the last bit of an error, but the ranks must not in their bits.
        bits = from_rank_0(transport, lambda: choose_bits(sizes, errors, uniform_bits=self._default.bits))
        if transport.speaks:
            saved = 1 - sum(size * width for size, width in zip(sizes, bits, strict=True)) / (sum(sizes) * self._default.bits)
            widths = ", ".join(f"{bits.count(width)} at {width}" for width in sorted(set(bits)))
            log.info("bits for each layer: %s; %.1f%% fewer than %d on all", widths, 100 * saved, self._default.bits)
        return with_bits(self._policy, tensors, bits)
