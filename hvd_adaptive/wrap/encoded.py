"""Strategy ``sync`` with compression: a script's gradients cross the wire encoded, in place of Horovod's own exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.exchange.gradients import GradientExchange
from hvd_adaptive.wrap.run_options import RunConfig

_EXCHANGE = "_hvd_adaptive_exchange"


class EncodedGradients:
    """The optimizers of a script whose gradients are exchanged encoded.

    Args:
        config: the options.
        make_world: makes the world of all ranks, once Horovod runs.
    """

    def __init__(self, config: RunConfig, make_world: Callable[[], Collectives]) -> None:
        self._config = config
        self._make_world = make_world
        self._num_steps = 0
        self._num_exchanges = 0
        # The newest exchange, what it has sent, and its steps.
        self._last: weakref.ref[GradientExchange] | None = None
        self._payload_bytes = 0
        self._dense_bytes = 0

    def registered(self, optimizer: Any) -> None:
        """Takes over an optimizer that the script has wrapped."""
        setattr(optimizer, _EXCHANGE, None)

    @property
    def is_used(self) -> bool:
        """Whether a step's gradients were exchanged here."""
        return self._last is not None

    def exchanges(self, optimizer: Any) -> bool:
        """Whether an optimizer's gradients are exchanged here, as far as is known now."""
        return hasattr(optimizer, _EXCHANGE)

    def synchronize(self, optimizer: Any, *, refused: bool, average: bool) -> bool:
        """Waits until the gradients are those of all ranks. COLLECTIVE.

        Args:
            optimizer: whose gradients.
            refused: something of the script forbids it.
            average: the gradients are averaged, else added up.

        Returns:
            False if Horovod exchanges this optimizer's gradients, from now on.

        Raises:
            AgreedError: on all ranks, at the first step, for codecs that do not fit the model.
        """
        exchange: GradientExchange | None = getattr(optimizer, _EXCHANGE)
        if exchange is None:
            if refused:
                delattr(optimizer, _EXCHANGE)
                return False
            names = optimizer._parameter_names
            named = [(names[p], p) for group in optimizer.param_groups for p in group["params"]]
            exchange = GradientExchange(
                named,
                self._config.merging(),
                self._make_world(),
                backward_passes=optimizer.backward_passes_per_step,
                average=average,
                # Those of several optimizers may be under way at once. Every rank has them in one order.
                name=f"gradients{self._num_exchanges}",
            )
            self._num_exchanges += 1
            setattr(optimizer, _EXCHANGE, exchange)
            self._dense_bytes = sum(p.numel() * p.element_size() for _, p in named if p.requires_grad)
            self._last, self._num_steps = weakref.ref(exchange), 0
            # Its hooks on parameters that go on without this optimizer would keep it.
            weakref.finalize(optimizer, exchange.remove).atexit = False
        exchange.synchronize()
        if self._last is not None and self._last() is exchange:
            self._num_steps += 1
            self._payload_bytes = exchange.payload_bytes
        return True

    def lines(self) -> list[str]:
        """Returns what was sent, for the report."""
        if self._last is None or not self._num_steps:
            return []
        sent = self._payload_bytes / self._num_steps
        return [
            f"  gradients: encoded as {self._config.compression!r}, reducer {self._config.reducer}: {sent / 1e6:.3g} MB a step "
            f"in place of {self._dense_bytes / 1e6:.3g} MB"
        ]
