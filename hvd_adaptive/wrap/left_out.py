"""Parameters that a script trains and Horovod does not exchange, as they came or were thawed after the optimizer was wrapped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

_IS_TOLD = "_hvd_adaptive_left_out"
_MOST_NAMES = 4


def tell_of_left_out(optimizer: Any, note: Callable[[str], None], *, speaks: bool) -> bool:
    """Warns of such parameters, once for an optimizer: each rank moves them by its own gradients, as with plain Horovod.

    Args:
        optimizer: one that the script has wrapped.
        note: adds a line to the report.
        speaks: this rank writes the warning.

    Returns:
        Whether there are some, the first time.
    """
    exchanged = optimizer._requires_update
    if hasattr(optimizer, _IS_TOLD) or not exchanged:
        return False
    found = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p not in exchanged]
    if not found:
        return False
    setattr(optimizer, _IS_TOLD, True)
    names = [str(optimizer._parameter_names.get(p, tuple(p.shape))) for p in found]
    shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    text = (
        f"Horovod does not exchange the gradients of {len(found)} parameters ({shown}), so the ranks' models drift apart: they "
        "were frozen, or not there yet, when hvd.DistributedOptimizer was made. Make it before you freeze parameters, or make a "
        "new one after you thaw or add some"
    )
    note(text)
    if speaks:
        log.warning("%s", text)
    return True
