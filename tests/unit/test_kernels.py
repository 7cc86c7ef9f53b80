"""The kernels give the reference's bits, and the reference is the published formula."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hvd_adaptive.compress.kernels import dispatch, reference
from hvd_adaptive.compress.kernels.reference import levels_bytes, mix_key, uniform

UNWRITABLE = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]
import logging
from hvd_adaptive.compress.kernels import dispatch
logging.basicConfig()
print(dispatch._cpu().__name__)
"""
SIZES = (1, 7, 8, 9, 511, 512, 513, 5000)


def test_compiled_code_that_can_be_kept_nowhere_is_compiled_anew() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    run = subprocess.run([sys.executable, "-c", UNWRITABLE], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout == "hvd_adaptive.compress.kernels.cpu\n" and "set NUMBA_CACHE_DIR to a writable folder" in run.stderr


def awkward(num: int, seed: int) -> torch.Tensor:
    """Values of all magnitudes, with constant, tiny, mixed-zero and broken buckets where there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, generator=generator) * 10.0 ** float(torch.randint(-44, 38, (), generator=generator))
    if num == 5000:
        x[512:1024] = 0.3
        x[1024:1536] = torch.tensor([0.0, -0.0]).repeat(256)
        x[1600], x[2100], x[2600] = float("nan"), float("inf"), -float("inf")
        x[3072:3584] = torch.tensor([3e38, -3e38]).repeat(256)
        x[3584:4096] = torch.randn(512, generator=generator) * 1e-42
    return x


def assert_the_same_with_a_residual(
    x: torch.Tensor, residual: torch.Tensor, bits: int, key: int | None, spread: float | None
) -> None:
    expected = torch.empty(levels_bytes(len(x), bits, 512), dtype=torch.uint8)
    payload, lost, before = expected.clone(), x + residual, x.clone()
    reference.levels_encode(lost, expected, bits, 512, key, spread)
    reference.levels_decode(expected, lost, bits, 512, -1)
    dispatch.levels_encode(x, payload, bits=bits, bucket=512, key=key, spread=spread, residual=residual)
    assert torch.equal(payload, expected)
    assert torch.equal(residual.view(torch.int32), lost.view(torch.int32)) or torch.equal(
        residual.nan_to_num(7.0), lost.nan_to_num(7.0)
    )
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("bits", range(1, 9))
def test_numba_gives_the_references_bits(bits: int) -> None:
    for num in SIZES:
        for seed in range(6):
            x = awkward(num, seed)
            key, spread = [(None, None), (mix_key(seed, num), None), (None, 1.5 / bits)][seed % 3]
            expected = torch.full((levels_bytes(num, bits, 512),), 170, dtype=torch.uint8)
            payload = expected.clone()
            reference.levels_encode(x, expected, bits, 512, key, spread)
            dispatch.levels_encode(x, payload, bits=bits, bucket=512, key=key, spread=spread)
            assert torch.equal(payload, expected)
            assert_the_same_with_a_residual(x, awkward(num, seed + 6), bits, key, spread)
            for add in (0, 1, -1):
                a = torch.randn(num, generator=torch.Generator().manual_seed(9))
                b = a.clone()
                reference.levels_decode(expected, a, bits, 512, add)
                dispatch.levels_decode(payload, b, bits=bits, bucket=512, add=add)
                # Two NaN may differ in bits that mean nothing.
                a, b = a.nan_to_num(nan=7e33), b.nan_to_num(nan=7e33)
                assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("bits", [1, 4, 7])
def test_numba_encodes_pieces_to_the_references_bits(bits: int) -> None:
    for num, piece in ((5000, 1024), (5000, 512), (5000, 5120), (1024, 512)):
        x = awkward(num, bits)
        size = sum(levels_bytes(len(part), bits, 512) for part in x.split(piece))
        payloads = [torch.full((size,), fill, dtype=torch.uint8) for fill in (170, 85)]
        lost = [awkward(num, 3), awkward(num, 3)]
        key, spread = (mix_key(num), None) if bits == 4 else (None, 0.7)
        reference.levels_encode(x, payloads[0], bits, 512, key, spread, lost[0], 0.3, piece)
        dispatch.levels_encode(
            x, payloads[1], bits=bits, bucket=512, key=key, spread=spread, residual=lost[1], weight=0.3, piece=piece
        )
        assert torch.equal(*payloads)
        assert torch.equal(*(own.nan_to_num(7e33).view(torch.int32) for own in lost))


def test_decoding_is_not_fused() -> None:
    """With units and minima of full precision a fused multiply-add would differ on about a third of the values."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    payload = torch.empty(levels_bytes(len(x), 8, 512), dtype=torch.uint8)
    dispatch.levels_encode(x, payload, bits=8, bucket=512, key=None)
    out = torch.empty_like(x)
    dispatch.levels_decode(payload, out, bits=8, bucket=512, add=0)
    num_buckets = -(-len(x) // 512)
    unit, low = payload[: 8 * num_buckets].view(torch.float32).view(-1, 2).double().unbind(1)
    product = payload[8 * num_buckets :][: len(x)].double() * unit.repeat_interleave(512)[: len(x)]
    low = low.repeat_interleave(512)[: len(x)]
    assert torch.equal(out, (product.float() + low.float()))
    assert float(((product + low).float() != out).double().mean()) > 0.2


def test_the_code_is_cgxs_formula() -> None:
    x = torch.tensor([-1.0, 0.0, 0.24, 0.26, 2.0, 0.5, 0.51, 1.0])
    payload = torch.empty(levels_bytes(8, 2, 8), dtype=torch.uint8)
    reference.levels_encode(x, payload, 2, 8, None)
    assert payload[:8].view(torch.float32).tolist() == [1.0, -1.0]
    codes = [0, 1, 1, 1, 3, 2, 2, 2]
    packed = sum(code << 2 * place for place, code in enumerate(codes))
    assert payload[8:].tolist() == [packed & 255, packed >> 8, 0, 0]


def test_random_numbers_are_uniform_and_follow_the_key() -> None:
    num = 200_000
    r = uniform(num, mix_key(1, 2, 3))
    assert torch.equal(r, uniform(num, mix_key(1, 2, 3)))
    assert float(r.min()) >= 0 and float(r.max()) < 1
    counts = np.histogram(r.numpy(), bins=100, range=(0, 1))[0]
    # Chi-square of 99 degrees of freedom: mean 99, standard deviation 14.
    assert 50 < float(((counts - num / 100) ** 2 / (num / 100)).sum()) < 170
    for other in (uniform(num, mix_key(1, 2, 4)), uniform(num, mix_key(2, 2, 3)), r.roll(1), r.roll(512)):
        assert abs(float(torch.corrcoef(torch.stack([r, other]))[0, 1])) < 5 / num**0.5


def test_keys_differ_where_their_parts_do() -> None:
    keys = {mix_key(a, b, c) for a in range(20) for b in range(20) for c in (-1, 0, 2**63)}
    assert len(keys) == 1200 and all(0 <= key < 2**64 for key in keys)
