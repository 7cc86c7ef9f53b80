"""torch's modules, intercepted in place: when a script is about to validate or to save, and when it has loaded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hvd_adaptive.wrap.wrapped_run import Engine


def intercept_modules(listener: Engine) -> None:
    """Replaces four methods of torch's module class."""
    train, state_dict, load_state_dict = nn.Module.train, nn.Module.state_dict, nn.Module.load_state_dict
    set_state = nn.Module.__setstate__

    @functools.wraps(train)
    def train_(self: Any, mode: bool = True) -> Any:
        if not mode and self.training:
            listener.looked_at("eval()", self)
        return train(self, mode)

    @functools.wraps(state_dict)
    def state_dict_(self: Any, *args: Any, **options: Any) -> Any:
        # Its parts' are called with where to put it.
        if not args and options.get("destination") is None:
            listener.looked_at("state_dict()", self)
        return state_dict(self, *args, **options)

    @functools.wraps(load_state_dict)
    def load_state_dict_(self: Any, *args: Any, **options: Any) -> Any:
        result = load_state_dict(self, *args, **options)
        listener.loaded(self)
        return result

    @functools.wraps(set_state)
    def setstate_(self: Any, state: Any) -> None:
        # By copy.deepcopy, as torch's AveragedModel does it.
        set_state(self, state)
        listener.copied(self)

    nn.Module.__setstate__ = setstate_  # type: ignore[method-assign]
    nn.Module.load_state_dict = load_state_dict_  # type: ignore[method-assign]
    nn.Module.train, nn.Module.state_dict = train_, state_dict_  # type: ignore[method-assign]
