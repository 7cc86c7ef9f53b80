"""Codes of few bits a value, of equally spaced levels in each bucket: max-min (CGX, arXiv 2111.08617), and normal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.compress.kernels import dispatch
from hvd_adaptive.compress.kernels.reference import levels_bytes

MAX_BUCKET = 65536
# By bits: the distance of two levels, in standard deviations, with which normally distributed values lose least (J. Max,
# "Quantizing for minimum distortion", 1960): 36%, 12%, 3.7% and 1.2% of their squares. Multiples of 2^-12, as Triton's constants
# are fp32.
SPREADS = {1: 6536 / 4096, 2: 4079 / 4096, 3: 2401 / 4096, 4: 1373 / 4096}


@dataclass(frozen=True, slots=True)
class MaxMin(ValueCodec):
    """2^bits equally spaced levels from a bucket's minimum to its maximum.

    The error of a value is below a unit, (max - min) / (2^bits - 1), or half of one with nearest rounding, both to
    fp32's own rounding; a constant bucket is exact. Stochastic rounding is unbiased.

    Attributes:
        bits: of a code, 1 to 8.
        bucket: values that share a unit, a multiple of 8 up to 65536.
        rounding: "stochastic" or "nearest".

    Raises:
        ValueError: naming the requirement.
    """

    bits: int = 4
    bucket: int = 512
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"maxmin: bits must be in [1, 8], got {self.bits}")
        check_bucket("maxmin", self.bucket)
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f"maxmin: rounding must be stochastic or nearest, got {self.rounding!r}")

    @property
    def spec(self) -> str:
        return f"maxmin:{self.bits},bucket={self.bucket},{self.rounding}"

    @property
    def granularity(self) -> int:
        return self.bucket

    def payload_bytes(self, num_elements: int) -> int:
        return levels_bytes(num_elements, self.bits, self.bucket)

    def _encode(
        self, values: Tensor, payload: Tensor, key: int, residual: Tensor | None, weight: float, piece: int | None
    ) -> None:
        random = key if self.rounding == "stochastic" else None
        dispatch.levels_encode(
            values, payload, bits=self.bits, bucket=self.bucket, key=random, residual=residual, weight=weight, piece=piece
        )

    def _decode(self, payload: Tensor, out: Tensor, add: int, num_peers: int, piece: int | None) -> None:
        dispatch.levels_decode(
            payload, out, bits=self.bits, bucket=self.bucket, add=add, num_peers=num_peers, piece=piece
        )


@dataclass(frozen=True, slots=True)
class Normal(ValueCodec):
    """2^bits equally spaced levels around 0, where most values of a normal distribution with the bucket's mean square are.

    Values beyond the last level are cut to it. Then the levels' distance becomes the one with which these codes lose least, so
    that a bucket never loses more than its squares' sum. Biased: use it with error feedback, which sends the rest in the next
    exchanges. With one bit it is EF-signSGD's sign times the mean of |x| (arXiv 1901.09847).

    Attributes:
        bits: of a code, 1 to 4.
        bucket: values that share levels, a multiple of 8 up to 65536.

    Raises:
        ValueError: naming the requirement.
    """

    bits: int = 2
    bucket: int = 512

    def __post_init__(self) -> None:
        if self.bits not in SPREADS:
            raise ValueError(f"normal: bits must be in [1, 4], got {self.bits}")
        check_bucket("normal", self.bucket)

    @property
    def spec(self) -> str:
        return f"normal:{self.bits},bucket={self.bucket}"

    @property
    def granularity(self) -> int:
        return self.bucket

    def payload_bytes(self, num_elements: int) -> int:
        return levels_bytes(num_elements, self.bits, self.bucket)

    def _encode(
        self, values: Tensor, payload: Tensor, key: int, residual: Tensor | None, weight: float, piece: int | None
    ) -> None:
        dispatch.levels_encode(
            values, payload, bits=self.bits, bucket=self.bucket, key=None, spread=SPREADS[self.bits], residual=residual,
            weight=weight, piece=piece,
        )  # fmt: skip

    def _decode(self, payload: Tensor, out: Tensor, add: int, num_peers: int, piece: int | None) -> None:
        dispatch.levels_decode(
            payload, out, bits=self.bits, bucket=self.bucket, add=add, num_peers=num_peers, piece=piece
        )


def check_bucket(kind: str, bucket: int) -> None:
    """Raises ValueError unless the bucket is a multiple of 8 in range."""
    if not 8 <= bucket <= MAX_BUCKET or bucket % 8:
        raise ValueError(f"{kind}: bucket must be a multiple of 8 in [8, {MAX_BUCKET}], got {bucket}")
