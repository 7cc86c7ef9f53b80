"""Models that ``torch.distributed.fsdp.fully_shard`` has cut up: each rank's own part of every parameter.

Such a parameter is a DTensor, whose local tensor is this rank's shard. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def is_sharded(tensor: Any) -> bool:
    """Returns whether a tensor is a DTensor."""
    # Importing torch.distributed.tensor takes a second, which others need not wait for.
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, sharing its memory, or the tensor itself."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def describe_type(tensor: Tensor) -> str:
    """Returns the dtype as text, and into how many shards the tensor is cut, if it is."""
    mesh = getattr(tensor, "device_mesh", None)
    return str(tensor.dtype) if mesh is None else f"{tensor.dtype} in {mesh.size()} shards"


def reshard(model: nn.Module) -> None:
    """Frees what forward passes without a backward pass have gathered: ``model.parameters()`` are the shards after it."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            cut: Any = module
            cut.reshard()


def shard_number(model: nn.Module) -> int:
    """Returns which shard of the model this rank has; 0 for one that is not cut up."""
    for parameter in model.parameters():
        if is_sharded(parameter):
            return int(parameter.device_mesh.get_local_rank())  # type: ignore[attr-defined]
    return 0


def check_shards(model: nn.Module, ranks: list[int]) -> bool:
    """Returns whether a model is cut up, which must then be over these ranks.

    Args:
        model: any module.
        ranks: of this rank's island.

    Raises:
        ValueError: if only a part of it is, or otherwise. Frozen parameters may be whole beside trainable ones in shards, but not
            the other way round.
    """
    cut = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    if not cut:
        return False
    remedy = "call fully_shard(..., mesh=hvd_adaptive.island_mesh(config)) on its layers and on the model itself"
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    whole = sorted(set(trainable) - cut.keys())
    if len(whole) == len(trainable):
        # Whole trainable parameters have one state for all ranks, which has no place for each rank's frozen shards.
        raise ValueError(f"only frozen parameters are sharded, such as {next(iter(cut))}: shard the trainable ones too; {remedy}")
    if whole:
        raise ValueError(f"all trainable parameters must be sharded, or none, got {', '.join(whole[:3])} unsharded: {remedy}")
    if not hasattr(model, "unshard"):
        raise ValueError(f"the model is not itself an FSDPModule, though its parameters are sharded: {remedy}")
    for name, parameter in cut.items():
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        found = mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or found != ranks:
            raise ValueError(
                f"{name} is sharded over ranks {found} on a mesh of {mesh.ndim} dimensions, and must be over the ranks of its "
                f"island, {ranks}, on one of 1: {remedy}"
            )
    if not sum(local(cut[name]).numel() for name in trainable):
        raise ValueError("this rank has no part of what is trained: the model is too small for so many ranks in an island")
    return True


def local_state(state: Any) -> Any:
    """Returns an optimizer's state with shards in the place of DTensors."""
    if isinstance(state, dict):
        return {key: local_state(value) for key, value in state.items()}
    return local(state) if isinstance(state, Tensor) and is_sharded(state) else state


def sharded_state(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Returns what :func:`local_state` made of an optimizer's state as that optimizer takes it: with DTensors again."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(is_sharded(p) for p in parameters):
        return state
    places = [place for group in state["param_groups"] for place in group["params"]]
    entries = {
        place: {name: _like(value, parameter) for name, value in state["state"][place].items()}
        for place, parameter in zip(places, parameters, strict=True)
        if place in state["state"]
    }
    return {**state, "state": entries}


def zeros(parameter: Tensor, shape: Iterable[int], dtype: torch.dtype, *, on_host: bool) -> Tensor:
    """Returns an entry of an optimizer's state, cut up as its parameter is where it has the shape of all shards together.

    Args:
        parameter: the state's.
        shape: of the entry, all of it.
        dtype: the entry's.
        on_host: it is in host memory, as the number of steps is; else where the parameter is.
    """
    shape = tuple(shape)
    if is_sharded(parameter) and shape == tuple(parameter.shape) and shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)


def _like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or not is_sharded(parameter) or value.shape != local(parameter).shape:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(parameter.device), parameter.device_mesh, parameter.placements,  # type: ignore[attr-defined]
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
