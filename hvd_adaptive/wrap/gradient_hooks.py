"""Hooks of the script that change gradients within backward, before Horovod averages them: see own_gradients.py.

A hook that only looks at gradients, for a log, does no harm. So each is watched as it runs, in every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.wrap.tensors import tensors_in

_IS_WATCHED = "_hvd_adaptive_is_watched"
_OWN = "hvd_adaptive."


def intercept_gradient_hooks(tell: Callable[[], None], looks_closely: Callable[[], bool]) -> None:
    """Replaces the methods by which hooks on gradients are registered.

    Args:
        tell: called when a hook of the script has changed a gradient.
        looks_closely: whether it is to be seen by the values, too, as a change of ``gradient.data`` does not show otherwise.
    """
    _around(Tensor, "register_hook", lambda args: args, tell, looks_closely)
    _around(Tensor, "register_post_accumulate_grad_hook", lambda args: [args[0].grad], tell, looks_closely)
    for name in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"):
        _around(nn.Module, name, lambda args: args[1:], tell, looks_closely)


def _around(
    owner: Any, name: str, gradients: Callable[[Any], Any], tell: Callable[[], None], looks_closely: Callable[[], bool]
) -> None:
    register = getattr(owner, name)

    @functools.wraps(register)
    def registers(self: Any, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
        # A mode of torch's functions calls this again, with what it was given.
        if not (getattr(hook, _IS_WATCHED, False) or str(getattr(hook, "__module__", "")).startswith(_OWN)):
            hook = _watched(hook, gradients, tell, looks_closely)
        return register(self, hook, *args, **options)

    setattr(owner, name, registers)


def _watched(
    hook: Callable[..., Any], gradients: Callable[[Any], Any], tell: Callable[[], None], looks_closely: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(hook)
    def watched(*args: Any) -> Any:
        given = list(tensors_in(gradients(args)))
        versions = [tensor._version for tensor in given]
        values = [tensor.clone() for tensor in given if tensor.layout == torch.strided] if looks_closely() else []
        result = hook(*args)
        now = list(tensors_in(gradients(args)))
        known = {id(tensor) for tensor in given}
        is_other = any(id(tensor) not in known for tensor in (*now, *tensors_in([result]))) or len(now) != len(given)
        strided = [tensor for tensor in given if tensor.layout == torch.strided] if values else []
        if (
            is_other
            or [tensor._version for tensor in given] != versions
            or any(_differ(before, after) for before, after in zip(values, strided, strict=True))
        ):
            tell()
        return result

    setattr(watched, _IS_WATCHED, True)
    return watched


@torch.no_grad()
def _differ(before: Tensor, after: Tensor) -> bool:
    return not bool(((before == after) | (before.isnan() & after.isnan())).all())
