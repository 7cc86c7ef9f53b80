"""Speed and error of codecs on one core or a GPU, beside a plain copy measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.compress import decode, encode, parse_codec
from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.exchange.pipeline import run_pipeline
from hvd_adaptive.exchange.reducers import Job, scatter_reduce_allgather

SPECS = (
    *("fp16", "bf16", "maxmin:8", "maxmin:4", "maxmin:4,nearest", "maxmin:3", "maxmin:2", "maxmin:1"),
    *("normal:2", "topk:0.01", "topk:0.01,sampled"),
)
# Errors are of as many values; more would tell nothing new.
_ERROR_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """What a codec does in a second, in GB (1e9 bytes) of fp32 values.

    Attributes:
        encode_gb_s: encoded.
        decode_add_gb_s: decoded and added.
        copy_gb_s: copied by numpy or, on a GPU, torch, measured in turns with the others.
    """

    encode_gb_s: float
    decode_add_gb_s: float
    copy_gb_s: float


@dataclass(frozen=True, slots=True)
class CodecRow:
    """A line of the table.

    Attributes:
        codec: with all its options.
        device: cpu (one core) or the GPU's name.
        bits: on the wire, a value.
        encode_gb_s: see :class:`Speed`.
        decode_add_gb_s: see :class:`Speed`.
        encode_ratio: over a copy's speed.
        decode_add_ratio: over a copy's speed.
        error_one_round: relative L2 error of the sum of the ranks' decoded values.
        error_two_rounds: the same of what SRA gives, which encodes the sum again.
        break_even_mbit: on slower links than this an exchange takes less time encoded than in fp32.
    """

    codec: str
    device: str
    bits: float
    encode_gb_s: float
    decode_add_gb_s: float
    encode_ratio: float
    decode_add_ratio: float
    error_one_round: float
    error_two_rounds: float
    break_even_mbit: float


def measure_codecs(
    specs: Sequence[str], *, num_values: int, repeat: int, num_ranks: int, device: torch.device
) -> list[CodecRow]:
    """Measures codecs on normal random values.

    Sets torch's threads to one.

    Args:
        specs: as for :func:`hvd_adaptive.compress.parse_codec`; codes of values only, not powersgd.
        num_values: to encode at once.
        repeat: medians of so many turns, after one that compiles.
        num_ranks: whose values meet, for errors and the break-even link, >= 2.
        device: where.

    Raises:
        ValueError: for a codec that cannot be read, or is not one of values.
    """
    codecs = []
    for codec in map(parse_codec, specs):
        if not isinstance(codec, ValueCodec):
            raise ValueError(f"codec {codec.spec} codes matrices in two sums, not values: measure it with bench comm")
        codecs.append(codec)
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    values = normal_values(num_values, 0).to(device)
    rows = []
    for codec in codecs:
        speed = measure_speed(codec, values, repeat=repeat)
        one, two = errors(codec, min(num_values, _ERROR_VALUES), num_ranks)
        rows.append(
            CodecRow(
                codec=codec.spec,
                device=name,
                bits=8 * codec.payload_bytes(num_values) / num_values,
                encode_gb_s=speed.encode_gb_s,
                decode_add_gb_s=speed.decode_add_gb_s,
                encode_ratio=speed.encode_gb_s / speed.copy_gb_s,
                decode_add_ratio=speed.decode_add_gb_s / speed.copy_gb_s,
                error_one_round=one,
                error_two_rounds=two,
                break_even_mbit=break_even_mbit(codec, speed, num_values=num_values, num_ranks=num_ranks),
            )
        )
    return rows


def measure_speed(codec: ValueCodec, values: Tensor, *, repeat: int) -> Speed:
    """Times a codec on contiguous fp32 values, on their device."""
    payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8, device=values.device)
    out, copied = torch.zeros_like(values), torch.empty_like(values)
    on_gpu = values.is_cuda
    copy: Callable[[], Any] = (
        (lambda: copied.copy_(values)) if on_gpu else (lambda: np.copyto(copied.numpy(), values.numpy()))
    )
    actions: tuple[Callable[[], Any], ...] = (
        lambda: codec.encode_(values, payload, key=1),
        lambda: codec.decode_(payload, out, add=1),
        copy,
    )
    seconds: list[list[float]] = [[], [], []]
    for turn in range(repeat + 1):
        for action, taken in zip(actions, seconds, strict=True):
            begin = time.perf_counter()
            action()
            if on_gpu:
                torch.cuda.synchronize(values.device)
            if turn:
                taken.append(time.perf_counter() - begin)
    return Speed(*(4e-9 * len(values) / statistics.median(taken) for taken in seconds))


def coding_seconds(speed: Speed, *, num_values: int, num_ranks: int) -> float:
    """Returns the seconds that SRA codes on a rank: all values and its piece of the sum encoded, and as many pieces as ranks
    and all sums decoded. Two ranks have no piece of the sum to encode."""
    gigabytes = 4e-9 * num_values
    encoded = 1.0 if num_ranks == 2 else 1 + 1 / num_ranks
    return gigabytes * (encoded / speed.encode_gb_s + 2 / speed.decode_add_gb_s)


def break_even_mbit(codec: ValueCodec, speed: Speed, *, num_values: int, num_ranks: int) -> float:
    """Returns the link's Mbit/s below which coding takes less time than the bytes that it saves, were nothing overlapped."""
    saved = 2 * (num_ranks - 1) / num_ranks * (4 * num_values - codec.payload_bytes(num_values))
    return 8e-6 * saved / coding_seconds(speed, num_values=num_values, num_ranks=num_ranks)


def errors(codec: ValueCodec, num_values: int, num_ranks: int) -> tuple[float, float]:
    """Returns the relative L2 errors of the ranks' sum: each rank's values encoded once, and the sum
    encoded again (SRA), which two ranks do not."""
    exact = sum((normal_values(num_values, rank) for rank in range(num_ranks)), torch.zeros(num_values))
    once = torch.zeros(num_values)
    for rank in range(num_ranks):
        once += decode(codec, encode(codec, normal_values(num_values, rank), key=rank), num_values)

    def exchange(transport: LocalTransport) -> Tensor:
        job = Job(
            flat=normal_values(num_values, transport.rank), name="x", codec=codec, key=1, chunk_elements=num_values
        )
        run_pipeline(scatter_reduce_allgather(transport, job))
        return job.flat

    twice = LocalWorld(num_ranks).run(exchange)[0]
    return tuple(float((value - exact).norm() / exact.norm()) for value in (once, twice))  # type: ignore[return-value]


def normal_values(num_values: int, rank: int) -> Tensor:
    """Returns a rank's fp32 values, the same everywhere."""
    return torch.randn(num_values, generator=torch.Generator().manual_seed(rank))
