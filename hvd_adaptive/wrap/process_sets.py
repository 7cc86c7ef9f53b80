"""Optimizers that reduce over a process set: some ranks may have none, so in their steps the ranks exchange nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_adaptive.wrap.reasons import Reason


def is_over_set(optimizer: Any) -> bool:
    """Whether a wrapped optimizer reduces over a process set of its own."""
    import horovod.torch as hvd

    return getattr(optimizer, "process_set", hvd.global_process_set) is not hvd.global_process_set


class Refusal:
    """Whether optimizers run as in plain Horovod, on all ranks alike.

    Args:
        reasons: what this rank knows against it. A process set's optimizer may be on some ranks only.
        refuse: takes note of a reason that another rank knows.
        world_size: returns the number of ranks.
    """

    def __init__(self, reasons: set[Reason], refuse: Callable[[Reason], None], world_size: Callable[[], int]) -> None:
        self._reasons = reasons
        self._refuse = refuse
        self._world_size = world_size

    @property
    def is_known(self) -> bool:
        """Whether every rank knows of a reason by itself."""
        return bool(self._against - {Reason.PROCESS_SET})

    def agree(self) -> bool:
        """Returns whether any rank knows of a reason. COLLECTIVE."""
        if self._world_size() == 1 or self.is_known:
            return bool(self._against)
        import horovod.torch as hvd

        found = torch.tensor([float(Reason.PROCESS_SET in self._reasons)])
        # A sum, as it works beside ranks that have joined.
        if float(hvd.allreduce(found, name="hvd_adaptive.refused", op=hvd.Sum)) and Reason.PROCESS_SET not in self._reasons:
            self._refuse(Reason.PROCESS_SET)
        return bool(self._against)

    @property
    def _against(self) -> set[Reason]:
        # A join keeps shares equal, which only ranks with steps beside it know of; later optimizers go on after it.
        return self._reasons - {Reason.JOIN}
