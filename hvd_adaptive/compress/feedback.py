"""Error feedback: what a codec loses is added to what it encodes next (arXiv 1809.07599, 1901.09847)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class ErrorFeedback:
    """The residuals of one rank: what it lost as a worker, and as the owner of a shard of the sum. They are fp32.

    Residuals are kept after weighting, so that what was lost is not weighted again while weights change.

    Args:
        on_host: residuals of a GPU's values stay in pinned host memory, and come to it part by part.
    """

    def __init__(self, *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._residuals: dict[str, Tensor] = {}
        self._streams: set[torch.cuda.Stream] = set()

    @contextmanager
    def lent(self, name: str, num_elements: int, device: torch.device, part: slice | None = None) -> Iterator[Tensor]:
        """Lends a part of the residual of that name, zeros where there is none yet. What the block leaves in it stays.

        Args:
            name: of the exchange and its side.
            num_elements: of the whole residual.
            device: where the block needs it.
            part: of the residual; None: all.

        Raises:
            RuntimeError: if the residual has another size: what is exchanged has changed without a reset.
        """
        home = torch.device("cpu") if self._on_host else device
        found = self._residuals.get(name)
        if found is None:
            found = torch.zeros(num_elements, dtype=torch.float32, device=home, pin_memory=home != device)
        elif found.device != home or (home != device and not found.is_pinned()):
            # From a checkpoint.
            found = found.pin_memory() if home != device else found.to(home)
        self._residuals[name] = found
        if found.numel() != num_elements:
            raise RuntimeError(
                f"the residual {name!r} has {found.numel()} elements, but the exchange now has {num_elements}: "
                "call reset() when ranks, codecs or tensors change"
            )
        kept = found if part is None else found[part]
        if home == device:
            yield kept
            return
        staged = kept.to(device, non_blocking=True)
        yield staged
        kept.copy_(staged, non_blocking=True)
        self._streams.add(torch.cuda.current_stream(device))

    def reset(self) -> None:
        """Forgets all residuals: when the number of ranks, the codecs or the tensors change."""
        self._wait()
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of this rank by name; they differ from rank to rank."""
        self._wait()
        return dict(self._residuals)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the residuals by those of `state_dict`."""
        self._wait()
        self._residuals = {name: value.clone() for name, value in state.items()}

    def _wait(self) -> None:
        # The host reads or frees memory that copies may still be on their way to.
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()
