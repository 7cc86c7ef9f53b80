"""Numbers that each rank tells the others: a dataclass as a vector of float64, and the vectors of all ranks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# One number a rank, shape (world_size,), by the name of its field.
Gathered = Mapping[str, Array]


@dataclass(slots=True)
class Statistics:
    """Base of the dataclasses whose fields, all numbers, cross the wire as float64 in the order of their definition."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the fields' names in that order."""
        return tuple(cls.__dataclass_fields__)

    def vector(self) -> Array:
        """Returns the fields, shape (num_fields,)."""
        return np.array([float(getattr(self, name)) for name in self.names()])

    def table(self, *, rank: int, world_size: int) -> Array:
        """Returns this rank's row among zeros, shape (world_size, num_fields).

        The sum over ranks holds every rank's row. Other than an allgather it works beside ranks that have called hvd.join(),
        whose rows stay zero.
        """
        table = np.zeros((world_size, len(self.names())))
        table[rank] = self.vector()
        return table

    def gather(self, allgather: Callable[[Array], Array]) -> dict[str, Array]:
        """Returns all ranks' fields by name. COLLECTIVE.

        Args:
            allgather: gathers a vector of shape (num_fields,) as (world_size, num_fields).
        """
        return self.by_name(allgather(self.vector()))

    @classmethod
    def by_name(cls, vectors: Array) -> dict[str, Array]:
        """Returns the columns of all ranks' vectors, shape (world_size, num_fields), by the name of their field."""
        return dict(zip(cls.names(), vectors.T, strict=True))
