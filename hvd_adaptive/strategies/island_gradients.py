"""How the ranks of an island average their gradients: by exchanging them, or, of a sharded model, by its own reduce-scatter."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_adaptive.comm.island_world import Inside
from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.config import Config
from hvd_adaptive.engine.strategy import Removable
from hvd_adaptive.engine.touched_rows import sparse_parameters
from hvd_adaptive.engine.weighted_gradient import GradientWeight
from hvd_adaptive.exchange.gradients import GradientExchange
from hvd_adaptive.strategies.untouched_gradients import UntouchedGradients


class IslandGradients(Protocol):
    """Makes each gradient the mean over the ranks of an island.

    Attributes:
        weight: what the gradients of this rank's next backward passes are multiplied by before.
        hooks: on the model.
    """

    weight: float
    hooks: list[Removable]

    def begin(self) -> None:
        """Begins a step."""

    def expect(self, num_micro_batches: int) -> None:
        """Tells how many backward passes the next step has on this rank."""

    def synchronize(self) -> None:
        """Waits until the gradients are the means. COLLECTIVE inside the island."""


class ExchangedGradients:
    """For a model of which each rank has all: exchanges gradients while the backward pass goes on. Construction is COLLECTIVE.

    Args:
        model: to train.
        optimizer: of its parameters.
        config: without what compresses between islands.
        inside: the ranks of the island.
        rank: this rank among all, for errors.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config, inside: Inside, *, rank: int) -> None:
        sparse = sparse_parameters(model).values() if inside.world_size > 1 else ()
        self._weight = GradientWeight(model, optimizer, sparse)
        ranks = cast(Collectives, inside)
        self._exchange = GradientExchange(model.named_parameters(), config, ranks, average=True, name="island")
        self._untouched = UntouchedGradients(model, rank) if inside.world_size > 1 else None
        self.hooks: list[Removable] = [self._weight, self._exchange]
        self.hooks += [] if self._untouched is None else [self._untouched]

    @property
    def weight(self) -> float:
        """The factor."""
        return self._weight.value

    @weight.setter
    def weight(self, value: float) -> None:
        self._weight.value = value

    def begin(self) -> None:
        """Begins a step."""
        if self._untouched is not None:
            self._untouched.begin()

    def expect(self, num_micro_batches: int) -> None:
        """Tells how many backward passes the next step has on this rank."""
        self._exchange.set_backward_passes_per_step(num_micro_batches)

    def synchronize(self) -> None:
        """Waits until the gradients are the means. COLLECTIVE inside the island.

        Raises:
            RuntimeError: if the loop has changed them since backward.
        """
        if self._untouched is not None:
            self._untouched.check()
        self._exchange.synchronize()


class ShardedGradients:
    """For a model that ``fully_shard`` has cut up over the island: its own reduce-scatter averages, at the end of each backward
    pass.

    A sharded parameter's hooks never see this rank's own gradient. So what the model returns is multiplied on its way back: all
    gradients follow from it.

    Args:
        model: the module to which ``fully_shard`` was applied last.
        name: of this rank, for messages.

    Attributes:
        weight: what the gradients of this rank's next backward passes are multiplied by before.
        hooks: on the model.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.weight = 1.0
        self._name = name
        self._was_called = False
        self.hooks: list[Removable] = [model.register_forward_hook(self._called)]

    def begin(self) -> None:
        """Does nothing: the model averages before a loop can change gradients."""

    def expect(self, num_micro_batches: int) -> None:
        """Does nothing: there is one backward pass a step."""

    def synchronize(self) -> None:
        """Returns at once.

        Raises:
            RuntimeError: if the step did not call the model, so that nothing has weighted its gradients.
        """
        if not self._was_called:
            raise RuntimeError(
                f"{self._name} made a step for which the model returned no tensor with a gradient: call model(...) itself for "
                "every batch, not a layer of it or model.forward(...), and return tensors, alone or in lists, tuples and dicts"
            )
        self._was_called = False

    def _called(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        from torch.utils._pytree import tree_map

        found = False

        def weighted(value: Any) -> Any:
            nonlocal found
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            found = True
            # Another tensor: what the model computed from this one before it returned must not be multiplied twice.
            factor, value = self.weight, value.view_as(value)
            value.register_hook(lambda gradient: gradient * factor)
            return value

        result = tree_map(weighted, output)
        self._was_called |= found
        return result
