"""Record and replay: which rank computed what, in which order, written down and computed again.

A recording is a file of JSON lines: first what the run was, then one line a round. A line that repeats a round's number
takes the place of the earlier one, and a last line without an end was never finished: so a resumed run may append.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvd_adaptive.comm.protocols import AgreedError, Collectives, from_rank_0
from hvd_adaptive.config import GONE_OPTIONS, Config
from hvd_adaptive.engine.claims import Claim, Claims, ClaimSize
from hvd_adaptive.engine.line_file import LineFile
from hvd_adaptive.engine.records import RoundClaims, RoundRecord
from hvd_adaptive.validation import parse_json

log = logging.getLogger(__name__)

CLAIMS_FILE = "claims.jsonl"
# What may differ between a run and its replay: none of them changes a bit of the model.
_FREE = ("backend", "record", "replay", "stall_limit_s", "hash_interval", "slowdown", "drain_limit_s", "straggler_limit")


class WatchedClaims:
    """Hands out the claims of another source and keeps a list of them.

    Args:
        source: where claims come from.

    Attributes:
        taken: the claims so far, in order.
    """

    def __init__(self, source: Claims) -> None:
        self._source = source
        self.taken: list[Claim] = []

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes a piece from the source."""
        claim = self._source.claim(size)
        if claim is not None:
            self.taken.append(claim)
        return claim

    def close(self) -> None:
        """Closes the source."""
        self._source.close()

    @property
    def end(self) -> int | None:
        """Of the source."""
        return self._source.end


class RecordedClaims:
    """The claims of a recording, whatever size is asked for.

    Args:
        claims: one rank's, of one round.
        end: of that round, as in :class:`Claims`.
    """

    def __init__(self, claims: list[Claim], *, end: int | None) -> None:
        self._left = iter(claims)
        self.end = end

    def claim(self, size: ClaimSize) -> Claim | None:
        """Takes the next recorded piece."""
        return next(self._left, None)

    def close(self) -> None:
        """Goes on to the recorded end."""


def round_claims(
    record: RoundRecord, claims: list[list[Claim]], *, num_samples: int, num_planned: int, data: str
) -> RoundClaims:
    """Returns a completed round as a recording keeps it.

    Args:
        record: the round.
        claims: each rank's.
        num_samples: of the round, over all ranks.
        num_planned: samples that it would have had without an early end.
        data: what the rows are of.
    """
    return RoundClaims(
        round=record.round,
        data=data,
        num_samples=num_samples,
        num_planned=num_planned,
        claims=claims,
        batch_size=record.stats["batch_size"].tolist(),
        lr=record.stats["lr"].tolist(),
        weight=record.weight.tolist(),
        model_hash=record.model_hash,
    )


def run_identity(config: Config, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a run and its replay must have in common, by name, as text.

    Args:
        config: the run's.
        values: more of it: model, optimizer, ranks.
    """
    options = dataclasses.asdict(config)
    own = {f"configuration {name}": value for name, value in options.items() if name not in _FREE}
    return {name: repr(value) for name, value in {**own, **values}.items()}


class RecordingFile:
    """Writes a recording; one of ``Session.records``, on one rank only. Rounds that find no room are written when they do.

    Args:
        path: the file; one that is there is gone on with.
        identity: what :func:`run_identity` gave.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        if path.exists():
            # What stands after the last end of a line was cut off in writing.
            whole = path.read_bytes().rfind(b"\n") + 1
            os.truncate(path, whole)
        self._lines = LineFile(path)
        self._lines.add(json.dumps({"identity": identity}))

    def __call__(self, record: Any) -> None:
        """Adds a round.

        Args:
            record: a RoundRecord whose ``claims`` are known.
        """
        self._lines.add(json.dumps(dataclasses.asdict(record.claims)))

    def close(self) -> None:
        """Closes the file.

        Raises:
            OSError: if rounds are left that cannot be written.
        """
        self._lines.flush()
        self._lines.close()


class Replay:
    """A recording that a run repeats, round by round, from any round on. Construction is COLLECTIVE.

    Args:
        path: a run directory with a recording, or the file; read by rank 0.
        identity: of this run, see :func:`run_identity`.
        transport: the world.

    Raises:
        AgreedError: on all ranks, if it cannot be read or is of another run.
    """

    def __init__(self, path: str, identity: dict[str, str], transport: Collectives) -> None:

        def read() -> tuple[dict[str, str], dict[int, RoundClaims]]:
            try:
                return read_recording(Path(path))
            except (OSError, ValueError, KeyError, TypeError) as failure:
                raise ValueError(f"replay {path}: {failure}") from None

        recorded, self._rounds = from_rank_0(transport, read)
        self._path = path
        self._rank = transport.rank
        gone = [(f"configuration {name}", repr(value)) for name, value in GONE_OPTIONS]
        differing = [
            f"{name} is {identity.get(name, 'missing')} and was {recorded.get(name, 'missing')}"
            for name in sorted({*identity, *recorded})
            if identity.get(name) != recorded.get(name) and (name, recorded.get(name)) not in gone
        ]
        if differing:
            raise AgreedError(
                f"replay {path}: this run is not the recorded one: {'; '.join(differing[:5])}. "
                "Start it with the options, the number of ranks and the threads of the recording."
            )

    def next_round(self, number: int, data: str) -> RoundClaims | None:
        """Returns a round as it was recorded, None after the last one.

        Args:
            number: of the round.
            data: what the rows are of, as text.

        Raises:
            AgreedError: on all ranks, if the data are others.
        """
        recorded = self._rounds.get(number)
        if recorded is None:
            if self._rank == 0:
                log.info("replay %s: the recording ends before round %d", self._path, number)
        elif recorded.data != data:
            raise AgreedError(
                f"replay {self._path}: the data are {data} and were {recorded.data}; give the recorded run's data"
            )
        return recorded

    def check(self, done: RoundClaims, num_samples: int) -> None:
        """Compares a completed round with the recording.

        Args:
            done: the round as it was this time, the same on every rank.
            num_samples: samples that the ranks computed.

        Raises:
            AgreedError: on all ranks, naming the first thing that differs.
        """
        recorded = self._rounds[done.round]
        if num_samples != recorded.num_samples:
            raise AgreedError(
                f"replay {self._path}: the claims of round {done.round} make {num_samples} samples instead of "
                f"{recorded.num_samples}: the recording was changed"
            )
        for name in ("claims", "batch_size", "lr", "weight", "model_hash"):
            ours, theirs = getattr(done, name), getattr(recorded, name)
            if ours != theirs and not (name == "model_hash" and None in (ours, theirs)):
                raise AgreedError(
                    f"replay {self._path}: {name} of round {done.round} is {_short(ours)} and was {_short(theirs)}. "
                    "Bits repeat on the same hardware, with the same versions of torch, MPI and Horovod."
                )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def read_recording(path: Path) -> tuple[dict[str, str], dict[int, RoundClaims]]:
    """Reads a recording: which run it is of, and its rounds by number.

    Args:
        path: the run directory or the file.

    Raises:
        ValueError: naming the line, if it is none.
        OSError: if it cannot be read.
    """
    file = path if path.is_file() else path / CLAIMS_FILE
    if not file.exists():
        raise ValueError(f"{file} is not there; name the directory of a run that was started with --record")
    text = file.read_text(encoding="utf-8")
    identity: dict[str, str] = {}
    rounds = {}
    # What stands after the last end of a line was cut off in writing.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            value = parse_json(line)
            if "identity" in value:
                identity = value["identity"]
                continue
            value["claims"] = [[tuple(map(operator.index, claim)) for claim in rank] for rank in value["claims"]]
            # Earlier versions did not write it.
            entry = RoundClaims(**{"num_planned": value["num_samples"], **value})
            _check(entry)
            ends = np.array(sorted(claim[:2] for rank in entry.claims for claim in rank))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise ValueError(f"line {number} of {file} is not of a recording: {error}") from None
        if not len(ends) or ends[0, 0] != 0 or (ends[1:, 0] != ends[:-1, 1]).any():
            raise ValueError(f"line {number} of {file}: the claims of round {entry.round} overlap or leave gaps")
        rounds[entry.round] = entry
    if not identity:
        raise ValueError(f"{file} does not say which run it is of: its first line is missing")
    return identity, rounds


def _check(entry: RoundClaims) -> None:
    """Raises ValueError for fields that are not what they should be, as in a file that was changed."""
    num_ranks = len(entry.claims)
    for name in ("batch_size", "lr", "weight"):
        numbers = getattr(entry, name)
        whole = isinstance(numbers, list) and len(numbers) == num_ranks
        if not whole or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
            raise ValueError(f"{name} must be {num_ranks} numbers, got {_short(numbers)}")
    numbers = (entry.round, entry.num_samples, entry.num_planned)
    if not all(isinstance(number, int) for number in numbers) or not isinstance(entry.data, str):
        raise ValueError("round, num_samples and num_planned must be whole numbers, and data text")
    if entry.num_planned < entry.num_samples:
        raise ValueError(f"num_planned must be >= num_samples, got {entry.num_planned} < {entry.num_samples}")
    if not isinstance(entry.model_hash, (str, type(None))):
        raise ValueError(f"model_hash must be text, got {_short(entry.model_hash)}")
