"""Strategy ``sync`` with compression: a script's gradients cross the wire encoded, in place of Horovod's own exchange."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.exchange.gradients import GradientExchange
from hvd_adaptive.exchange.known_names import KnownNames
from hvd_adaptive.wrap.run_options import BadOptions, RunConfig

_EXCHANGE = "_hvd_adaptive_exchange"


@dataclass
class _Sent:
    """What the report tells of an optimizer, also when it is gone: its steps, their bytes, and those of a step without codec."""

    num_steps: int = 0
    payload_bytes: int = 0
    dense_bytes: int = 0


@dataclass
class _Owner:
    """What is known of one optimizer; ``exchange`` is None until its first step."""

    sent: _Sent
    exchange: GradientExchange | None = None


class EncodedGradients:
    """The optimizers of a script whose gradients are exchanged encoded.

    Args:
        config: the options.
        make_world: makes the world of all ranks, once Horovod runs.
    """

    def __init__(self, config: RunConfig, make_world: Callable[[], Collectives]) -> None:
        self._config = config
        self._make_world = make_world
        self._names = KnownNames()
        # Of each optimizer that has begun.
        self._sent: list[_Sent] = []

    def registered(self, optimizer: Any) -> None:
        """Takes over an optimizer that the script has wrapped."""
        setattr(optimizer, _EXCHANGE, _Owner(_Sent()))
        self._names.add(_parameters(optimizer))

    def joining(self) -> None:
        """The script calls hvd.join().

        Raises:
            RuntimeError: if a step's gradients were exchanged here.
        """
        if self._sent:
            raise RuntimeError(
                "hvd.join() does not go with --compression in strategy sync: encoded gradients need every rank in every step. "
                "Run the script without --compression, or with its own compression=hvd.Compression.fp16"
            )

    def exchanges(self, optimizer: Any) -> bool:
        """Whether an optimizer's gradients are exchanged here, as far as is known now."""
        return hasattr(optimizer, _EXCHANGE)

    def passes_set(self, optimizer: Any) -> None:
        """The script has changed an optimizer's ``backward_passes_per_step``."""
        owner: _Owner | None = getattr(optimizer, _EXCHANGE, None)
        if owner is not None and owner.exchange is not None:
            owner.exchange.set_backward_passes_per_step(optimizer.backward_passes_per_step)

    def synchronize(
        self, optimizer: Any, *, refused: Callable[[], bool], tell: Callable[[], None] = lambda: None
    ) -> bool:
        """Waits until the gradients are those of all ranks. COLLECTIVE.

        Args:
            optimizer: whose gradients.
            refused: at the first step, whether something of the script forbids it. COLLECTIVE.
            tell: is called if so.

        Returns:
            False if Horovod exchanges this optimizer's gradients, from now on.

        Raises:
            BadOptions: on all ranks, at the first step, for a pattern that is no parameter's.
            AgreedError: on all ranks, at the first step, for codecs that do not fit the reducer.
        """
        owner: _Owner | None = getattr(optimizer, _EXCHANGE, None)
        if owner is None:
            return False
        if owner.exchange is None:
            if refused():
                delattr(optimizer, _EXCHANGE)
                tell()
                return False
            owner.exchange = self._begin(optimizer)
            owner.sent.dense_bytes = owner.exchange.dense_bytes
            self._sent.append(owner.sent)
        owner.exchange.synchronize()
        owner.sent.num_steps += 1
        owner.sent.payload_bytes = owner.exchange.payload_bytes
        return True

    def lines(self) -> list[str]:
        """Returns what was sent, for the report."""
        begun = [sent for sent in self._sent if sent.num_steps]
        if not begun:
            return []
        # A script's steps are one of each optimizer, as a rule.
        payload = sum(sent.payload_bytes / sent.num_steps for sent in begun)
        dense = sum(sent.dense_bytes for sent in begun)
        step = "a step" if len(begun) == 1 else f"for a step of each of {len(begun)} optimizers"
        return [
            f"  gradients: encoded as {self._config.compression!r}, reducer {self._config.reducer}: {payload / 1e6:.3g} MB "
            f"{step} in place of {dense / 1e6:.3g} MB"
        ]

    def _begin(self, optimizer: Any) -> GradientExchange:
        import horovod.torch as hvd

        # Also those that are frozen now, but were not when the optimizer was wrapped: Horovod exchanges these in every step.
        named = [(n, p) for n, p in _parameters(optimizer) if p.requires_grad or p in optimizer._requires_update]
        optimizer._requires_update.update(p for _, p in named)
        try:
            compression = self._names.policy_for(self._config.compression, named)
        except ValueError as error:
            raise BadOptions(str(error)) from None
        exchange = GradientExchange(
            named,
            dataclasses.replace(self._config.merging(), compression=compression),
            self._make_world(),
            backward_passes=optimizer.backward_passes_per_step,
            average=optimizer.op == hvd.Average,
            # Those of several optimizers may be under way at once. Every rank has them in one order.
            name=f"gradients{len(self._sent)}",
            with_frozen=True,
        )
        # Its hooks on parameters that go on without this optimizer would keep it.
        weakref.finalize(optimizer, exchange.remove).atexit = False
        return exchange


def _parameters(optimizer: Any) -> list[tuple[str, Any]]:
    """An optimizer's parameters by name; of those that came after it was wrapped, by their place."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(optimizer._parameter_names.get(p, f"parameter.{place}"), p) for place, p in enumerate(parameters)]
