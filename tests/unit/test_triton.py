"""The Triton kernels through Triton's interpreter, in a process of their own: it is chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from hvd_adaptive.kernels import cuda, reference
from hvd_adaptive.kernels.reference import maxmin_bytes, mix_key

for bucket, nums in ((8, (1, 9, 20)), (24, (23, 60)), (512, (511, 2000))):
    for num in nums:
        for bits in (1, 2, 3, 4, 7, 8):
            x = torch.randn(num, generator=torch.Generator().manual_seed(num)) * 10.0 ** (bits * 8 - 40)
            if num == 2000:
                x[512:1024] = torch.tensor([0.0, -0.0]).repeat(256)
                x[1030], x[600], x[40:48] = float("nan"), float("-inf"), 0.3
                x[1536:1560] = torch.tensor([3e38, -3e38]).repeat(12)
            for key in (None, mix_key(bits, num)):
                expected = torch.full((maxmin_bytes(num, bits, bucket),), 170, dtype=torch.uint8)
                payload = expected.clone()
                reference.maxmin_encode(x, expected, bits, bucket, key)
                cuda.maxmin_encode(x, payload, bits, bucket, key)
                # NaN has many bit patterns; compare what is not metadata bit for bit, and metadata as numbers.
                meta = 8 * -(-num // bucket)
                a, b = (p[:meta].view(torch.float32).nan_to_num(7e33).view(torch.int32) for p in (payload, expected))
                assert torch.equal(a, b), (bucket, num, bits, key, a, b)
                assert torch.equal(payload[meta:], expected[meta:]), (bucket, num, bits, key)
                for add in (0, 1, -1):
                    a = torch.randn(num, generator=torch.Generator().manual_seed(1))
                    b = a.clone()
                    reference.maxmin_decode(payload, a, bits, bucket, add)
                    cuda.maxmin_decode(payload, b, bits, bucket, add)
                    assert torch.equal(a.nan_to_num(7e33), b.nan_to_num(7e33)), (bucket, num, bits, add)
print("same bits")
"""


def test_triton_gives_the_references_bits() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton (pip install triton); its interpreter needs no GPU")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.strip() == "same bits", done.stderr[-3000:]
