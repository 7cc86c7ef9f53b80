"""Error feedback: what a codec loses is added to what it encodes next (arXiv 1809.07599, 1901.09847)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ErrorFeedback:
    """The residuals of one rank: what it lost as a worker, and as the owner of a shard of the sum.

    Residuals are kept after weighting, so that what was lost is not weighted again while weights change.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}

    def residual(self, name: str, like: Tensor) -> Tensor:
        """Returns the residual of that name, zeros where there is none yet.

        Args:
            name: of the exchange and its side.
            like: a tensor of the residual's shape, type and device.

        Raises:
            RuntimeError: if the residual has another shape: what is exchanged has changed without a reset.
        """
        found = self._residuals.get(name)
        if found is None:
            found = self._residuals[name] = torch.zeros_like(like)
        if found.shape != like.shape:
            raise RuntimeError(
                f"the residual {name!r} has shape {tuple(found.shape)}, but the exchange now has {tuple(like.shape)}: "
                "call reset() when ranks, codecs or tensors change"
            )
        return found

    def reset(self) -> None:
        """Forgets all residuals: when the number of ranks, the codecs or the tensors change."""
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of this rank by name; they differ from rank to rank."""
        return dict(self._residuals)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the residuals by those of `state_dict`."""
        self._residuals = {name: value.clone() for name, value in state.items()}
