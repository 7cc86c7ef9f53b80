"""Seconds of one exchange over the present link: Horovod in fp32 and fp16 against codecs, coding included."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.doctor.codec_speed import break_even_mbit, measure_speed, normal_values
from hvd_adaptive.exchange.exchange import CHUNK_ELEMENTS, Exchange

METHODS = ("horovod-fp32", "horovod-fp16", "maxmin:8", "maxmin:4", "maxmin:2")
# TCP payload of an Ethernet frame of 1500 bytes, with time stamps, over its bytes on the wire.
_GOODPUT = 1448 / 1538
_SPEED_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class LinkRow:
    """A line of the table.

    Attributes:
        method: Horovod's own allreduce, or a codec.
        reducer: how encoded values met.
        bits: on the wire, a value.
        seconds: of the slowest rank, median.
        wire_seconds: of the bytes that the busiest rank sends between hosts, with their headers, on a full-duplex link of the
            given rate; None where no rate was given.
        link_mbit: bits that each rank sends, in a second of ``seconds``.
        speedup: over the first method.
        error: relative L2, against the exact sum.
        break_even_mbit: on slower links than this the codec gains; None for Horovod's own.
    """

    method: str
    reducer: str
    bits: float
    seconds: float
    wire_seconds: float | None
    link_mbit: float
    speedup: float
    error: float
    break_even_mbit: float | None


@dataclass(frozen=True, slots=True)
class _Method:
    run: Callable[[Tensor], None]
    payload_bytes: Callable[[], int]
    reducer: str
    break_even: float | None = None


def measure_link(
    transport: Collectives,
    methods: Sequence[str],
    *,
    num_values: int,
    repeat: int,
    reducer: str = "sra",
    error_feedback: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    rate_mbit: float | None = None,
) -> list[LinkRow]:
    """Times exchanges of normal random values on the CPU, methods in turns. COLLECTIVE. Sets torch's threads to one.

    Args:
        transport: the world, with groups for reducer hierarchical.
        methods: of `METHODS`, or any codec; the first is the baseline.
        num_values: fp32 values on each rank.
        repeat: turns, after one that compiles and connects.
        reducer: of the codecs.
        error_feedback: with residuals.
        chunk_elements: see :class:`Exchange`.
        rate_mbit: of the link between hosts, for ``wire_seconds``.

    Raises:
        ValueError, AgreedError: on all ranks, for a codec that cannot be read or cannot go with the reducer.
    """
    torch.set_num_threads(1)
    runs: dict[str, _Method] = {}
    for method in methods:
        runs[method] = _make(method, transport, num_values, reducer, error_feedback, chunk_elements)
    source = normal_values(num_values, transport.rank)
    exact = sum((normal_values(num_values, rank) for rank in range(transport.world_size)), torch.zeros(num_values))
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    error = {}
    flat = torch.empty_like(source)
    for turn in range(repeat + 1):
        for method, made in runs.items():
            flat.copy_(source)
            transport.rendezvous("start")
            begin = time.perf_counter()
            made.run(flat)
            slowest = max(transport.allgather_object(time.perf_counter() - begin))
            if turn:
                seconds[method].append(slowest)
            error[method] = float((flat - exact).norm() / exact.norm())
    rows = []
    for method, made in runs.items():
        # Inside hosts nothing counts, so the ranks that meet over the link are one a host there.
        over_link = transport.world_size // (transport.local_size if made.reducer == "hierarchical" else 1)
        # A ring or SRA sends 2 (N - 1) / N of the payload.
        sent_bits = 16 * (over_link - 1) / over_link * made.payload_bytes()
        taken = statistics.median(seconds[method])
        rows.append(
            LinkRow(
                method=method,
                reducer=made.reducer,
                bits=8 * made.payload_bytes() / num_values,
                seconds=taken,
                wire_seconds=None if rate_mbit is None else sent_bits / (rate_mbit * 1e6 * _GOODPUT),
                link_mbit=1e-6 * sent_bits / taken,
                speedup=statistics.median(seconds[methods[0]]) / taken,
                error=error[method],
                break_even_mbit=made.break_even,
            )
        )
    return rows


def _make(
    method: str, transport: Collectives, num_values: int, reducer: str, error_feedback: bool, chunk_elements: int
) -> _Method:
    if method == "horovod-fp32":
        run = lambda flat: transport.allreduce_sum_(flat, method)  # noqa: E731
        return _Method(run, lambda: 4 * num_values, "allreduce")
    if method == "horovod-fp16":

        def half(flat: Tensor) -> None:
            # What Horovod's Compression.fp16 does.
            values = flat.to(torch.float16)
            transport.allreduce_sum_(values, method)
            flat.copy_(values)

        return _Method(half, lambda: 2 * num_values, "allreduce")
    exchange = Exchange(
        transport,
        parse_policy(f"{method}; size>0={method}"),
        reducer=reducer,
        error_feedback=error_feedback,
        chunk_elements=chunk_elements,
    )
    rows = max(1, int(num_values**0.5))
    whole = num_values // rows * rows
    # As matrices, for powersgd; the rest is a vector.
    tensors = [TensorInfo("x", (rows, whole // rows)), TensorInfo("rest", (num_values - whole,))]
    codec, steps = exchange.policy.codec(tensors[0]), itertools.count()
    break_even = None
    if isinstance(codec, ValueCodec) and transport.world_size > 1:
        speed = measure_speed(codec, normal_values(min(num_values, _SPEED_VALUES), 0), repeat=3)
        # The slowest rank's.
        own = break_even_mbit(codec, speed, num_values=num_values, num_ranks=transport.world_size)
        break_even = min(transport.allgather_object(own))
    return _Method(
        lambda flat: exchange.sum_(flat, method, step=next(steps), tensors=tensors),
        lambda: exchange.payload_bytes(method),
        exchange.reducer,
        break_even,
    )
