"""Bits for each layer under one error budget: fewer bytes than uniform bits at no larger error (L-GreCo, arXiv 2210.17357)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_adaptive.compress.codec import Codec, decode, encode
from hvd_adaptive.compress.policy import Policy, Rule, TensorInfo
from hvd_adaptive.compress.quantize import MaxMin

WIDTHS = tuple(range(2, 9))
_RESOLUTION = 4096


def error_curve(values: Tensor, *, bucket: int = 512, rounding: str = "stochastic", key: int = 0) -> NDArray[np.float64]:
    """Measures what max-min codes lose of a tensor, as squared L2 errors.

    Args:
        values: of one layer: a gradient or a delta.
        bucket: of the code.
        rounding: of the code.
        key: of the random numbers.

    Returns:
        One error for each of `WIDTHS`, shape (7,), made non-increasing: more bits never count as worse.
    """
    values = values.detach().reshape(-1).to(torch.float32)
    errors = []
    for bits in WIDTHS:
        codec = MaxMin(bits, bucket, rounding)
        lost = decode(codec, encode(codec, values, key=key), values.numel()) - values
        errors.append(float(lost.double().square().sum()))
    return np.minimum.accumulate(np.array(errors))


def choose_bits(
    sizes: Sequence[int], errors: NDArray[np.float64], *, uniform_bits: int, resolution: int = _RESOLUTION
) -> list[int]:
    """Chooses each layer's bits so that all need fewest bytes, at an error no larger than uniform bits have.

    A dynamic programme over layers and error spent, as in the paper; the error is counted in steps of 1/resolution of the
    budget, rounded up, so that the budget holds; where rounding leaves nothing better, the uniform bits are returned.

    Args:
        sizes: elements of each layer, shape (num_layers,).
        errors: `error_curve` of each layer, shape (num_layers, 7); finite.
        uniform_bits: the budget is the summed error of this width for all layers, in `WIDTHS`.
        resolution: number of error steps.

    Returns:
        Bits of each layer, each in `WIDTHS`.

    Raises:
        ValueError: if the width is not in `WIDTHS`, shapes do not match or an error is not finite.
    """
    errors = np.asarray(errors, dtype=np.float64)
    if uniform_bits not in WIDTHS:
        raise ValueError(f"uniform_bits must be in [{WIDTHS[0]}, {WIDTHS[-1]}], got {uniform_bits}")
    if errors.shape != (len(sizes), len(WIDTHS)) or not np.isfinite(errors).all():
        raise ValueError(f"errors must be finite, of shape ({len(sizes)}, {len(WIDTHS)}), got {errors.shape}")
    uniform = [uniform_bits] * len(sizes)
    budget = float(errors[:, uniform_bits - WIDTHS[0]].sum())
    if not sizes or budget == 0:
        # Nothing is lost at that width; the same holds for each layer by itself.
        return [WIDTHS[int(np.argmax(row <= 0))] for row in errors] if len(sizes) else []
    steps = np.ceil(errors * (resolution / budget) * (1 - 1e-12)).astype(np.float64)
    # least[s]: fewest bytes of the layers so far with error of at most s steps.
    least = np.zeros(resolution + 1)
    choices = np.zeros((len(sizes), resolution + 1), dtype=np.int8)
    for layer, size in enumerate(sizes):
        following = np.full(resolution + 1, np.inf)
        for index, bits in enumerate(WIDTHS):
            spent = steps[layer, index]
            if spent > resolution:
                continue
            shift = int(spent)
            cost = np.full(resolution + 1, np.inf)
            cost[shift:] = least[: resolution + 1 - shift] + size * bits / 8
            better = cost < following
            following[better] = cost[better]
            choices[layer, better] = index
        least = following
    if not least[resolution] < sum(sizes) * uniform_bits / 8:
        return uniform
    chosen, left = [], resolution
    for layer in reversed(range(len(sizes))):
        index = int(choices[layer, left])
        chosen.append(WIDTHS[index])
        left -= int(steps[layer, index])
    return chosen[::-1]


def with_bits(policy: Policy, tensors: Sequence[TensorInfo], bits: Sequence[int]) -> Policy:
    """Returns the policy with a rule in front for each tensor whose max-min code gets another number of bits.

    Args:
        policy: as it is.
        tensors: the layers that `choose_bits` was asked about, shape (num_layers,).
        bits: its answer.

    Raises:
        ValueError: if the policy gives one of the tensors a codec other than max-min.
    """
    rules = []
    for tensor, width in zip(tensors, bits, strict=True):
        codec: Codec = policy.codec(tensor)
        if not isinstance(codec, MaxMin):
            raise ValueError(f"bits can be chosen for maxmin only, but {tensor.name} has codec {codec.spec}")
        if codec.bits != width:
            name = "".join(f"[{char}]" if char in "*?[" else char for char in tensor.name)
            rules.append(Rule(name, MaxMin(width, codec.bucket, codec.rounding)))
    return Policy(policy.default, (*rules, *policy.rules))
