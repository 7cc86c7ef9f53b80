"""Where the size of the batch stands in a forward's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# The number of the tensor among the arguments, the dimension, and how many rows a sample has.
Place = tuple[int, int, int]


def places_of(tensor: Tensor, number: int, num_samples: int) -> set[Place]:
    """Returns where a tensor may have the batch's size: sequences may be as long as the batch by chance.

    Args:
        tensor: with a row, or some, for each sample.
        number: its number among the arguments.
        num_samples: the batch's.
    """
    shape = list(tensor.shape)
    found = {(number, dim, 1) for dim, size in enumerate(shape) if size == num_samples}
    if shape and shape[0] and shape[0] != num_samples and shape[0] % num_samples == 0:
        found.add((number, 0, shape[0] // num_samples))
    return found


def packed_in(arguments: Iterable[Any]) -> set[int]:
    """Returns the ids of tensors of packed sequences whose lengths are sums of lengths, or the longest one.

    Args:
        arguments: a forward's, and those by name.
    """
    args, kwargs = arguments
    packed = [value for value in (*args, *kwargs.values()) if isinstance(value, PackedSequence)]
    return {id(tensor) for value in packed for tensor in (value.data, value.batch_sizes)}
