"""Speed of the codecs on one core of this CPU, beside a plain copy measured in the same run.

    python benchmarks/kernels.py [--mib 64] [--repeat 9] [--json FILE]

GB/s of fp32 values. Copy, encoding and decoding take turns, so that a noisy machine disturbs all alike; medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_adaptive.compress import parse_codec

SPECS = ("maxmin:8", "maxmin:4", "maxmin:4,nearest", "maxmin:3", "maxmin:2", "maxmin:1", "sign", "fp16", "topk:0.01,sampled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64, help="MiB of fp32 values")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(int(options.mib * 2**18))
    rows = [measure(spec, values, options.repeat) for spec in SPECS]
    print("codec,payload_bytes_per_value,encode_GB/s,decode_add_GB/s,copyto_GB/s,encode/copyto,decode_add/copyto,relative_L2_error")
    for row in rows:
        print(",".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(spec: str, values: torch.Tensor, repeat: int) -> dict[str, Any]:
    codec = parse_codec(spec)
    payload = torch.empty(codec.payload_bytes(len(values)), dtype=torch.uint8)
    out, copied = torch.zeros_like(values), np.empty_like(values.numpy())
    actions: tuple[Callable[[], Any], ...] = (
        lambda: codec.encode_(values, payload, key=1),
        lambda: codec.decode_(payload, out, add=1),
        lambda: np.copyto(copied, values.numpy()),
    )
    seconds: list[list[float]] = [[], [], []]
    for turn in range(repeat + 1):
        for action, list_ in zip(actions, seconds, strict=True):
            begin = time.perf_counter()
            action()
            if turn:  # the first call compiles
                list_.append(time.perf_counter() - begin)
    encode, decode, copy = (4e-9 * len(values) / statistics.median(times) for times in seconds)
    codec.decode_(payload, out)
    error = float((out - values).norm() / values.norm())
    return {
        "codec": codec.spec.replace(",", " "),
        "bytes_per_value": payload.numel() / len(values),
        "encode": encode,
        "decode_add": decode,
        "copyto": copy,
        "encode_ratio": encode / copy,
        "decode_add_ratio": decode / copy,
        "error": error,
    }


if __name__ == "__main__":
    main()
