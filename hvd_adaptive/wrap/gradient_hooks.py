"""Hooks of the script that change gradients within backward, before Horovod averages them: see own_gradients.py.

A hook that only looks at gradients, for a log, does no harm. So each is watched as it runs, in every step.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adaptive.wrap.tensors import tensors_in

_OWN = "hvd_adaptive."


def intercept_gradient_hooks(tell: Callable[[], None], looks_closely: Callable[[], bool]) -> None:
    """Replaces the methods by which hooks on gradients are registered.

    Args:
        tell: called when a hook of the script has changed a gradient.
        looks_closely: whether it is to be seen by the values, too, as a change of ``gradient.data`` does not show otherwise.
    """

    def around(owner: Any, name: str, gradients: Callable[[Any], Any]) -> None:
        register = getattr(owner, name)

        @functools.wraps(register)
        def registers(self: Any, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
            # A mode of torch's functions calls this again, with what it was given.
            if not (isinstance(hook, _Watched) or _is_own(hook)):
                hook = _Watched(hook, gradients, tell, looks_closely)
            return register(self, hook, *args, **options)

        setattr(owner, name, registers)

    around(Tensor, "register_hook", lambda args: args)
    around(Tensor, "register_post_accumulate_grad_hook", lambda args: [args[0].grad])
    for name in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"):
        around(nn.Module, name, lambda args: args[1:])


def _is_own(hook: Any) -> bool:
    """Whether a hook is this package's."""
    while isinstance(hook, functools.partial):
        # Whose own module is always functools.
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OWN)


class _Watched:
    """A hook of the script, watched. A model that holds it can be saved and copied: without us, and with a hook of its own.

    Args:
        hook: the script's.
        gradients: takes the gradients from its arguments.
        tell: see :func:`intercept_gradient_hooks`.
        looks_closely: see there.
    """

    def __init__(
        self,
        hook: Callable[..., Any],
        gradients: Callable[[Any], Any],
        tell: Callable[[], None],
        looks_closely: Callable[[], bool],
    ) -> None:
        self._hook = hook
        self._gradients = gradients
        self._tell = tell
        self._looks_closely = looks_closely

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._hook,)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        return _Watched(copy.deepcopy(self._hook, memo), self._gradients, self._tell, self._looks_closely)

    def __call__(self, *args: Any) -> Any:
        given = list(tensors_in(self._gradients(args)))
        versions = [tensor._version for tensor in given]
        closely = self._looks_closely()
        values = [tensor.clone() for tensor in given if tensor.layout == torch.strided] if closely else []
        result = self._hook(*args)
        now = list(tensors_in(self._gradients(args)))
        known = {id(tensor) for tensor in given}
        is_other = any(id(tensor) not in known for tensor in (*now, *tensors_in([result]))) or len(now) != len(given)
        strided = [tensor for tensor in given if tensor.layout == torch.strided] if closely else []
        if (
            is_other
            or [tensor._version for tensor in given] != versions
            or any(_differ(before, after) for before, after in zip(values, strided, strict=True))
        ):
            self._tell()
        return result


@torch.no_grad()
def _differ(before: Tensor, after: Tensor) -> bool:
    return not bool(((before == after) | (before.isnan() & after.isnan())).all())
