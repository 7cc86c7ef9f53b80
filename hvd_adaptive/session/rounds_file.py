"""The rounds of one's own loop in a folder that ``hvd-adaptive report`` reads."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from pathlib import Path

from hvd_adaptive.engine.line_file import LineFile, first_rounds
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.session.session import Session

log = logging.getLogger(__name__)


class RoundsFile:
    """Writes each round of a session's loop for ``hvd-adaptive report``. Construction is COLLECTIVE.

        session.records.append(hvd_adaptive.RoundsFile("runs/mine", session))

    Rank 0 writes ``config.json`` and ``rounds.jsonl``. A line that does not fit on the disk is kept and written later. If the
    session has been resumed, the file goes on, without the rounds that are computed again. Rounds of another run are set aside in
    ``rounds-1.jsonl`` and so on, with a warning.

    Args:
        folder: of this run; made if it is not there.
        session: whose rounds it gets.

    Raises:
        ValueError: on all ranks, if it cannot be written.
    """

    def __init__(self, folder: str | Path, session: Session) -> None:
        self._file: LineFile | None = None
        error = None
        if session.rank == 0:
            try:
                self._file = _open(Path(folder), session)
            except OSError as failure:
                error = f"RoundsFile: {failure}"
        if (found := session.gather(error)[0]) is not None:
            raise ValueError(found)

    def __call__(self, record: RoundRecord) -> None:
        """Writes a round, on rank 0."""
        if self._file is not None:
            self._file.add(json.dumps({**record.to_json(), "eval": None}))


def _open(folder: Path, session: Session) -> LineFile:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rounds.jsonl"
    kept = first_rounds(path, session.round)
    if path.exists() and not session.round:
        # As where a job is queued again that had no checkpoint yet.
        aside = next(name for n in itertools.count(1) if not (name := folder / f"rounds-{n}.jsonl").exists())
        path.rename(aside)
        log.warning("%s holds a run already: its rounds are in %s now", folder, aside.name)
    path.write_text("".join(kept), encoding="utf-8")
    options = {name: value for name, value in dataclasses.asdict(session.config).items() if value is not None}
    options |= {"name": folder.resolve().name, "own_loop": True}
    (folder / "config.json").write_text(json.dumps(options, indent=2, default=str) + "\n", encoding="utf-8")
    return LineFile(path)
