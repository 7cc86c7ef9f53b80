"""The checks of ``hvd-adaptive doctor --gpu``: each returns facts as JSON values, and raises for what it cannot do.

Every check takes the device, and those of several ranks the world, so that tests run them on what they have. A check judges
nothing: :mod:`hvd_adaptive.doctor.gpu_verdict` does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.cluster.device import visible_gpus
from hvd_adaptive.comm import connect
from hvd_adaptive.comm.protocols import Transport
from hvd_adaptive.comm.shared_gpus import gpu_of, settle_shared_gpus, sharing_notice
from hvd_adaptive.compress.codec import ValueCodec
from hvd_adaptive.compress.kernels import reference
from hvd_adaptive.compress.kernels.reference import cast_bytes, levels_bytes, mix_key
from hvd_adaptive.compress.parse import parse_codec
from hvd_adaptive.config import Config
from hvd_adaptive.doctor.codec_speed import measure_speed, normal_values
from hvd_adaptive.engine.device_clock import DeviceClock, device_clock
from hvd_adaptive.engine.device_times import DeviceTimes
from hvd_adaptive.engine.records import RoundRecord, RoundStats
from hvd_adaptive.session.session import Session

# (bits, bucket, values): whole and cut buckets, each width that is packed in its own way.
_CODES = ((1, 512, 2000), (2, 512, 4096), (3, 24, 60), (4, 512, 100_003), (4, 4096, 9000), (8, 8, 20), (8, 512, 5000))
_NUMBERS = (torch.float16, torch.bfloat16)
_SPEEDS = ("maxmin:4", "maxmin:8", "normal:2", "topk:0.01")
_REPEATS = 7
_STALL_LIMIT_S = 30.0
_DATA_SEED, _MODEL_SEED = 1, 0


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """Returns what torch and Horovod say of the GPUs and of how they were built."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "built_for": torch.cuda.get_arch_list(),
            "num_different_gpus": len(set(visible_gpus())),
            "nccl": list(torch.cuda.nccl.version()),
        }
        # The first use of the device: what does not work at all fails here.
        found["sum"] = float(torch.ones(1000, device=device).sum())
    return found


def kernel_bits(device: torch.device, kernels: ModuleType | None = None) -> dict[str, Any]:
    """Encodes and decodes with the GPU's kernels and with the CPU's reference.

    Args:
        device: where the kernels run.
        kernels: the GPU's; by default the Triton ones.

    Returns:
        ``compile_s`` of the first use, the number of ``codes`` compared, and ``differing``: which do not have the same bits.
    """
    if kernels is None:
        from hvd_adaptive.compress.kernels import cuda

        kernels = cuda
    differing: list[str] = []
    start = time.perf_counter()
    compile_s = 0.0
    for bits, bucket, num in _CODES:
        for kind, key, spread in (("nearest", None, None), ("stochastic", mix_key(bits, num), None), ("normal", None, 0.75)):
            values = normal_values(num, bits)
            expected = torch.full((levels_bytes(num, bits, bucket),), 170, dtype=torch.uint8)
            reference.levels_encode(values, expected, bits, bucket, key, spread)
            payload = torch.full_like(expected, 85, device=device)
            kernels.levels_encode(values.to(device), payload, bits, bucket, key, spread)
            out, own = torch.ones(num), torch.ones(num, device=device)
            reference.levels_decode(expected, out, bits, bucket, 1)
            kernels.levels_decode(expected.to(device), own, bits, bucket, 1)
            compile_s = compile_s or time.perf_counter() - start
            if not torch.equal(payload.cpu(), expected):
                differing.append(f"encoding {bits} bits, bucket {bucket}, {kind}")
            if not torch.equal(own.cpu(), out):
                differing.append(f"decoding {bits} bits, bucket {bucket}, {kind}")
    values = normal_values(3000, 0)
    out, own = torch.zeros(3000), torch.zeros(3000, device=device)
    for dtype in _NUMBERS:
        numbers = torch.empty(cast_bytes(3000, dtype), dtype=torch.uint8)
        reference.cast_encode(values, numbers, dtype)
        payload = torch.full_like(numbers, 85, device=device)
        kernels.cast_encode(values.to(device), payload, dtype)
        reference.cast_decode(numbers, out, dtype, 1)
        kernels.cast_decode(numbers.to(device), own, dtype, 1)
        if not torch.equal(payload.cpu(), numbers) or not torch.equal(own.cpu(), out):
            differing.append(str(dtype).removeprefix("torch."))
    if not _adds_largest(device, kernels):
        differing.append("largest values")
    return {"compile_s": compile_s, "codes": 6 * len(_CODES) + 1 + len(_NUMBERS), "differing": differing}


def _adds_largest(device: torch.device, kernels: ModuleType) -> bool:
    # Three peers' values add up in the peers' order, though many threads add them.
    rows, threshold = normal_values(27_000, 1).view(3, 9000), torch.full((3,), 1.5)
    entries = torch.empty(3, 8 * 900, dtype=torch.uint8)
    payload = torch.full_like(entries, 85, device=device)
    reference.select_large(rows, threshold, entries, sampled=True, take=False)
    kernels.select_large(rows.to(device), threshold.to(device), payload, sampled=True, take=False)
    out, own = torch.empty(9000), torch.empty(9000, device=device)
    reference.decode_large(entries.view(-1), out, lambda num: 900, 0, num_peers=3)
    kernels.decode_large(entries.view(-1).to(device), own, lambda num: 900, 0, num_peers=3)
    return torch.equal(payload.cpu(), entries) and torch.equal(own.cpu(), out)


def codec_speeds(device: torch.device, num_values: int = 1 << 26) -> dict[str, Any]:
    """Returns GB/s of fp32 values that each codec encodes, and decodes and adds, beside a copy on the device."""
    values = normal_values(min(num_values, 1 << 22), 0).to(device).repeat(-(-num_values // (1 << 22)))[:num_values]
    found = {}
    for spec in _SPEEDS:
        codec = parse_codec(spec)
        assert isinstance(codec, ValueCodec), spec
        found[spec] = dataclasses.asdict(measure_speed(codec, values, repeat=_REPEATS))
    return {"num_values": num_values, "codecs": found}


def step_events(
    device: torch.device, *, num_steps: int = 30, size: int = 4096, clock: DeviceClock | None = None
) -> dict[str, Any]:
    """Makes steps of matrix products, and compares the seconds of their events with the wall clock's.

    Args:
        device: where.
        num_steps: steps.
        size: of the square matrices.
        clock: of the device; by default its own.

    Returns:
        ``wall_s`` of all steps until the device was through, ``event_s`` that the steps' events add up to, ``launch_s`` until
        the process had given out the work, and ``in_order``: whether no step was over before it began.
    """
    times = DeviceTimes(clock or device_clock(device))
    stats = RoundStats()
    left, right = (torch.rand(size, size, device=device) for _ in range(2))
    for _ in range(3):
        left @ right
    _finish(device)
    start = time.perf_counter()
    busy_s = []
    for _ in range(num_steps):
        begun = times.mark()
        torch.mm(left, right).mul_(2)
        times.end_step(stats, begun, 1, 1, None)
        times.then(lambda: busy_s.append(stats.busy_s))
    launch_s = time.perf_counter() - start
    times.end_round(stats)
    _finish(device)
    wall_s = time.perf_counter() - start
    return {
        "num_steps": num_steps,
        "launch_s": launch_s,
        "event_s": stats.busy_s,
        "wall_s": wall_s,
        "in_order": len(busy_s) == num_steps and all(b >= a for a, b in zip([0.0, *busy_s], busy_s, strict=False)),
    }


def allreduce(device: torch.device, transport: Transport, num_values: int = 1 << 24) -> dict[str, Any]:
    """Sums tensors of the device over the ranks, as a merge does. COLLECTIVE.

    Returns:
        Whether all sums are ``right``, the ``carrier``, and GB/s of a sum; rank by rank whether their GPUs differ.
    """
    right = True
    for num in (1, 1000, num_values):
        tensor = torch.arange(num, dtype=torch.float32, device=device).remainder_(1024).add_(transport.rank)
        transport.allreduce_sum_(tensor, f"doctor.{num}")
        count = transport.world_size
        expected = torch.arange(num, dtype=torch.float32).remainder_(1024) * count + count * (count - 1) / 2
        right = right and torch.equal(tensor.cpu(), expected)
    seconds = []
    tensor = torch.zeros(num_values, device=device)
    for turn in range(_REPEATS + 1):
        transport.rendezvous(f"doctor sum {turn}")
        start = time.perf_counter()
        transport.allreduce_sum_(tensor, "doctor.speed")
        _finish(device)
        seconds.append(time.perf_counter() - start)
    everyone = transport.allgather_object((right, statistics.median(seconds[1:]), gpu_of(device)))
    gpus = [gpu for *_, gpu in everyone]
    return {
        "world_size": transport.world_size,
        "carrier": transport.describe()["carrier"],
        "right": all(one for one, *_ in everyone),
        "gb_s": 4e-9 * num_values / max(slow for _, slow, _ in everyone),
        "own_gpus": len(set(gpus)) == len(gpus),
    }


def shared_gpu(device: torch.device, transport: Transport, num_values: int = 1 << 22) -> dict[str, Any]:
    """Has ranks on one GPU find that out and sum through host memory. COLLECTIVE."""
    notice = sharing_notice(transport.allgather_object((transport.host, gpu_of(device))))
    settle_shared_gpus(transport, device)
    return {"found": notice is not None, **allreduce(device, transport, num_values)}


def training(device: torch.device, transport: Transport, num_rounds: int = 6, num_samples: int = 4096) -> dict[str, Any]:
    """Trains a small model with local steps, 4-bit merges and adaptive batches. COLLECTIVE; closes the world.

    Returns:
        The mean ``losses`` of the rounds, each rank's ``samples``, ``seconds``, and the ``model_hash`` that all ranks agreed on.
    """
    generator = torch.Generator().manual_seed(_DATA_SEED)
    inputs = torch.randn(num_samples, 64, generator=generator)
    labels = (inputs @ torch.randn(64, 8, generator=generator)).argmax(1)
    torch.manual_seed(_MODEL_SEED)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    config = Config(
        batch_size=32, mega_batch=num_samples // 4, compression="maxmin:4", hash_interval=1, stall_limit_s=_STALL_LIMIT_S
    )  # fmt: skip
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.05), config, transport=transport)
    records: list[RoundRecord] = []
    session.records.append(records.append)
    start = time.perf_counter()
    for batch in session.batches(torch.utils.data.TensorDataset(inputs, labels), num_epochs=num_rounds / 4):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    seconds = time.perf_counter() - start
    session.close()
    return {
        "losses": [record.loss for record in records],
        "samples": [int(sum(record.stats["num_samples"][rank] for record in records)) for rank in range(session.world_size)],
        "seconds": seconds,
        "model_hash": records[-1].model_hash,
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


ALONE: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "gpu": describe_gpu, "kernels": kernel_bits, "codecs": codec_speeds, "events": step_events,
}  # fmt: skip
TOGETHER: dict[str, Callable[[torch.device, Transport], dict[str, Any]]] = {
    "allreduce": allreduce, "sharing": shared_gpu, "training": training,
}  # fmt: skip


def run_check(name: str, device: str, backend: str) -> dict[str, Any]:
    """Runs a check as this rank, or alone; returns its facts. Those of several ranks are COLLECTIVE.

    Args:
        name: of the check.
        device: "auto", "cpu", "cuda" (the GPU of this local rank) or "cuda:K".
        backend: what carries the ranks' tensors.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if name in ALONE:
        return ALONE[name](torch.device("cuda:0" if device == "cuda" else device))
    transport = connect(stall_limit_s=_STALL_LIMIT_S, backend=backend)
    chosen = torch.device(f"cuda:{transport.local_rank}" if device == "cuda" else device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    found = TOGETHER[name](chosen, transport)
    if name != "training":
        transport.close()
    return found


def main(name: str, device: str, backend: str, report: str) -> None:
    """Runs a check; rank 0 writes its facts, or what it raised, into a file.

    Raises:
        SystemExit: with 1, where the check failed.
    """
    code, rank = 0, read_launcher(os.environ).rank or 0
    try:
        found = run_check(name, device, backend)
    except Exception as error:
        traceback.print_exc()
        found, code = {"error": str(error) or type(error).__name__}, 1
    if not rank or code:
        Path(report).write_text(json.dumps(found))
    sys.stdout.flush()
    if code:
        # The other ranks may wait for this one in a collective: the launcher ends them.
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
