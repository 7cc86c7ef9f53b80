"""Whether a merge exchanges all rows of sparse parameters or only those that some rank touched."""

from __future__ import annotations

from collections import deque

import numpy as np

from hvd_adaptive.algorithm.statistics import Array

# Between these shares of the bytes neither way is obviously cheaper, and both are measured.
_SURELY_SPARSE, _SURELY_DENSE = 0.1, 0.9
# Without measurements: packing a row costs about as much again as sending it.
_PRIOR_SHARE = 0.5
_WINDOW = 5
# The first merge of a kind pays for buffers and negotiation.
_TRIES = 2
_TRY_AGAIN_ROUNDS = 50


class RowChoice:
    """Chooses round by round from measured seconds; the same on every rank, as all see the same gathered numbers.

    A dense merge takes as long every time; a sparse one is taken to be proportional to its bytes. Both are the best of the
    last few measured, which leaves out disturbances, on the slowest rank.

    Args:
        mode: ``auto`` chooses the cheaper way, ``always`` exchanges touched rows, ``never`` all rows.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._dense_s: deque[float] = deque(maxlen=_WINDOW)
        self._sparse_s_per_byte: deque[float] = deque(maxlen=_WINDOW)
        # How often each way was taken, and rounds since.
        self._taken = {True: 0, False: 0}
        self._idle = {True: 0, False: 0}

    def measured(self) -> Array:
        """Returns this rank's (seconds of a dense merge, seconds a byte of a sparse one), NaN for what it has not
        measured, shape (2,)."""
        return np.array([min(values, default=np.nan) for values in (self._dense_s, self._sparse_s_per_byte)])

    def observe(self, sparse: bool, *, seconds: float, num_bytes: int) -> None:
        """Adds a merge of this rank.

        Args:
            sparse: which way it went.
            seconds: how long it took, waiting for other ranks excluded.
            num_bytes: what this rank sent, > 0.
        """
        if sparse:
            self._sparse_s_per_byte.append(seconds / num_bytes)
        else:
            self._dense_s.append(seconds)

    def choose(self, *, sparse_bytes: int, dense_bytes: int, measured: Array) -> bool:
        """Returns whether only touched rows are exchanged.

        Args:
            sparse_bytes: bytes of a merge of touched rows.
            dense_bytes: bytes of a merge of all rows, > 0.
            measured: every rank's :meth:`measured`, shape (world_size, 2).
        """
        share = sparse_bytes / dense_bytes
        if self._mode != "auto":
            sparse = self._mode == "always"
        elif share <= _SURELY_SPARSE or share >= _SURELY_DENSE:
            sparse = share <= _SURELY_SPARSE
        else:
            sparse = self._cheaper(share, sparse_bytes, measured)
        self._taken[sparse] += 1
        self._idle[sparse] = 0
        self._idle[not sparse] += 1
        return sparse

    def _cheaper(self, share: float, sparse_bytes: int, measured: Array) -> bool:
        likely = share < _PRIOR_SHARE
        for way in (likely, not likely):
            if self._taken[way] < _TRIES:
                return way
        dense_s, sparse_s = measured.max(axis=0) * (1.0, sparse_bytes)
        if np.isnan(dense_s) or np.isnan(sparse_s):
            return likely
        sparse = bool(sparse_s < dense_s)
        # Old measurements of the other way may have become wrong.
        ratio = dense_s / sparse_s if sparse else sparse_s / dense_s
        if self._idle[not sparse] >= _TRY_AGAIN_ROUNDS and ratio < 2:
            return not sparse
        return sparse

