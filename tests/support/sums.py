"""How far sums over ranks may be from the exact ones, by codec."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative errors of one exchange of normal values by up to 4 ranks: a tenth to a half more than the largest measured.
BOUNDS = {
    "none": 1e-6, "fp16": 6e-4, "bf16": 3.5e-3, "maxmin:8": 0.018, "maxmin:4": 0.3, "maxmin:3,nearest": 0.43,
    "maxmin:1": 7.0, "normal:2": 0.55, "topk:0.1": 0.93,
}  # fmt: skip
SPECS = list(BOUNDS)


def assert_near(found: Tensor, exact: Tensor, spec: str) -> float:
    """Compares a sum with the exact one, float64; returns its relative error."""
    error = float((found.double() - exact).norm() / exact.norm())
    assert error <= BOUNDS[spec] + torch.finfo(found.dtype).eps / 2, (spec, found.dtype, error)
    # A sum of zeros has an error of 1, which maxmin:1 exceeds; its correlation with the exact sum is 0.16 at least.
    correlation = float(torch.nn.functional.cosine_similarity(found.double(), exact, 0))
    assert correlation > 0.1, (spec, found.dtype, correlation)
    return error
