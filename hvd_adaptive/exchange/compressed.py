"""Options put to work: a model's deltas or gradients summed in encoded form, whoever asks for it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.comm.protocols import AgreedError, Collectives
from hvd_adaptive.compress.codec import Codec, compile_kernels
from hvd_adaptive.compress.low_rank import PowerSgd
from hvd_adaptive.compress.policy import Policy, TensorInfo, parse_policy
from hvd_adaptive.compress.quantize import Normal
from hvd_adaptive.compress.sparsify import TopK
from hvd_adaptive.config import Config
from hvd_adaptive.exchange.auto_bits import BitChooser
from hvd_adaptive.exchange.exchange import Exchange, misfit
from hvd_adaptive.exchange.pipeline import Task, run_pipeline

log = logging.getLogger(__name__)


def check_compression(options: Config) -> Policy:
    """Returns the policy that the options name.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        return parse_policy("none" if options.compression == "auto" else options.compression)
    except ValueError as error:
        raise ValueError(f"compression: {error}") from None


class CompressedSum:
    """Sums weighted values over ranks in encoded form, in place of ``Collectives.allreduce_sum_``. Construction is COLLECTIVE.

    What a codec loses is added to the next round's values (``error_feedback``): one more copy of the parameters.

    Args:
        options: policy, reducer, error feedback and seed.
        transport: the world.
        names: of all trainable parameters, with their shapes.
        devices: where they are: the codecs' kernels are compiled for these now.
        auto_bits: rounds between two choices of bits for each layer (:class:`BitChooser`); 0: never.
        residuals_on_host: what codecs lose is kept in host memory.

    Raises:
        AgreedError: on all ranks, for a policy that cannot be read, names no parameter, or has a codec that cannot go with the
            reducer or with ``auto_bits``.
    """

    def __init__(
        self,
        options: Config,
        transport: Collectives,
        names: Sequence[TensorInfo],
        *,
        devices: Iterable[torch.device],
        auto_bits: int = 0,
        residuals_on_host: bool = False,
    ) -> None:
        self._names = list(names)
        self._transport = transport
        self._reducer = options.reducer
        self._auto_bits = auto_bits
        self._tensors: dict[str, list[TensorInfo]] = {}
        policy = self._checked(options)
        self._exchange = Exchange(
            transport,
            policy,
            reducer=options.reducer,
            error_feedback=options.error_feedback,
            residuals_on_host=residuals_on_host,
            seed=options.seed,
        )
        self._num_rounds = 0
        self._error_feedback = options.error_feedback
        needy = next((c for c in map(policy.codec, self._names) if isinstance(c, (Normal, TopK, PowerSgd))), None)
        if needy is not None and not options.error_feedback and transport.speaks:
            log.warning("compression: %s loses accuracy without error feedback; leave error_feedback on", needy.spec)
        self._devices = set(devices)
        self._compiled: set[tuple[Codec, torch.device]] = set()
        self._compile()

    @property
    def policy(self) -> Policy:
        """The codec of each tensor."""
        return self._exchange.policy

    def begin_round(self) -> bool:
        """Gives the round random numbers of its own. COLLECTIVE with ``auto_bits``.

        Returns:
            Whether the policy has changed, with which residuals are forgotten.
        """
        self._num_rounds += 1
        policy = None if self._chooser is None else self._chooser.choose(self._transport)
        if policy is None or policy.spec == self.policy.spec:
            return False
        self._set_policy(policy)
        return True

    def set_codec(self, codec: str) -> None:
        """Encodes all tensors otherwise from now on, and forgets residuals. COLLECTIVE, while nothing is on the way."""
        self._set_policy(parse_policy(codec))

    def _set_policy(self, policy: Policy) -> None:
        self._exchange.set_policy(policy)
        self._compile()

    def sum_(self, flat: Tensor, name: str, tensors: Sequence[TensorInfo], *, weight: float = 1.0) -> int:
        """Replaces values times this rank's weight by their sum over ranks, the same bits everywhere. COLLECTIVE.

        Args:
            flat: one dimension, changed in place.
            name: of the group of tensors.
            tensors: what is in it, in order.
            weight: this rank's, > 0.

        Returns:
            Bytes of this rank's values in encoded form.
        """
        self.prepare(flat, name, tensors)
        run_pipeline(self.tasks(flat, name, weight=weight))
        return self.payload_bytes(name)

    def prepare(self, flat: Tensor, name: str, tensors: Sequence[TensorInfo]) -> None:
        """See :meth:`Exchange.prepare`. COLLECTIVE."""
        self._tensors[name] = list(tensors)
        self._exchange.prepare(flat, name, tensors)

    def tasks(self, flat: Tensor, name: str, *, weight: float = 1.0) -> list[Task]:
        """Returns what `sum_` does as tasks, for a group that `prepare` knows; see :meth:`Exchange.tasks`."""
        if self._chooser is not None and self._transport.world_size > 1 and self._chooser.is_due(self._num_rounds):
            if weight != 1.0:
                flat.mul_(weight)
            weight = 1.0
            self._chooser.measure(flat, self._tensors[name])
        return self._exchange.tasks(flat, name, step=self._num_rounds, weight=weight)

    def payload_bytes(self, name: str) -> int:
        """Returns the bytes of a rank's values of that group in encoded form."""
        return self._exchange.payload_bytes(name)

    def reset(self) -> None:
        """Forgets residuals."""
        self._exchange.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals and the number of rounds."""
        return {"exchange": self._exchange.state_dict(), "num_rounds": self._num_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state; residuals only where the number of ranks is the same, with a warning else.

        By this rank alone, as a state may be damaged on one rank only. Policy and number of rounds must be the same on all.

        Raises:
            ValueError: for a policy that cannot be read, or does not go with these tensors.
        """
        if self._chooser is not None:
            policy = parse_policy(state["exchange"]["policy"])
            policy.check(self._names)
            if (reason := misfit(policy, self._reducer, self._names)) is not None:
                raise ValueError(reason)
            self._exchange.take_policy(policy)
            self._compile()
        self._num_rounds = int(state["num_rounds"])
        self._exchange.load_state_dict(state["exchange"])

    def _checked(self, options: Config) -> Policy:
        try:
            policy = check_compression(options)
            policy.check(self._names)
            self._chooser = BitChooser(policy, self._auto_bits) if self._auto_bits else None
        except ValueError as error:
            # Every rank has the same options and model, so every rank is here.
            raise AgreedError(str(error)) from None
        if (reason := misfit(policy, self._reducer, self._names)) is not None:
            raise AgreedError(reason)
        return policy

    def _compile(self) -> None:
        """Has the codecs' kernels compiled, or loaded, which takes seconds, before the first step."""
        codecs = {self.policy.codec(tensor) for tensor in self._names}
        if self._chooser is not None:
            codecs.update(self._chooser.candidates())
        for codec, device in set(itertools.product(codecs, self._devices)) - self._compiled:
            self._compiled.add((codec, device))
            compile_kernels(codec, device, error_feedback=self._error_feedback)
