"""Seconds of one exchange over the present link: Horovod in fp32 and fp16 against codecs, coding included.

    mpirun -np 2 python benchmarks/exchange.py --mb 100 --rate-mbit 1000 [--json FILE]
    PATH=.../.venv/bin:$PATH two-hosts run 1 python benchmarks/exchange.py --mb 100 --rate-mbit 1000
    ... --methods fp32,maxmin:4 --reducer hierarchical     (2 x 2 ranks: two-hosts run 2)

``wire``: the bytes that the busiest rank sends over a full-duplex link of that rate, less TCP/IP and Ethernet headers, in
seconds. Methods take turns; medians count. Each method's result is compared with the exact sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvd_adaptive.compress.policy import TensorInfo, parse_policy
from hvd_adaptive.exchange.exchange import CHUNK_ELEMENTS, Exchange
from hvd_adaptive.transport import connect
from hvd_adaptive.transport.base import Transport

METHODS = "fp32,fp16,maxmin:8,maxmin:4,maxmin:2"
# TCP payload of an Ethernet frame of 1500 bytes, with time stamps, over its bytes on the wire.
GOODPUT = 1448 / 1538


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100, help="MB (1e6 bytes) of fp32 values")
    parser.add_argument("--rate-mbit", type=float, default=1000, help="of the link between hosts, for the ideal time")
    parser.add_argument("--methods", default=METHODS, help="fp32, fp16 (Horovod's own), codecs; separated by ; or ,")
    parser.add_argument("--reducer", default="sra", choices=("sra", "hierarchical"))
    parser.add_argument("--chunk-elements", type=int, default=CHUNK_ELEMENTS)
    parser.add_argument("--feedback", action="store_true", help="with error feedback")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = connect(stall_limit_s=600, groups=options.reducer == "hierarchical")
    num = int(options.mb * 1e6 / 4)
    methods = options.methods.split(";") if ";" in options.methods else options.methods.split(",")
    runs = {method: make(method, transport, num, options) for method in methods}
    source = torch.randn(num, generator=torch.Generator().manual_seed(transport.rank))
    exact = sum(torch.randn(num, generator=torch.Generator().manual_seed(r)) for r in range(transport.world_size))
    rows = {method: {"seconds": [], "error": 0.0} for method in methods}
    flat = torch.empty_like(source)
    for turn in range(options.repeat + 1):
        for method, (run, _) in runs.items():
            flat.copy_(source)
            transport.rendezvous("start")
            begin = time.perf_counter()
            run(flat)
            seconds = max(transport.allgather_object(time.perf_counter() - begin))
            if turn:  # the first round compiles, and fills Horovod's caches
                rows[method]["seconds"].append(seconds)
            rows[method]["error"] = float((flat - exact).norm() / exact.norm())
    if transport.rank == 0:
        report(rows, runs, transport, options)
    transport.close()


def make(method: str, transport: Transport, num: int, options: Any) -> tuple[Callable[[torch.Tensor], None], float]:
    """Returns what to run, and the payload's bytes per value."""
    if method == "fp32":
        return lambda flat: transport.allreduce_sum_(flat, "fp32"), 4.0
    if method == "fp16":

        def run(flat: torch.Tensor) -> None:
            # What Horovod's Compression.fp16 does.
            half = flat.to(torch.float16)
            transport.allreduce_sum_(half, "fp16")
            flat.copy_(half)

        return run, 2.0
    exchange = Exchange(
        transport,
        parse_policy(f"{method}; size>0={method}"),
        reducer=options.reducer,
        error_feedback=options.feedback,
        chunk_elements=options.chunk_elements,
    )
    tensors, steps = [TensorInfo("x", (num,))], iter(range(10**6))
    payload = exchange.policy.codec(tensors[0]).payload_bytes(num)
    return lambda flat: exchange.sum_(flat, method, step=next(steps), tensors=tensors), payload / num


def report(rows: Any, runs: Any, transport: Transport, options: Any) -> None:
    num = int(options.mb * 1e6 / 4)
    # A ring or SRA sends 2 (N - 1) / N of the payload; inside hosts nothing counts, so N is the number of hosts there.
    size = transport.world_size // (transport.local_size if options.reducer == "hierarchical" else 1)
    base = statistics.median(rows[next(iter(rows))]["seconds"])
    print("method,seconds,wire,seconds/wire,speedup,relative_L2_error")
    for method, row in rows.items():
        seconds = statistics.median(row["seconds"])
        sent = 2 * (size - 1) / size * runs[method][1] * num
        wire = sent * 8 / (options.rate_mbit * 1e6 * GOODPUT)
        ratio = seconds / wire if wire else float("nan")
        print(f"{method.replace(',', ' ')},{seconds:.4f},{wire:.4f},{ratio:.2f},{base / seconds:.2f},{row['error']:.4f}")
        row |= {"wire": wire, "bytes_per_value": runs[method][1], "speedup": base / seconds}
    if options.json:
        options.json.write_text(json.dumps({"arguments": vars(options) | {"json": None}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
