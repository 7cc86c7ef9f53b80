"""Codecs for Horovod's own ``DistributedOptimizer(compression=...)``, which adds up what a compressor returns."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from hvd_adaptive.compress.codec import SUMMABLE, Codec, decode, encode
from hvd_adaptive.compress.parse import KNOWN, parse_codec


class Compressor:
    """What Horovod asks of ``compression``: gradients in a form whose sum over ranks is the form of the sum.

    Args:
        codec: a linear one.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns what Horovod shall add up, and what `decompress` needs.

        Args:
            tensor: of any shape; what is not floating-point stays as it is.
        """
        wire_dtype = self._codec.wire_dtype
        if wire_dtype is None or not tensor.is_floating_point():
            return tensor, None
        if tensor.dtype == wire_dtype or (self._codec.exact and tensor.dtype in SUMMABLE):
            return tensor, None
        return encode(self._codec, tensor).view(wire_dtype), (tensor.shape, tensor.dtype)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Returns the sum in the gradient's shape and type.

        Args:
            tensor: the sum over ranks, or their mean.
            ctx: from `compress`.
        """
        if ctx is None:
            return tensor
        shape, dtype = ctx
        return decode(self._codec, tensor.view(torch.uint8), shape.numel(), dtype).view(shape)


class Compressions:
    """``hvd_adaptive.Compression``: compressors by name, in place of ``horovod.torch.Compression``.

    Attributes:
        none: gradients as they are; bf16 ones, which Horovod cannot add up, travel as fp32.
        fp16: gradients of any floating-point type as fp16.
    """

    none = Compressor(parse_codec("none"))
    fp16 = Compressor(parse_codec("fp16"))

    def __getattr__(self, name: str) -> NoReturn:
        if name not in KNOWN:
            raise AttributeError(f"Compression has no {name!r}: it has none and fp16")
        reason = {
            "bf16": "cannot add up bf16",
            "powersgd": "sums once, and PowerSGD takes two sums, of which the second depends on the first",
        }.get(name, f"adds up what a compressor returns, and sums of {name} codes mean nothing")
        raise AttributeError(
            f"Compression.{name}: Horovod {reason}. Use Compression.fp16, or leave the exchange to this package: "
            f"`hvd-adaptive run --compression {KNOWN[name].split('[')[0]} SCRIPT`, or hvd_adaptive.Session with "
            "strategy 'sync' or 'local'"
        )


Compression = Compressions()
