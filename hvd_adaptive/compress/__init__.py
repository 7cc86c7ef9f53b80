"""Codecs turn tensors into bytes and back and never communicate; with them error feedback and the policy per layer."""

from hvd_adaptive.compress.codec import Codec, TensorCodec, ValueCodec, decode, encode
from hvd_adaptive.compress.parse import parse_codec

__all__ = ["Codec", "TensorCodec", "ValueCodec", "decode", "encode", "parse_codec"]
