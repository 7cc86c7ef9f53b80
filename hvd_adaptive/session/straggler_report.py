"""Names ranks that are slower than a limit, by host and device, with what they spend their time on."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from hvd_adaptive.algorithm.statistics import Gathered
from hvd_adaptive.algorithm.straggler import StragglerWatch
from hvd_adaptive.comm.protocols import Collectives

log = logging.getLogger(__name__)

# Of the rank that computes longest. In less time a rank is slow by a page fault, or by a process that starts beside it.
_LEAST_S = 1.0
_POOLED = ("work", "busy_s", "claim_s", "wait_s")


class StragglerReport:
    """Judges rounds and warns, once each time that a rank becomes a straggler. Construction is COLLECTIVE.

    Args:
        transport: the world.
        device: this rank's.
        limit: how many times slower than the other ranks, or than before, a rank may be; 0: whatever it is.
    """

    def __init__(self, transport: Collectives, device: torch.device, limit: float) -> None:
        self._speaks = transport.rank == 0
        self._watch = StragglerWatch(transport.world_size, limit=limit) if limit else None
        # Of the rounds that are not judged yet.
        self._pool: dict[str, np.ndarray] = {}
        self._places: list[tuple[str, str]] = transport.allgather_object((transport.host, str(device)))

    def add_round(self, stats: Gathered) -> list[dict[str, Any]]:
        """Returns the stragglers after a round, as rounds.jsonl has them. Short rounds are judged together, after the last one.

        Args:
            stats: of all ranks, the merge included.
        """
        if self._watch is None:
            return []
        pool = {name: self._pool.get(name, 0.0) + stats[name] for name in _POOLED}
        work, own_s = pool["work"], pool["busy_s"] + pool["claim_s"]
        if own_s.max() < _LEAST_S:
            self._pool = pool
            return []
        self._pool = {}
        found = []
        if (stats["equal_share_s"] > 0).all():
            # Of few samples a sample takes long, as each step costs something by itself: that is no slow rank.
            work, own_s = np.ones(len(work)), stats["equal_share_s"]
        for straggler in self._watch.observe(work, own_s):
            rank = straggler.rank
            host, device = self._places[rank]
            seconds = {name: round(float(pool[name][rank]), 6) for name in ("busy_s", "claim_s", "wait_s")}
            found.append(
                {"rank": rank, "host": host, "device": device, "against": straggler.against, "factor": round(straggler.factor, 3),
                 **seconds}
            )  # fmt: skip
            if straggler.is_new and self._speaks:
                log.warning(
                    "rank %d (%s, %s) is %.1f times slower than %s: it computed for %.3g s, waited for its data for %.3g s and "
                    "for other ranks for %.3g s lately. Unless slowdown asks for it, look at that device's clock and at what "
                    "else runs there. Set straggler_limit=0 to silence this.",
                    rank, host, device, straggler.factor, straggler.against,
                    seconds["busy_s"], seconds["claim_s"], seconds["wait_s"],
                )  # fmt: skip
        return found
