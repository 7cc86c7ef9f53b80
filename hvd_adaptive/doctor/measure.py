"""What one rank measures: its device's speed, its codecs' kernels, claims, and the links between hosts."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvd_adaptive.cluster.device import bind_device, compute_threads, device_place
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.compress.codec import decode, encode
from hvd_adaptive.compress.parse import parse_codec

_MATRIX_CPU, _MATRIX_CUDA = 768, 4096
_NUM_CLAIMS = 200
_SMALL_BYTES = 4 << 10
_LARGE_BYTES = 8 << 20
# A transfer that short says more about latency than about the link.
_SHORT_S = 0.02
_LONG_FACTOR = 8
_MAX_PAIRS = 32
_REPEATS = 3


def describe_torch() -> dict[str, Any]:
    """Loads torch; returns its version, what it was built for, and the GPUs that it sees."""
    return {"version": torch.__version__, "cuda": torch.version.cuda, "num_gpus": torch.cuda.device_count()}


def choose_device(option: str, transport: Transport, cores: list[int]) -> dict[str, Any]:
    """Binds this rank to its device and threads as ``train`` does. COLLECTIVE.

    Args:
        option: as for :func:`bind_device`.
        transport: the world.
        cores: that this rank may run on.

    Returns:
        The device, its name and place, and the threads; or {"error": text}, where a rank cannot have it.
    """
    threads = compute_threads(transport.allgather_object((transport.host, cores)), transport.rank)
    torch.set_num_threads(threads)
    try:
        device = bind_device(option, local_rank=transport.local_rank, local_size=transport.local_size)
    except (RuntimeError, ValueError) as error:
        return {"error": str(error), "device": "cpu", "threads": threads}
    facts: dict[str, Any] = {"device": str(device), "threads": threads}
    facts["place"] = device_place(device, option, transport.host)._asdict()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts |= {"name": torch.cuda.get_device_name(device), "free_bytes": free, "total_bytes": total}
    return facts


def compute_speed(device: torch.device, seconds: float) -> dict[str, float]:
    """Multiplies matrices; returns FLOP/s, and for a CPU the part of its threads' time that the system gave.

    Args:
        device: where.
        seconds: how long, after a first product that does not count.
    """
    size = _MATRIX_CPU if device.type == "cpu" else _MATRIX_CUDA
    left = torch.full((size, size), 1e-3, device=device)
    out = left @ left
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    num_products, begin, begin_cpu = 0, time.perf_counter(), time.process_time()
    while (wall_s := time.perf_counter() - begin) < seconds or not num_products:
        torch.matmul(left, left, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        num_products += 1
    result = {"flops": 2 * size**3 * num_products / wall_s, "seconds": wall_s}
    if device.type == "cpu":
        result["cpu_share"] = (time.process_time() - begin_cpu) / (wall_s * torch.get_num_threads())
    return result


def compile_kernels(device: torch.device) -> dict[str, Any]:
    """Runs a codec of which each device has kernels; returns their backend, and the seconds of the first and second call.

    Raises:
        RuntimeError: if what comes back is not what went in, within the codec's bound.
    """
    codec = parse_codec("maxmin:8,nearest")
    values = torch.linspace(-1, 1, 4096, device=device)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        back = decode(codec, encode(codec, values), values.numel())
        error = float((back - values).abs().max())
        seconds.append(time.perf_counter() - begin)
    # A bucket of 512 spans a quarter: half of a 255th of that, and rounding.
    if not error <= 0.25 / 255:
        raise RuntimeError(f"codec {codec.spec} on {device} gives back values that are wrong by {error:.3g}")
    backend = "numba" if device.type == "cpu" else "Triton" if importlib.util.find_spec("triton") else "torch"
    return {"backend": backend, "first_s": seconds[0], "second_s": seconds[1]}


def claim_latency(transport: Transport) -> dict[str, float]:
    """Claims from one cursor, all ranks at once; returns this rank's seconds a claim. COLLECTIVE."""
    transport.rendezvous("doctor claims")
    seconds = []
    for _ in range(_NUM_CLAIMS):
        begin = time.perf_counter()
        transport.add("doctor.claims", 1)
        seconds.append(time.perf_counter() - begin)
    transport.rendezvous("doctor claimed")
    total = transport.add("doctor.claims", 0)
    if total != _NUM_CLAIMS * transport.world_size:
        raise RuntimeError(
            f"the shared cursor stands at {total} after {_NUM_CLAIMS} claims of each of {transport.world_size} ranks"
        )
    return {"median_s": float(np.median(seconds)), "p99_s": float(np.quantile(seconds, 0.99))}


def collectives(transport: Transport) -> dict[str, float]:
    """Times a small gather and the allreduce over all ranks, whose sum is checked. COLLECTIVE.

    Raises:
        RuntimeError: if a sum is wrong.
    """
    gather_s = _best(transport, "doctor gather", lambda: transport.allgather_stats(np.zeros(16)))
    facts = {"gather_s": gather_s}
    for name, size in (("small", _SMALL_BYTES), ("large", _LARGE_BYTES)):
        tensor = torch.empty(size // 4)

        def reduce(tensor: torch.Tensor = tensor, name: str = name) -> None:
            tensor.fill_(transport.rank + 1)
            transport.allreduce_sum_(tensor, f"doctor.{name}")

        facts[f"{name}_bytes"], facts[f"{name}_s"] = size, _best(transport, f"doctor {name}", reduce)
        expected = transport.world_size * (transport.world_size + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"the allreduce gave {tensor[0]}, not {expected}, the sum over the ranks")
    return facts


def links(transport: Transport) -> list[dict[str, Any]]:
    """Sends bytes from one host to the next, one pair at a time; returns each link's rate, on every rank. COLLECTIVE.

    Beyond 32 hosts only the first 32 links are measured.
    """
    hosts = transport.allgather_object(transport.host)
    heads = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(heads) == 1:
        return []
    found = []
    for number, source in enumerate(heads[:_MAX_PAIRS]):
        target = heads[(number + 1) % len(heads)]
        small_s = _transfer(transport, source, target, _SMALL_BYTES)
        size = _LARGE_BYTES
        large_s = _transfer(transport, source, target, size)
        if large_s - small_s < _SHORT_S:
            size *= _LONG_FACTOR
            large_s = _transfer(transport, source, target, size)
        rate = (size - _SMALL_BYTES) / max(large_s - small_s, 1e-9)
        link = {"from": hosts[source], "to": hosts[target], "bytes_per_s": rate, "bytes": size}
        found.append({**link, "small_s": small_s, "small_bytes": _SMALL_BYTES})
    return found


def _transfer(transport: Transport, source: int, target: int, size: int) -> float:
    """Returns the seconds, on every rank, that so many bytes take from one rank to another. COLLECTIVE."""
    rank, world_size = transport.rank, transport.world_size
    send = [int(other == rank) for other in range(world_size)]
    receive = list(send)
    if rank == source:
        send[target] = size
    if rank == target:
        receive[source] = size
    data = torch.ones(sum(send), dtype=torch.uint8)

    def exchange() -> None:
        transport.alltoall_bytes_async(
            data, send_bytes=send, receive_bytes=receive, name=f"doctor.{source}.{target}.{size}"
        ).wait()

    mine = _best(transport, f"doctor {source} to {target}", exchange)
    return float(transport.allgather_stats(np.array([mine]))[target, 0])


def _best(transport: Transport, name: str, action: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of three calls after a first one, all ranks starting together. COLLECTIVE."""
    seconds = []
    for _ in range(1 + _REPEATS):
        transport.rendezvous(name)
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
