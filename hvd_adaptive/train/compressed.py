"""Deltas that cross the wire encoded: ``Config.compression`` put to work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.compress.codec import Codec
from hvd_adaptive.compress.policy import Policy, TensorInfo, parse_policy
from hvd_adaptive.config import Config
from hvd_adaptive.exchange.exchange import Exchange
from hvd_adaptive.transport.base import AgreedError, Transport


def check_compression(config: Config) -> Policy:
    """Returns the policy that a configuration names.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        return parse_policy(config.compression)
    except ValueError as error:
        raise ValueError(f"compression: {error}") from None


class CompressedSum:
    """Sums weighted deltas over ranks in encoded form, in place of ``Transport.allreduce_sum_``. Construction is COLLECTIVE.

    What a codec loses is added to the next round's delta (``Config.error_feedback``): one more copy of the parameters.

    Args:
        config: policy, reducer, error feedback and seed.
        transport: the world.
        names: of all trainable parameters, with their shapes.

    Raises:
        AgreedError: on all ranks, for a policy that cannot be read or names no parameter.
    """

    def __init__(self, config: Config, transport: Transport, names: Sequence[TensorInfo]) -> None:
        try:
            policy = check_compression(config)
            policy.check(names)
        except ValueError as error:
            # Every rank has the same configuration and model, so every rank is here.
            raise AgreedError(str(error)) from None
        self._exchange = Exchange(
            transport, policy, reducer=config.reducer, error_feedback=config.error_feedback, seed=config.seed
        )
        self._num_rounds = 0
        for codec in {policy.codec(tensor) for tensor in names}:
            _compile(codec)

    def begin_round(self) -> None:
        """Gives the round random numbers of its own."""
        self._num_rounds += 1

    def sum_(self, flat: Tensor, name: str, tensors: Sequence[TensorInfo]) -> int:
        """Replaces a rank's weighted values by their sum over ranks, the same bits everywhere. COLLECTIVE.

        Args:
            flat: one dimension, changed in place.
            name: of the group of tensors.
            tensors: what is in it, in order.

        Returns:
            Bytes of this rank's values in encoded form.
        """
        self._exchange.sum_(flat, name, step=self._num_rounds, tensors=tensors)
        if self._exchange.reducer(name) == "none":
            return flat.numel() * flat.element_size()
        return self._exchange.payload_bytes(name)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals and the number of rounds."""
        return {"exchange": self._exchange.state_dict(), "num_rounds": self._num_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state; residuals only where the number of ranks is the same, with a warning else."""
        self._num_rounds = int(state["num_rounds"])
        self._exchange.load_state_dict(state["exchange"])


def _compile(codec: Codec) -> None:
    """Has a codec's kernels compiled, or loaded, which takes seconds, before the first merge."""
    if codec.factor_rank:
        return
    values = torch.zeros(codec.granularity)
    payload = torch.empty(codec.payload_bytes(values.numel()), dtype=torch.uint8)
    codec.encode_(values, payload, key=0)
    for add in (0, 1, -1):
        codec.decode_(payload, values, add=add)
