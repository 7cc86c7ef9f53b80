"""What all ranks must have in common: the kind of model before a run, and its bits during one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import zlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hvd_adaptive.comm.protocols import Collectives, agree, agree_equal
from hvd_adaptive.config import Config
from hvd_adaptive.engine.device_copies import host_bytes, memory_of
from hvd_adaptive.engine.flat_model import check_kinds, model_hash
from hvd_adaptive.engine.shards import describe_type, local, shard_number

log = logging.getLogger(__name__)

# Values of a data set's tensors that are compared, and the part of them that is equal where ranks hold the same.
_NUM_PROBES, _ALIKE = 64, 0.9


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns what is trained, by name, as small comparable values: shapes, types, and the optimizer's settings.

    Raises:
        TypeError: for an optimizer that is none.
        ValueError: for a parameter without values, complex parameters, none to train, or an optimizer over others.
    """
    if lazy := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]:
        raise ValueError(
            f"{len(lazy)} parameters or buffers of lazy modules have no shape yet, the first is {lazy[0]}: run one forward pass "
            "before the optimizer and the session are made"
        )
    check_kinds(model)
    _check_optimizer(model, optimizer)
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"{len(empty)} parameters are on the meta device and have no values, the first is {empty[0]}: call "
            "model.to_empty(device=...) before the session, and initialise or load them"
        )
    return {
        **{f"model {name}": (tuple(p.shape), describe_type(p), p.requires_grad) for name, p in model.named_parameters()},
        **{f"model {name}": (tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()},
        "optimizer": type(optimizer).__name__,
        "optimizer groups": repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
    }


def checked_config(model: Any, optimizer: Any, config: Any) -> Config:
    """Checks the types of what a session is given; returns its configuration, the default one for None.

    Raises:
        TypeError: naming what was got.
    """
    order = "Session takes (model, optimizer, config), in this order"
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_described(model)}: {order}")
    if isinstance(optimizer, nn.Module):
        raise TypeError(f"optimizer must be a torch optimizer, got {_described(optimizer)}: {order}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(
            f"config must be a hvd_adaptive.Config, got {_described(config)}: give its options by name, as in "
            "hvd_adaptive.Config(batch_size=64)"
        )
    return config or Config()


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__}"


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    groups = getattr(optimizer, "param_groups", None)
    if not (isinstance(groups, list) and hasattr(optimizer, "state_dict") and hasattr(optimizer, "register_step_pre_hook")):
        raise TypeError(
            "optimizer must be a torch optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1), got "
            f"{type(optimizer).__name__}"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer {name} has not called torch.optim.Optimizer.__init__, so its steps cannot be seen: call "
            f"super().__init__(base.param_groups, base.defaults) in {name}.__init__"
        )
    own = {id(p) for p in model.parameters()}
    parameters = [p for group in groups for p in group["params"]]
    if others := [tuple(p.shape) for p in parameters if id(p) not in own]:
        raise ValueError(
            f"optimizer must have the session's model's parameters only: {len(others)} of its {len(parameters)} are not, the "
            f"first has shape {others[0]}, and ranks would not exchange them. Make it of model.parameters(), once the model has "
            "all its layers; put networks that are trained together into one nn.ModuleDict"
        )


def agree_on_start(transport: Collectives, config: Config, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Compares the ranks' configurations, and what they train. COLLECTIVE.

    Returns:
        What is trained, see :func:`describe`.

    Raises:
        TypeError, ValueError: see :func:`describe`.
        AgreedError: on all ranks, if something differs.
    """
    trained = describe(model, optimizer)
    options = {f"configuration {name}": value for name, value in dataclasses.asdict(config).items()}
    agree_equal(transport, {**options, **trained}, "Start every rank with the same options and the same model.")
    return trained


def agree_on_data(transport: Collectives, dataset: Any) -> None:
    """Compares the lengths of the ranks' data sets, the rows of torch's subsets, and some values of its tensors, other ones of
    which are warned of. COLLECTIVE. What a data set holds besides may differ, as paths and caches do.

    Raises:
        AgreedError: on all ranks, if something differs.
    """
    values, remedy = {"number of samples": len(dataset)}, "Give every rank the same data"
    rows = _checksum_of_rows(dataset, 0)
    if rows:
        values["checksum of the Subset's indices"] = rows
        remedy += (
            ": split it with one seed on all ranks, as by random_split(data, lengths, "
            "generator=torch.Generator().manual_seed(0)), and not by rank: the session shares the samples out"
        )
    agree_equal(transport, values, f"{remedy}.")
    own = _probes(dataset)
    every = transport.allgather_array(np.array([*own, *[0.0] * (_NUM_PROBES - len(own))]))
    # Rounding differs between hosts.
    others = [rank for rank, row in enumerate(every) if np.isclose(row, every[0], rtol=1e-3, equal_nan=True).mean() < _ALIKE]
    if others and transport.rank == 0:
        log.warning(
            "ranks %s hold other values in their tensors of samples than rank 0, so this trains some samples of each rank's data "
            "and never the rest: give every rank the same data. Where they are made at random, call torch.manual_seed(0) first",
            others,
        )


def _probes(dataset: Any) -> list[float]:
    """Returns at most ``_NUM_PROBES`` values of the tensors of a TensorDataset, also within subsets, spread over each."""
    if isinstance(dataset, Subset):
        return _probes(dataset.dataset)
    if not isinstance(dataset, TensorDataset) or not (tensors := [t for t in dataset.tensors if t.numel()]):
        return []
    most = max(1, _NUM_PROBES // len(tensors))
    flats = [t.detach().reshape(-1) for t in tensors]
    values = [flat[:: -(-flat.numel() // most)].real.double().tolist() for flat in flats]
    return [value for part in values for value in part][:_NUM_PROBES]


def _checksum_of_rows(dataset: Any, checksum: int) -> int:
    """Returns a checksum of the indices of all subsets within a data set; 0 if there are none that are whole numbers."""
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            checksum = _checksum_of_rows(part, checksum)
    if not isinstance(dataset, Subset):
        return checksum
    try:
        rows = np.asarray(dataset.indices)
    except Exception:
        # A script's own kind of indices may raise anything.
        return checksum
    if rows.dtype.kind in "iu":
        checksum = zlib.crc32(rows.astype(np.int64).tobytes(), checksum)
    return _checksum_of_rows(dataset.dataset, checksum)


def compare_models(model: nn.Module, transport: Collectives, *, buffers: bool) -> tuple[str, list[int]]:
    """Compares the ranks' models bit by bit. COLLECTIVE. Of a model in shards, ranks with the same shard are compared.

    Args:
        model: this rank's.
        transport: the world.
        buffers: compare buffers as well.

    Returns:
        The SHA-256 of the model, or of its shards' ones, equal on all ranks with equal models; and the ranks whose model is not
        that of the first rank with the same shard.
    """
    own = bytes.fromhex(model_hash(model, buffers=buffers))
    row = np.frombuffer(own + shard_number(model).to_bytes(8, "little"), dtype=np.uint8)
    found = [(bytes(other[-8:])[::-1], bytes(other[:-8])) for other in transport.allgather_array(row)]
    first: dict[bytes, bytes] = {}
    for shard, digest in found:
        first.setdefault(shard, digest)
    odd = [rank for rank, (shard, digest) in enumerate(found) if digest != first[shard]]
    if len(first) == 1 or transport.rank in odd:
        return own.hex(), odd
    return hashlib.sha256(b"".join(first[shard] for shard in sorted(first))).hexdigest(), odd


def check_same_model(model: nn.Module, transport: Collectives, *, buffers: bool, round_number: int) -> str:
    """Compares the ranks' models as :func:`compare_models` does; returns their SHA-256. COLLECTIVE.

    Args:
        model: this rank's.
        transport: the world.
        buffers: compare buffers as well.
        round_number: rounds completed, for the message.

    Raises:
        AgreedError: on all ranks, if a model differs.
    """
    own, odd = compare_models(model, transport, buffers=buffers)
    if odd:
        differing = _what_differs(model, transport, buffers=buffers)
        agree(transport, f"after round {round_number} the models of ranks {odd} differ from rank 0's{differing}")
    return own


def warn_of_unequal(states: dict[str, Any], transport: Collectives, told: set[str]) -> None:
    """Warns once, on rank 0, of each state that is registered as shared and is not equal on all ranks. COLLECTIVE.

    Args:
        states: of this rank, by name.
        transport: the world.
        told: the names that were warned of; gets the new ones.
    """
    if not states.keys() - told:
        return
    every = transport.allgather_object({name: _checksum_of_state(states[name]) for name in states.keys() - told})
    for name, first in every[0].items():
        odd = [rank for rank, checksums in enumerate(every) if checksums[name] != first]
        if odd and transport.rank == 0:
            log.warning(
                "register_state: %r has shared=True, and ranks %s have another state of it than rank 0, whose is saved for all. "
                "Update it in session.records, after the merge, when all ranks hold the same model; or register it with "
                "shared=False, and each rank's own is saved",
                name, odd,
            )  # fmt: skip
        told |= {name} if odd else set()


def _checksum(tensor: torch.Tensor) -> int:
    return functools.reduce(lambda before, part: zlib.crc32(memory_of(part), before), host_bytes([tensor]), 0)


def _checksum_of_state(state: Any) -> int:
    """Returns a checksum of all but floats: those may be seconds, which differ."""
    leaves, structure = tree_flatten(state)
    texts = [
        str(_checksum(leaf.detach())) if isinstance(leaf, torch.Tensor)
        else str(zlib.crc32(leaf.tobytes())) if isinstance(leaf, np.ndarray)
        else repr(leaf)
        for leaf in leaves
        if not isinstance(leaf, (float, np.floating))
    ]  # fmt: skip
    return zlib.crc32(repr((structure, texts)).encode())


@torch.no_grad()
def _what_differs(model: nn.Module, transport: Collectives, *, buffers: bool) -> str:
    """Returns the names of tensors that are not the same on all ranks with a shard, and what to do. COLLECTIVE."""
    of_buffers = dict(model.named_buffers()) if buffers else {}
    tensors = {**dict(model.named_parameters()), **of_buffers}
    checksums = [_checksum(local(tensor)) for tensor in tensors.values()]
    first: dict[int, list[int]] = {}
    names: dict[str, None] = {}
    for shard, others in transport.allgather_object((shard_number(model), checksums)):
        expected = first.setdefault(shard, others)
        names |= {name: None for name, a, b in zip(tensors, expected, others, strict=True) if a != b}
    listed = ", ".join([*names][:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if names and all(tensors[name].is_leaf and not tensors[name].requires_grad and name not in of_buffers for name in names):
        return (
            f" in frozen parameters ({listed}), which merges leave alone: update such a copy of the model in session.records, "
            "after the merge, when all ranks hold the same model."
        )
    if names and all(name in of_buffers for name in names):
        return (
            f" in buffers ({listed}). A pass in training mode outside session.step moves BatchNorm's statistics, each rank's by "
            "its own samples: evaluate between model.eval() and model.train(). Observers of quantization also need "
            "disable_observer."
        )
    return (
        f" ({listed}); did some ranks change them outside session.step (such as a best model that rank 0 alone went back to), in "
        "forward, or by an optimizer other than session.optimizer? Change them alike on all ranks, in session.records, or within "
        "session.step. Or does a host compute differently? Compare a run with one rank a host."
    )
