"""The outer step: how the sum of the ranks' weighted deltas moves the global model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

OUTER_STEPS = ("none", "momentum", "nesterov")
# Elements a pass works on, so that its three operands stay in the cache of a core. A GPU takes all at once.
_CPU_CHUNK = 1 << 16


class OuterStep:
    """Applies summed deltas to the global model.

    With d the sum of weighted deltas and v a buffer of the model's size:
    ``none``: w += d. ``momentum`` (arXiv 2110.07029; the paper's w' = sum a_i w_i + gamma (w - w_previous)): v = gamma v + d;
    w += lr v. ``nesterov`` (DiLoCo, arXiv 2311.08105): v = gamma v + d; w += lr (d + gamma v).

    Products and sums are separate operations: a fused multiply-add rounds differently from one processor to the next, and
    the global model must have the same bits on every rank.

    Args:
        kind: ``none``, ``momentum`` or ``nesterov``.
        lr: the outer learning rate, > 0; ``none`` takes it as well.
        momentum: gamma, in [0, 1).

    Raises:
        ValueError: for an unknown kind.
    """

    def __init__(self, kind: str, *, lr: float = 1.0, momentum: float = 0.0) -> None:
        if kind not in OUTER_STEPS:
            raise ValueError(f"outer step must be one of {', '.join(OUTER_STEPS)}, got {kind!r}")
        self.kind = kind
        self.lr = lr
        self.momentum = momentum
        self.velocity: dict[torch.dtype, Tensor] = {}

    def velocity_of(self, weights: Tensor) -> Tensor | None:
        """Returns the velocity of a flat model, zeros at first; None for ``none``."""
        if self.kind == "none":
            return None
        velocity = self.velocity.get(weights.dtype)
        if velocity is None:
            velocity = self.velocity[weights.dtype] = torch.zeros_like(weights)
        return velocity

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the velocity by name of its dtype; empty before the first step that has one."""
        return {str(dtype).removeprefix("torch."): v for dtype, v in self.velocity.items()}

    def load_state_dict(self, state: dict[str, Tensor], *, device: torch.device) -> None:
        """Takes over a velocity, copied to the weights' device."""
        self.velocity = {getattr(torch, name): v.to(device, copy=True) for name, v in state.items()}

    @torch.no_grad()
    def apply_(self, weights: Tensor, delta: Tensor, parts: Iterable[slice] | None = None) -> None:
        """Moves ``weights`` by ``delta`` in place and overwrites ``delta``.

        Args:
            weights: the flat global model, shape (num_elements,), fp32 or fp64; one tensor a dtype.
            delta: the sum of weighted deltas, same shape and dtype.
            parts: the elements to move, the others stay as they are; None: all.
        """
        velocity = self.velocity_of(weights)
        chunk = _CPU_CHUNK if weights.device.type == "cpu" else max(1, weights.numel())
        for whole in parts if parts is not None else (slice(0, weights.numel()),):
            for start in range(whole.start, whole.stop, chunk):
                part = slice(start, min(start + chunk, whole.stop))
                self.move_(weights[part], delta[part], None if velocity is None else velocity[part])

    def move_(self, w: Tensor, d: Tensor, v: Tensor | None) -> None:
        """Moves any elements of the model by their deltas, in place; overwrites the deltas.

        Args:
            w: the elements.
            d: the sum of their weighted deltas, same shape and dtype.
            v: their velocity, None for ``none``.
        """
        if v is not None:
            v.mul_(self.momentum).add_(d)
            if self.kind == "momentum":
                d = v if self.lr == 1.0 else d.copy_(v)
            else:
                d.add_(v * self.momentum)
        if self.lr != 1.0:
            d.mul_(self.lr)
        w.add_(d)
