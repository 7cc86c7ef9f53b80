"""What in a model makes N ranks differ from one rank at the same global batch, or from each other."""

from __future__ import annotations

from torch import nn

from hvd_adaptive.comm.protocols import AgreedError

_LISTED = 3


def what_breaks_equality(model: nn.Module, *, loss_reduction: str, in_step: bool = False) -> list[str]:
    """Returns one sentence a kind of layer that makes a step over N ranks differ from one rank's with the same global batch.

    Found by the layers' types: a functional dropout, a random augmentation or a loss with class weights is not seen.

    Args:
        model: its layers are looked at as they are now.
        loss_reduction: ``mean``, ``sum`` or ``targets``.
        in_step: the model trains, so a layer in evaluation mode is meant to be.
    """
    found: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        # Without statistics of its own BatchNorm takes the batch's in any mode.
        is_at_rest = in_step and not layer.training and getattr(layer, "running_mean", layer) is not None
        kind = None if is_at_rest else _kind(layer, loss_reduction)
        if kind:
            found.setdefault(kind, []).append(name or type(layer).__name__)
    sentences = []
    for kind, names in found.items():
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        sentences.append(f"{kind} ({', '.join(names[:_LISTED])}{more})")
    return sentences


def check_forward(model: nn.Module) -> None:
    """Raises AgreedError for layers whose forward pass changes parameters by a rank's own samples, so that ranks would differ."""
    found = [
        name or type(layer).__name__
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None
    ]
    if found:
        # Every rank has the same model, so every rank is here.
        raise AgreedError(
            f"max_norm of {', '.join(found[:_LISTED])} rescales, in forward, the rows that a rank's own samples use, so the "
            "models of the ranks would differ: leave it out, and rescale all rows after session.optimizer.step() "
            "(torch.renorm); or use strategy 'local'"
        )


def _kind(layer: nn.Module, loss_reduction: str) -> str | None:
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        # Horovod's class has torch's name.
        if type(layer).__name__ != "SyncBatchNorm":
            return "BatchNorm normalizes over a rank's own samples, not over the global batch"
        if loss_reduction != "sum":
            return "SyncBatchNorm mixes the ranks' gradients before their weights; where these differ, use loss_reduction 'sum'"
        return None
    rate = getattr(layer, "p", 0.0) if isinstance(layer, nn.modules.dropout._DropoutNd) else 0.0
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        rate = layer.dropout
    if rate > 0 or isinstance(layer, nn.RReLU):
        return "dropout draws other random numbers on every rank"
    return None
