"""Asserts that the Triton kernels give the reference's bits: python triton_bits.py PARTS DEVICE, parts with commas between them.

tests/unit/test_triton.py starts it with TRITON_INTERPRET=1 and the device cpu, tests/unit/test_gpu.py with cuda.
"""

from __future__ import annotations

import functools
import sys
import traceback
from typing import Any

import torch

from hvd_adaptive.compress.kernels import cuda, reference
from hvd_adaptive.compress.kernels.reference import cast_bytes, levels_bytes, mix_key
from hvd_adaptive.compress.sparsify import TopK
from hvd_adaptive.doctor import gpu_checks

PARTS, DEVICE = sys.argv[1:]
SIZES = ((8, (1, 9, 20)), (24, (23, 60)), (512, (511, 2000)), (4096, (4500,)))


def normal(num: int, seed: int) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def on_device(name: str, *arguments: Any, **options: Any) -> Any:
    """Calls the Triton kernel's front with copies on the device, and takes what it has changed back."""
    moved = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]
    result = getattr(cuda, name)(*moved, **options)
    for own, theirs in zip(arguments, moved, strict=True):
        if isinstance(own, torch.Tensor):
            own.copy_(theirs)
    return None if result is None else result.cpu()


def awkward(num: int, magnitude: float) -> torch.Tensor:
    """Values of a magnitude, with constant, mixed-zero and broken buckets where there is room."""
    x = normal(num, num) * magnitude
    if num == 2000:
        x[512:1024] = torch.tensor([0.0, -0.0]).repeat(256)
        x[1030], x[600], x[40:48] = float("nan"), float("-inf"), 0.3
        x[1536:1560] = torch.tensor([3e38, -3e38]).repeat(12)
    return x


def assert_same(a: torch.Tensor, b: torch.Tensor, *what: object) -> None:
    # NaN has many bit patterns that mean the same.
    a, b = (t.nan_to_num(7e33).view(torch.int32) for t in (a, b))
    assert torch.equal(a, b), (*what, a, b)


def levels() -> None:
    """Each width with each bucket, and with counts that fill it and do not."""
    for bucket, nums in SIZES:
        for place, bits in enumerate((1, 2, 3, 4, 7, 8)):
            for num in nums if bucket == 512 else nums[place % len(nums) :: 2]:
                x = awkward(num, 10.0 ** (bits * 8 - 40))
                meta = 8 * -(-num // bucket)
                random = mix_key(bits, num)
                for key, spread, weight, feedback in (
                    (None, None, 1.0, False), (random, None, 0.3, True), (None, 0.6875, 0.3, True), (None, 1.5, 1.0, False)
                ):  # fmt: skip
                    lost = [normal(num, 5) * x.nan_to_num(0, 0, 0).abs().mean() for _ in range(2)] if feedback else [None] * 2
                    expected = torch.full((levels_bytes(num, bits, bucket),), 170, dtype=torch.uint8)
                    payload, before = expected.clone(), x.clone()
                    reference.levels_encode(x, expected, bits, bucket, key, spread, lost[0], weight)
                    on_device("levels_encode", x, payload, bits, bucket, key, spread, lost[1], weight)
                    assert_same(x, before)
                    assert_same(payload[:meta].view(torch.float32), expected[:meta].view(torch.float32), bucket, num, bits)
                    assert torch.equal(payload[meta:], expected[meta:]), (bucket, num, bits, key)
                    if feedback:
                        assert_same(lost[0], lost[1], "residual", bucket, num, bits)
                # However they were rounded, decoding takes them alike.
                for add in (0, 1, -1):
                    a, b = normal(num, 1), normal(num, 1)
                    reference.levels_decode(payload, a, bits, bucket, add)
                    on_device("levels_decode", payload, b, bits, bucket, add)
                    assert_same(a, b, "decode", bucket, num, bits, add)


def pieces() -> None:
    """All pieces of a tensor by one call, the last one shorter."""
    for bucket, piece, num in ((8, 16, 37), (24, 48, 96), (512, 1024, 1600), (512, 512, 2000)):
        x = awkward(num, 1.0)
        for bits in (1, 2, 3, 4, 8):
            for key, spread, weight, feedback in (
                (None, None, 1.0, False), (mix_key(bits, num), None, 0.3, True), (None, 0.6875, 0.3, True)
            ):  # fmt: skip
                lost = [normal(num, 5), normal(num, 5)] if feedback else [None, None]
                sizes = [levels_bytes(len(p), bits, bucket) for p in x.split(piece)]
                payloads = [torch.full((sum(sizes),), 170, dtype=torch.uint8) for _ in range(2)]
                reference.levels_encode(x, payloads[0], bits, bucket, key, spread, lost[0], weight, piece)
                on_device("levels_encode", x, payloads[1], bits, bucket, key, spread, lost[1], weight, piece)
                for part, *own in zip(x.split(piece), *(p.split(sizes) for p in payloads), strict=True):
                    meta = 8 * -(-len(part) // bucket)
                    scales = [p[:meta].view(torch.float32).nan_to_num(7e33, 8e33) for p in own]
                    assert torch.equal(own[0][meta:], own[1][meta:]), (bucket, piece, num, bits)
                    assert torch.equal(*scales), scales
                if feedback:
                    assert_same(*lost, "residual", bucket, piece, num, bits)


def peers() -> None:
    """Peers in rank order, and pieces of which those at the end are shorter or empty."""
    for bucket, piece, num in ((8, 16, 37), (24, 48, 48), (512, 1024, 1600), (512, 512, 512)):
        for bits in (1, 3, 4, 8):
            parts = normal(num, 2).split(piece)
            payloads = []
            for peer in range(3):
                for part in parts:
                    x = part * (peer + 0.1)
                    payload = torch.empty(levels_bytes(len(x), bits, bucket), dtype=torch.uint8)
                    reference.levels_encode(x, payload, bits, bucket, mix_key(peer))
                    payloads.append(payload)
            for num_peers in (1, 3):
                sent = torch.cat(payloads[: num_peers * len(parts)])
                outs = torch.empty(num), torch.empty(num)
                reference.levels_decode(sent, outs[0], bits, bucket, 0, num_peers, piece)
                on_device("levels_decode", sent, outs[1], bits, bucket, 0, num_peers, piece)
                assert_same(*outs, bucket, piece, num, bits, num_peers)


def cast() -> None:
    """Numbers of other types: pieces with an odd number of values, subnormal and large ones, and all peers in order."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for num, piece in ((1, None), (2049, None), (37, 16), (15, 5), (9000, 2048), (9000, 4499)):
            x = awkward(num, 1.0) * 10.0 ** (normal(num, 3) * 4)
            sizes = [cast_bytes(len(part), dtype) for part in x.split(piece or num)]
            for weight, feedback in ((1.0, False), (0.3, True)):
                lost = [normal(num, 5), normal(num, 5)] if feedback else [None, None]
                payloads = [torch.full((sum(sizes),), 170, dtype=torch.uint8) for _ in range(2)]
                reference.cast_encode(x, payloads[0], dtype, lost[0], weight, piece)
                on_device("cast_encode", x, payloads[1], dtype, lost[1], weight, piece)
                assert_same(*(p.view(dtype).float() for p in payloads), "cast", dtype, num, piece)
                if feedback:
                    assert_same(*lost, "residual", dtype, num, piece)
            for add, num_peers in ((0, 1), (1, 1), (-1, 1), (0, 3)):
                outs = normal(num, 1), normal(num, 1)
                reference.cast_decode(payloads[0].repeat(num_peers), outs[0], dtype, add, num_peers, piece)
                on_device("cast_decode", payloads[0].repeat(num_peers), outs[1], dtype, add, num_peers, piece)
                assert_same(*outs, "decode", dtype, num, piece, add, num_peers)


def squares() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for num in (0, 1, 2047, 5000):
            x = normal(num, 3).to(dtype)
            assert torch.allclose(on_device("sum_of_squares", x), reference.sum_of_squares(x), rtol=1e-14, atol=0)
    x = torch.full((5000,), 3e38)
    assert on_device("sum_of_squares", x).isfinite()
    for bad in (float("nan"), float("inf")):
        x[4999] = bad
        assert not on_device("sum_of_squares", x).isfinite()


def large() -> None:
    sizes = ((1, 1), (50, 7), (2049, 100), (5000, 400), (5000, 5000))
    kinds = ("normal", "ties", "zeros", "broken", "all broken")
    for place, (num, num_entries) in enumerate(sizes):
        # Each kind where one program has all values, and where two have.
        for turn, kind in enumerate(kinds if num_entries in (7, 100) else kinds[place % 3 :: 2]):
            x = normal(num, num)
            if kind == "ties":
                x = x.mul(2).round()
            elif kind == "zeros":
                x[num // 3 :] = 0
            elif kind == "broken":
                x[num // 2 :: 97] = float("nan")
                x[num // 3 :: 91] = -float("inf")
            elif kind == "all broken":
                x[::2] = float("nan")
            threshold = x.abs().topk(num_entries).values[-1]
            # Both choices with each kind, and all four with each size.
            for sampled in (False, True):
                for take in (sampled ^ bool((place + turn) % 2),):
                    found = []
                    for select in (reference.select_large, functools.partial(on_device, "select_large")):
                        # Three rows, of which the third one is a reflection, and so has its entries at other places.
                        own = torch.stack([x, -x, x.flip(0)])
                        payload = torch.full((3, 8 * num_entries), 85, dtype=torch.uint8)
                        select(own, threshold.repeat(3), payload, sampled=sampled, take=take)
                        places, entries = payload.view(torch.int32)[:, :num_entries], payload.view(torch.float32)[:, num_entries:]
                        found.append((places, entries, own))
                    assert torch.equal(found[0][0], found[1][0]), (num, num_entries, kind, sampled, take)
                    for a, b in zip(*(rest for _, *rest in found), strict=True):
                        assert_same(a, b, num, num_entries, kind, sampled, take)
                    if not sampled:
                        best = x.abs().nan_to_num(7e33).topk(num_entries).values
                        assert_same(found[0][1][0].abs().nan_to_num(7e33).sort(descending=True).values, best, "topk")


def large_decoded() -> None:
    """Peers in order, pieces of which the last one has fewer entries, one program and two, and payloads padded with zeros."""
    codec = TopK(fraction=0.1)
    for num, piece in ((1, None), (37, 16), (9000, None), (9000, 8500), (17000, 8500)):
        sent = []
        for peer in range(3):
            for part in awkward(num, 1.0).add(normal(num, peer)).split(piece or num):
                payload = torch.empty(1, codec.payload_bytes(len(part)), dtype=torch.uint8)
                # Sampled, and above a threshold that few values reach.
                threshold = part.abs().nan_to_num().quantile(0.97 if peer == 1 else 0.5).view(1)
                reference.select_large(part[None], threshold, payload, sampled=True, take=False)
                sent.append(payload.view(-1))
        payloads = torch.cat(sent)
        for add, num_peers in ((0, 1), (1, 1), (-1, 1), (0, 3)):
            outs = normal(num, 1), normal(num, 1)
            own = payloads[: len(payloads) // 3 * num_peers]
            reference.decode_large(own, outs[0], codec.num_entries, add, num_peers, piece)
            on_device("decode_large", own, outs[1], codec.num_entries, add, num_peers, piece)
            assert_same(*outs, num, piece, add, num_peers)


def doctor() -> None:
    """What `hvd-adaptive doctor --gpu` compares, of fewer values: the interpreter runs one program after the other."""
    gpu_checks._CODES = tuple((bits, bucket, min(num, 5000)) for bits, bucket, num in gpu_checks._CODES)
    found = gpu_checks.kernel_bits(torch.device(DEVICE))
    assert found["codes"] > 20 and found["differing"] == [], found


if __name__ == "__main__":
    known = {part.__name__: part for part in (levels, pieces, peers, cast, squares, large, large_decoded, doctor)}
    for part in PARTS.split(","):
        try:
            known[part]()
        except Exception:
            traceback.print_exc()
        else:
            print(f"{part}: same bits")
