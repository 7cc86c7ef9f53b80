"""What the patterns of a policy may be for, where several models share it: the optimizers of a Horovod script."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hvd_adaptive.compress.policy import TensorInfo, parse_policy


class KnownNames:
    """The parameters of all optimizers so far. A script with several has rules that are for one of them only."""

    def __init__(self) -> None:
        self._tensors: dict[TensorInfo, None] = {}

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Adds an optimizer's parameters."""
        self._tensors.update(dict.fromkeys(_infos(named)))

    def policy_for(self, compression: str, named: Iterable[tuple[str, Tensor]]) -> str:
        """Returns the rules that are for an optimizer's parameters.

        Args:
            compression: the rules for all of the script.
            named: the optimizer's parameters.

        Raises:
            ValueError: for a policy that cannot be read, or a pattern that is no parameter's of any optimizer so far.
        """
        # "auto" is no codec.
        if ";" not in compression:
            return compression
        policy = parse_policy(compression)
        policy.check(list(self._tensors))
        part = policy.part_for(_infos(named))
        return compression if part == policy else part.spec


def _infos(named: Iterable[tuple[str, Tensor]]) -> list[TensorInfo]:
    return [TensorInfo(name, tuple(parameter.shape)) for name, parameter in named]
