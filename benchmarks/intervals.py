"""How sure a median is."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def median_interval(values: ArrayLike) -> tuple[float, float]:
    """Returns a 95% interval of the median: between order statistics (sign test), whatever the distribution.

    Args:
        values: independent measurements, shape (n,), n >= 1.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    # The binomial's normal approximation.
    off = 0.98 * np.sqrt(len(ordered))
    places = np.clip([np.floor(len(ordered) / 2 - off), np.ceil(len(ordered) / 2 + off) - 1], 0, len(ordered) - 1)
    low, high = ordered[places.astype(int)]
    return float(low), float(high)
