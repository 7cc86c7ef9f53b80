"""The outer step: how the sum of the ranks' weighted deltas moves the global model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hvd_adaptive.config import Config

# Momentum that is not set looks back over this part of all updates so far, up to this much momentum:
# benchmarks/records/2026-11-26-outer-horizon.md.
_LOOKS_BACK = 0.2
_MOST_MOMENTUM = 0.95
# Elements a pass works on, so that its three operands stay in the cache of a core. A GPU takes all at once.
_CPU_CHUNK = 1 << 16
# Elements that come from host memory to a GPU at a time.
_HOST_CHUNK = 1 << 22


def cached_parts(whole: slice, device: torch.device) -> Iterator[slice]:
    """Yields the parts of a slice on which to work one after the other: on a CPU such as stay in its cache, else the whole."""
    chunk = _CPU_CHUNK if device.type == "cpu" else max(1, whole.stop - whole.start)
    for start in range(whole.start, whole.stop, chunk):
        yield slice(start, min(start + chunk, whole.stop))


class OuterStep:
    """Applies summed deltas to the global model.

    With d the sum of weighted deltas and v a buffer of the model's size:
    ``none``: w += d. ``momentum`` (arXiv 2110.07029; the paper's w' = sum a_i w_i + gamma (w - w_previous)): v = gamma v + d;
    w += lr v. ``nesterov`` (DiLoCo, arXiv 2311.08105): v = gamma v + d; w += lr (d + gamma v). ``cautious``: Nesterov's for each
    element in which v has the sign of d, and w += d for the others. The mask is that of Cautious Optimizers (arXiv 2411.16085),
    which do not move the others.

    Momentum that is not set follows the run: with u updates in a merge and U in all merges so far, gamma = 1 - 5 u / U, so that
    it looks back over the last fifth of the run, however long rounds are. The first merges add the delta. An lr that is not set
    is sqrt(1 - gamma): a merge of pure noise then moves the model no farther than without momentum, and equal deltas move it
    1 / sqrt(1 - gamma) times as far.

    Products and sums are separate operations: a fused multiply-add rounds differently from one processor to the next, and
    the global model must have the same bits on every rank.

    Args:
        kind: ``none``, ``momentum``, ``nesterov`` or ``cautious``.
        lr: the outer learning rate, > 0; ``none`` takes it as well. None: by the momentum.
        momentum: gamma, in [0, 1). None: by the updates that :meth:`count` is told.
        num_fragments: parts of the model that are merged at different times.
        start: updates of the fastest rank, in whose merges w += d; the outer step begins after them.
    """

    def __init__(
        self,
        kind: str,
        *,
        lr: float | None = 1.0,
        momentum: float | None = 0.0,
        num_fragments: int = 1,
        start: int = 0,
    ) -> None:
        self.kind = kind
        self.lr = lr
        self.momentum = momentum
        self.velocity: dict[torch.dtype, Tensor] = {}
        # Updates of the fastest rank in all merges of each fragment, up to this one. A tensor, to be saved with the velocity.
        self.num_updates = torch.zeros(num_fragments, dtype=torch.float64)
        # That of the merge that begins, of all: the first.
        self._fragment = 0
        self._start = start if kind != "none" else 0
        # Of the merge that begins.
        self._momentum_now = 0.0 if momentum is None else momentum
        self._lr_now = 1.0 if lr is None else lr

    @classmethod
    def of(cls, config: Config, *, start: int = 0, num_fragments: int = 1) -> OuterStep:
        """Returns the outer step of a configuration, in which it is set, beginning after so many updates of the fastest rank."""
        return cls(
            config.outer_step or "none",
            lr=config.outer_learning_rate,
            momentum=config.momentum_of_merges,
            num_fragments=num_fragments,
            start=start,
        )

    @property
    def begun(self) -> bool:
        """Whether merges may do more than to add the deltas."""
        return float(self.num_updates[self._fragment]) >= self._start

    def count(self, num_updates: float, fragment: int | None = None) -> None:
        """Takes note of a merge to come.

        Args:
            num_updates: of the fastest rank since the last merge.
            fragment: what of the model is merged; None: all.
        """
        self._fragment = fragment or 0
        self.num_updates[fragment if fragment is not None else slice(None)] += num_updates
        if self.momentum is None:
            part = num_updates / max(1.0, float(self.num_updates[self._fragment]))
            self._momentum_now = min(max(0.0, 1 - part / _LOOKS_BACK), _MOST_MOMENTUM)

    def velocity_of(self, weights: Tensor) -> Tensor | None:
        """Returns the velocity of a flat model, zeros at first; None for ``none``, and before the outer step begins."""
        if self.kind == "none":
            return None
        velocity = self.velocity.get(weights.dtype)
        if velocity is None:
            # Already now, so that memory that is too small is found at the first merge.
            velocity = self.velocity[weights.dtype] = torch.zeros_like(weights, pin_memory=weights.is_pinned())
        return velocity if self.begun else None

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the velocity by name of its dtype, and the updates so far; empty for ``none``."""
        if self.kind == "none" or not (self.velocity or self.num_updates.any()):
            return {}
        velocity = {str(dtype).removeprefix("torch."): v for dtype, v in self.velocity.items()}
        return velocity | {"num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Tensor], *, device: torch.device) -> None:
        """Takes over a velocity, copied to the weights' device; one that was saved without its updates counts as begun."""
        if self.kind == "none":
            return
        begun = torch.full_like(self.num_updates, float(self._start if state else 0))
        self.num_updates = _of_as_many(state.get("num_updates", begun).cpu(), begun)
        pinned = device.type == "cpu" and torch.cuda.is_available()
        self.velocity = {
            getattr(torch, name): v.to(device, copy=True).pin_memory() if pinned else v.to(device, copy=True)
            for name, v in state.items()
            if name not in ("num_updates", "growth")  # The latter is of older checkpoints.
        }

    def begin(self, fragment: int | None = None) -> None:
        """Begins a merge; call it once before its deltas are applied, which may be in several parts.

        Args:
            fragment: what of the model is merged; None: all.
        """
        self._lr_now, self._fragment = 1.0, fragment or 0
        if not self.begun:
            return
        self._lr_now = math.sqrt(1 - self._momentum_now) if self.lr is None else self.lr

    @torch.no_grad()
    def apply_(self, weights: Tensor, delta: Tensor, parts: Iterable[slice] | None = None) -> None:
        """Moves ``weights`` by ``delta`` in place and overwrites ``delta``.

        Where the weights are in host memory and the delta on a GPU, they and the velocity come to it piece by piece. The bits are
        the same, and this process waits for the last piece.

        Args:
            weights: the flat global model, shape (num_elements,), fp32 or fp64; one tensor a dtype.
            delta: the sum of weighted deltas, same shape and dtype.
            parts: the elements to move, the others stay as they are; None: all.
        """
        velocity = self.velocity_of(weights)
        if weights.device != delta.device:
            self._apply_from_host_(weights, delta, velocity)
            return
        for whole in parts if parts is not None else (slice(0, weights.numel()),):
            for part in cached_parts(whole, weights.device):
                self.move_(weights[part], delta[part], None if velocity is None else velocity[part])

    def _apply_from_host_(self, weights: Tensor, delta: Tensor, velocity: Tensor | None) -> None:
        device, host = delta.device, [weights] if velocity is None else [weights, velocity]
        for start in range(0, weights.numel(), _HOST_CHUNK):
            part = slice(start, start + _HOST_CHUNK)
            staged = [tensor[part].to(device, non_blocking=True) for tensor in host]
            self.move_(staged[0], delta[part], staged[1] if len(staged) > 1 else None)
            for tensor, moved in zip(host, staged, strict=True):
                tensor[part].copy_(moved, non_blocking=True)
        # Checkpoints and comparisons read host memory.
        torch.cuda.current_stream(device).synchronize()

    def move_(self, w: Tensor, d: Tensor, v: Tensor | None) -> None:
        """Moves any elements of the model by their deltas, in place; overwrites the deltas.

        Args:
            w: the elements.
            d: the sum of their weighted deltas, same shape and dtype.
            v: their velocity, None for ``none``.
        """
        if v is not None:
            v.mul_(self._momentum_now).add_(d)
            if self.kind == "cautious":
                # 1 where it moves farther, else 0, of one dtype: on a CPU torch.where and bool masks take several times as long.
                # Not where the velocity begins, or was forgotten since: it has no direction to go on in.
                agrees = (v * d).sign_().clamp_(min=0).mul_(torch.ne(v, d, out=torch.empty_like(v)))
                far = (v * self._momentum_now).add_(d).mul_(self._lr_now)
                w.add_(d.lerp_(far, agrees))
                return
            if self.kind == "momentum":
                d = v if self._lr_now == 1.0 else d.copy_(v)
            else:
                d.add_(v * self._momentum_now)
        if self._lr_now != 1.0:
            d.mul_(self._lr_now)
        w.add_(d)


def _of_as_many(saved: Tensor, like: Tensor) -> Tensor:
    """Returns what was saved of each fragment; of another number of them the first one's for all."""
    return (saved if saved.numel() == like.numel() else saved[:1].expand_as(like)).clone()
