"""What a codec is, and the plain ones that only change the number format.

A :class:`ValueCodec` turns values into payloads, which a reducer of :mod:`hvd_adaptive.exchange` brings together. A
:class:`TensorCodec` sums whole tensors over ranks by itself, through collectives that it is handed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvd_adaptive.compress.feedback import ErrorFeedback
from hvd_adaptive.compress.kernels import dispatch
from hvd_adaptive.compress.kernels.reference import cast_bytes

if TYPE_CHECKING:
    from hvd_adaptive.comm.protocols import Group, Pending

    Steps = Generator[Pending | None, Any, None]

# What collectives add up.
SUMMABLE = (torch.float16, torch.float32, torch.float64)
# More values than a codec takes as few.
_MANY = 1 << 18


class Codec(ABC):
    """How tensors cross the wire: a :class:`ValueCodec` or a :class:`TensorCodec`.

    Values and results are of any floating-point type, on CPU or CUDA; codecs compute in fp32. Values that are not finite (or
    overflow fp32, or fp16 in ``fp16``) come back as values that are not finite, at least in their bucket: a check of the
    result finds them.
    """

    @property
    @abstractmethod
    def spec(self) -> str:
        """The codec as text, which `parse_codec` reads."""

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """For a linear code, the type as which payloads are summed element by element; None for others."""
        return None

    @property
    def exact(self) -> bool:
        """Whether nothing is lost, in any type: the tensor itself may as well be summed."""
        return False

    @abstractmethod
    def tensor_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Returns the size of one rank's payload for tensors of these shapes together."""


class ValueCodec(Codec):
    """Turns values into a payload of known size and back. Never communicates.

    Derived ones code contiguous fp32 tensors of one dimension, in `_encode` and `_decode`.
    """

    @property
    @abstractmethod
    def granularity(self) -> int:
        """Shards of a tensor that begin at multiples of this lose nothing."""

    def tensor_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """See :class:`Codec`."""
        return self.payload_bytes(sum(map(math.prod, shapes)))

    @abstractmethod
    def payload_bytes(self, num_elements: int) -> int:
        """Returns the size of a payload for that many values, a multiple of 4; 0 for 0 values."""

    def encode_(
        self,
        values: Tensor,
        payload: Tensor,
        *,
        key: int,
        residual: Tensor | None = None,
        weight: float = 1.0,
        piece: int | None = None,
    ) -> None:
        """Overwrites ``payload`` with the code of ``values`` times the weight; the values stay as they are.

        With a residual that of their sum, and leaves in the residual what the code has lost: afterwards decoded + residual ==
        weight x values + old residual, to the rounding of that sum, so that residuals telescope over calls.

        Args:
            values: any shape, num_elements values.
            payload: uint8, contiguous, on the values' device: payload_bytes for each piece, one after the other.
            key: of the random numbers, 64 bits (`hvd_adaptive.compress.kernels.reference.mix_key`): equal keys and values give
                equal payloads.
            residual: fp32, contiguous, shape (num_elements,), changed in place; None encodes without error feedback.
            weight: rounded to fp32, as the products are.
            piece: values that each payload holds, a multiple of the granularity; the last one may hold fewer. None: one payload.
        """
        if not values.numel():
            return
        flat = values.detach().reshape(-1).to(torch.float32).contiguous()
        self._encode(flat, payload, key, residual, weight, piece)

    def decode_(
        self, payload: Tensor, out: Tensor, *, add: int = 0, num_peers: int = 1, piece: int | None = None
    ) -> None:
        """Decodes into ``out``, with the same bits on every device. Several peers' values are added up in fp32, in their order.

        Args:
            payload: as `encode_` wrote it; one peer's payloads after the other's.
            out: any shape, num_elements values.
            add: 0 replaces ``out``, 1 adds to it, -1 subtracts from it; 0 for several peers.
            num_peers: peers whose payloads are there.
            piece: values that each payload of a peer holds, a multiple of the granularity; the last ones may hold fewer or none.
                None: one payload a peer.
        """
        if not out.numel():
            return
        out = out.detach()
        if out.dtype == torch.float32 and out.is_contiguous():
            self._decode(payload, out.view(-1), add, num_peers, piece)
            return
        values = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        self._decode(payload, values, 0, num_peers, piece)
        if add == 0:
            out.copy_(values.view(out.shape))
        else:
            out.add_(values.view(out.shape).to(out.dtype), alpha=add)

    @abstractmethod
    def _encode(
        self, values: Tensor, payload: Tensor, key: int, residual: Tensor | None, weight: float, piece: int | None
    ) -> None: ...

    @abstractmethod
    def _decode(self, payload: Tensor, out: Tensor, add: int, num_peers: int, piece: int | None) -> None: ...


class TensorCodec(Codec):
    """Sums whole tensors over ranks by itself, whatever the reducer: what one rank sends depends on what the others sent."""

    @abstractmethod
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
        """Replaces tensors by what the codec leaves of their weighted sum, with the same bits on every rank. COLLECTIVE.

        A value that is not finite on any rank makes all results NaN, and leaves residuals as they were.

        Args:
            world: the ranks.
            flat: the tensors one after the other, contiguous, one dimension.
            shapes: theirs, in order.
            name: of the exchange, equal on all ranks and different for each one under way.
            key: of the random numbers, equal on all ranks.
            weight: this rank's values are multiplied by it on their way, > 0.
            feedback: this rank's residuals; None without error feedback.
            memory: what the codec keeps from one sum to the next by name, equal on all ranks.

        Yields:
            Each collective that it has started; it goes on with its result.
        """


def of_values(codec: Codec) -> ValueCodec:
    """Returns the codec if it is one of values.

    Raises:
        ValueError: if it is not.
    """
    if isinstance(codec, ValueCodec):
        return codec
    raise ValueError(f"{codec.spec} codes matrices in two sums, not single values: exchange it with Exchange.sum_")


@dataclass(frozen=True, slots=True)
class Cast(ValueCodec):
    """Sends values as another number format.

    Attributes:
        spec: none, fp16 or bf16.
    """

    spec: str

    @property
    def dtype(self) -> torch.dtype:
        """The number format."""
        return {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.spec]

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """See :class:`Codec`. Horovod sums fp32 and fp16, but not bf16."""
        return None if self.spec == "bf16" else self.dtype

    @property
    def exact(self) -> bool:
        """See :class:`Codec`."""
        return self.spec == "none"

    @property
    def granularity(self) -> int:
        """See :class:`ValueCodec`."""
        return 1

    def payload_bytes(self, num_elements: int) -> int:
        """See :class:`ValueCodec`."""
        return cast_bytes(num_elements, self.dtype)

    def _encode(
        self, values: Tensor, payload: Tensor, key: int, residual: Tensor | None, weight: float, piece: int | None
    ) -> None:
        dispatch.cast_encode(values, payload, dtype=self.dtype, residual=residual, weight=weight, piece=piece)

    def _decode(self, payload: Tensor, out: Tensor, add: int, num_peers: int, piece: int | None) -> None:
        dispatch.cast_decode(payload, out, dtype=self.dtype, add=add, num_peers=num_peers, piece=piece)


def compile_kernels(codec: Codec, device: torch.device, *, error_feedback: bool) -> None:
    """Has what an exchange uses of a codec compiled for a device, or loaded, which takes seconds; once for all sizes.

    Args:
        codec: any.
        device: of the values.
        error_feedback: whether residuals will be used.
    """
    if not isinstance(codec, ValueCodec):
        return
    for num_elements in (codec.granularity, _MANY):
        values = torch.zeros(num_elements, dtype=torch.float32, device=device)
        payload = torch.empty(codec.payload_bytes(num_elements), dtype=torch.uint8, device=device)
        for residual in (None, torch.zeros_like(values)) if error_feedback else (None,):
            codec.encode_(values, payload, key=0, residual=residual)
        codec.decode_(payload, values)


def encode(codec: Codec, values: Tensor, *, key: int = 0) -> Tensor:
    """Returns the payload of a tensor, uint8, shape (payload_bytes(values.numel()),).

    Raises:
        ValueError: if the codec is not one of values.
    """
    codec = of_values(codec)
    payload = torch.empty(codec.payload_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    codec.encode_(values, payload, key=key)
    return payload


def decode(codec: Codec, payload: Tensor, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the values of a payload, shape (num_elements,).

    Raises:
        ValueError: if the codec is not one of values, or the payload not of the size for that many.
    """
    codec = of_values(codec)
    if payload.numel() != codec.payload_bytes(num_elements):
        raise ValueError(
            f"a payload of {codec.spec} for {num_elements} values has {codec.payload_bytes(num_elements)} bytes, "
            f"got {payload.numel()}"
        )
    out = torch.empty(num_elements, dtype=dtype, device=payload.device)
    codec.decode_(payload, out)
    return out
