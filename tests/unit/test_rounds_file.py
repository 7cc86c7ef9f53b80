"""The rounds of one's own loop, in a folder for the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive import Config, RoundsFile, Session
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.report.runs import read_runs
from hvd_adaptive.report.table import summary_table

DATA = TensorDataset(torch.arange(64.0)[:, None], torch.arange(64) % 2)


def make_session(transport: LocalTransport) -> Session:
    torch.manual_seed(0)
    model = nn.Linear(1, 2)
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.01), Config(batch_size=4, mega_batch=16), transport=transport)


def train(transport: LocalTransport, folder: Path) -> int:
    session = make_session(transport)
    session.records.append(RoundsFile(folder, session))
    for batch in session.batches(DATA, num_epochs=2):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(session.model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    return session.round


def test_a_loops_rounds_are_a_run_of_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rounds = LocalWorld(2).run(lambda transport: train(transport, tmp_path / "new" / "mine"))
    (run,) = read_runs([tmp_path / "new" / "mine"])
    assert len(run.rounds) == rounds[0] == 8 and run.num_ranks == 2 and run.finished
    header, _, row = (line.split("|")[1:-1] for line in summary_table([run]).splitlines()[:3])
    cells = {name.strip(): cell.strip() for name, cell in zip(header, row, strict=True)}
    assert cells["run"] == "mine" and cells["epochs"] == "2.0" and float(cells["last loss"]) > 0
    assert all(cells[part].endswith("%") for part in ("computing", "waiting", "merging"))
    for number in (1, 2):
        LocalWorld(2).run(lambda transport: train(transport, tmp_path / "new" / "mine"))
        assert f"mine holds a run already: its rounds are in rounds-{number}.jsonl now" in caplog.messages[-1]
        assert len((run.path / f"rounds-{number}.jsonl").read_text().splitlines()) == 8
    assert len(read_runs([run.path])[0].rounds) == 8
    # By the first rank's word, on all of them.
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"RoundsFile: .*file"):
        LocalWorld(2).run(lambda transport: train(transport, tmp_path / "file" / "mine"))


def test_after_a_resume_the_file_goes_on(tmp_path: Path) -> None:
    LocalWorld(1).run(lambda transport: train(transport, tmp_path))
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()

    class Resumed:
        """As much of a session as is asked, after a resume from its fifth round."""

        rank, round, config = 0, 5, Config()

        def gather(self, value: Any) -> list[Any]:
            return [value]

    RoundsFile(tmp_path, Resumed())  # type: ignore[arg-type]
    assert (tmp_path / "rounds.jsonl").read_text().splitlines() == lines[:5]
