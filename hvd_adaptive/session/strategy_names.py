"""Which strategy a configuration names."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from hvd_adaptive.algorithm.world_scale import scaled_config
from hvd_adaptive.combinations import check_reference
from hvd_adaptive.comm.protocols import AgreedError, Transport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.shards import is_sharded
from hvd_adaptive.engine.strategy import Strategy
from hvd_adaptive.research.heterogpu import add_rules
from hvd_adaptive.research.logical import LogicalStrategy
from hvd_adaptive.research.sma import SmaStrategy
from hvd_adaptive.session.open_sessions import take_over
from hvd_adaptive.strategies.horovod import HorovodStrategy
from hvd_adaptive.strategies.local import LocalStrategy
from hvd_adaptive.strategies.local_islands import IslandStrategy
from hvd_adaptive.strategies.sync import SyncStrategy

_STRATEGIES: dict[str, Callable[[nn.Module, Optimizer, Config, Transport], Strategy]] = {
    "local": LocalStrategy,
    "sync": SyncStrategy,
    "horovod": HorovodStrategy,
    "sma": SmaStrategy,
}


def make_strategy(model: nn.Module, optimizer: Optimizer, config: Config, transport: Transport) -> Strategy:
    """Returns the strategy that the configuration names, for this number of ranks. COLLECTIVE. Takes the hooks of a session
    that was not closed off the model and the optimizer.

    Args:
        model: to train.
        optimizer: the user's.
        config: as the user gave it; names the strategy.
        transport: the world.

    Raises:
        AgreedError: on all ranks, for options that say nothing to this world, or do not fit the model.
    """
    add_rules()
    try:
        check_reference(config)
    except ValueError as error:
        # All ranks have compared their configurations.
        raise AgreedError(str(error)) from None
    make = LogicalStrategy if config.logical_ranks else _STRATEGIES[config.strategy]
    if config.island is not None:
        make = IslandStrategy
    elif any(is_sharded(p) for p in model.parameters()):
        # All ranks have compared their models.
        raise AgreedError(
            "the model's parameters are sharded (DTensors), and merges without islands need whole ones: set island in the "
            "configuration, and call fully_shard(..., mesh=hvd_adaptive.island_mesh(config)); or leave fully_shard out"
        )
    take_over(model, optimizer, speaks=transport.rank == 0)
    return make(model, optimizer, scaled_config(config, transport.world_size), transport)
