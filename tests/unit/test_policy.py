"""Policies per layer, and bits under an error budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive.compress.bits import WIDTHS, choose_bits, error_curve, with_bits
from hvd_adaptive.compress.policy import TensorInfo, parse_policy

MODEL = [
    TensorInfo("embedding.weight", (5000, 64)),
    TensorInfo("layers.0.weight", (64, 64)),
    TensorInfo("layers.0.bias", (64,)),
    TensorInfo("layers.1.weight", (8, 64)),
    TensorInfo("norm.weight", (4096,)),
]


def codecs(text: str) -> list[str]:
    return [parse_policy(text).codec(tensor).spec.split(",")[0] for tensor in MODEL]


def test_vectors_and_small_tensors_are_exempt_unless_a_rule_says_otherwise() -> None:
    assert codecs("maxmin:4") == ["maxmin:4", "maxmin:4", "none", "none", "none"]
    assert codecs("maxmin:4; norm*=maxmin:8") == ["maxmin:4", "maxmin:4", "none", "none", "maxmin:8"]
    assert codecs("maxmin:4; ndim<2=fp16; *=maxmin:2") == ["maxmin:2", "maxmin:2", "fp16", "maxmin:2", "fp16"]


def test_the_first_rule_that_matches_decides() -> None:
    text = "maxmin:4; layers.0.*=fp16; layers.?.weight=normal:1,bucket=64; size>=100000=topk:0.1"
    assert codecs(text) == ["topk:0.1", "fp16", "fp16", "normal:1", "none"]
    assert parse_policy(parse_policy(text).spec) == parse_policy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("maxmin:0", r"bits must be in \[1, 8\]"),
        ("maxmin:4; head", "a rule is CONDITION=CODEC, got 'head'"),
        ("maxmin:4; =fp16", "a rule is CONDITION=CODEC"),
        ("ndim<2=none", "the codec of all other tensors comes first"),
        ("none; a*=zip", "unknown codec 'zip'"),
    ],
)
def test_policies_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_a_name_that_no_tensor_has_is_refused() -> None:
    parse_policy("maxmin:4; layers.*=fp16; size>9=none").check(MODEL)
    with pytest.raises(ValueError, match=r"^compression: no tensor's name matches 'layer\.\*'; the names are embedding\.weight"):
        parse_policy("maxmin:4; layer.*=fp16").check(MODEL)


def test_patterns_for_another_model_change_no_codec() -> None:
    policy = parse_policy("maxmin:4; other.*=fp16; layers.*=maxmin:2; size>9=none")
    part = policy.part_for(MODEL)
    part.check(MODEL)
    assert part == parse_policy("maxmin:4; layers.*=maxmin:2; size>9=none")
    assert [part.codec(tensor) for tensor in MODEL] == [policy.codec(tensor) for tensor in MODEL]


def layers() -> list[torch.Tensor]:
    """Layers whose values differ in scale and tail, as those of a model do."""
    generator = torch.Generator().manual_seed(0)
    scales, sizes = (1.0, 0.1, 0.01, 0.3), (4096, 65536, 300_000, 20_000)
    return [scale * torch.randn(size, generator=generator) for scale, size in zip(scales, sizes, strict=True)]


@pytest.mark.parametrize("uniform_bits", [3, 4, 6])
def test_chosen_bits_need_fewer_bytes_at_no_larger_error(uniform_bits: int) -> None:
    sizes = [len(layer) for layer in layers()]
    errors = np.stack([error_curve(layer) for layer in layers()])
    bits = choose_bits(sizes, errors, uniform_bits=uniform_bits)
    spent = sum(errors[i, b - 2] for i, b in enumerate(bits))
    assert spent <= errors[:, uniform_bits - 2].sum()
    assert sum(s * b for s, b in zip(sizes, bits, strict=True)) < 0.8 * sum(sizes) * uniform_bits


def test_the_choice_is_the_best_there_is() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 100, 3).tolist()
        errors = rng.random((3, 1)) * 4.0 ** -np.arange(7)
        chosen = choose_bits(sizes, errors, uniform_bits=4, resolution=100_000)
        budget = errors[:, 2].sum()
        feasible = [
            sum(s * b for s, b in zip(sizes, bits, strict=True))
            for bits in np.stack(np.meshgrid(*[WIDTHS] * 3), -1).reshape(-1, 3)
            if sum(errors[i, b - 2] for i, b in enumerate(bits)) <= budget * (1 - 1e-4)
        ]
        assert sum(s * b for s, b in zip(sizes, chosen, strict=True)) <= min(feasible, default=4 * sum(sizes))


def test_budgets_at_the_edges() -> None:
    assert choose_bits([], np.empty((0, 7)), uniform_bits=4) == []
    assert choose_bits([10, 10], np.zeros((2, 7)), uniform_bits=4) == [2, 2]
    equal = np.tile(4.0 ** -np.arange(7), (2, 1))
    assert choose_bits([10, 10], equal, uniform_bits=2) == [2, 2]
    for bits, errors in ((9, equal), (4, equal[:1]), (4, equal * np.nan)):
        with pytest.raises(ValueError, match="must be"):
            choose_bits([10, 10], errors, uniform_bits=bits)


def test_chosen_bits_become_rules_by_name() -> None:
    policy = parse_policy("maxmin:4,bucket=64; norm*=fp16")
    tensors = [MODEL[0], TensorInfo("odd[*]name", (100, 100))]
    changed = with_bits(policy, tensors, [4, 6])
    assert [changed.codec(t).spec for t in tensors] == ["maxmin:4,bucket=64,stochastic", "maxmin:6,bucket=64,stochastic"]
    assert parse_policy(changed.spec) == changed
    with pytest.raises(ValueError, match=r"norm\.weight has codec fp16"):
        with_bits(policy, [MODEL[4]], [4])
