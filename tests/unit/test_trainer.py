"""The trainer in one process: which model is the best, slow disks, recordings that find no room, and the terminal afterwards."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive.cli import train as command
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.replay import CLAIMS_FILE, RecordingFile, read_recording
from hvd_adaptive.exit_codes import EXIT_INTERRUPTED
from hvd_adaptive.xmc import run_directory
from hvd_adaptive.xmc import trainer as trainer_module
from hvd_adaptive.xmc.data import SparseDataset
from hvd_adaptive.xmc.evaluation import Evaluator
from hvd_adaptive.xmc.run_directory import BEST_MODEL, LAST_MODEL, RunDirectory, load_model
from hvd_adaptive.xmc.train_config import TrainConfig
from hvd_adaptive.xmc.trainer import Trainer

NUM_TEST = 30


def rows(split: str, num_samples: int) -> SparseDataset:
    """Rows with one feature and one label each."""
    ends = np.arange(num_samples + 1)
    features, labels = (np.arange(num_samples, dtype=np.int32) % number for number in (20, 7))
    return SparseDataset(
        name="a", split=split, num_features=20, num_labels=7, fingerprint="", x_indptr=ends, x_indices=features,
        x_values=np.ones(num_samples, np.float32), y_indptr=ends, y_indices=labels,
    )  # fmt: skip


def make_trainer(path: Path, transport: LocalTransport | None = None, *, record: bool = False, **options: Any) -> Trainer:
    """One that makes rounds of a quarter of an epoch."""
    transport = transport or LocalTransport()
    return Trainer(
        Config(batch_size=8, mega_batch=20, record=record, num_threads=torch.get_num_threads()),
        TrainConfig(hidden_size=4, calibration=False, checkpoint_interval=0, device="cpu", **options),
        (rows("train", 80), rows("test", NUM_TEST)),
        device=torch.device("cpu"),
        transport=transport,
        make_directory=None if transport.rank else lambda: RunDirectory(path),
    )


def test_ranks_of_a_host_say_the_same_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an error of all of them would be shown once for each."""
    free = iter(range(30, 10, -1))
    monkeypatch.setattr(command, "free_memory_bytes", lambda: next(free))
    options, data = TrainConfig(hidden_size=4), rows("train", 8)
    with pytest.raises(AgreedError, match=r"^hidden_size 4: .* take 432 bytes, and 28 are free on host .*, which has 3 rank"):
        LocalWorld(3).run(lambda transport: command.check_memory(options, data, torch.device("cpu"), transport))


@pytest.mark.parametrize("samples", [None, NUM_TEST, NUM_TEST + 1, NUM_TEST - 1])
@pytest.mark.parametrize("epochs", [1.0, 1.25])
def test_the_last_model_is_the_best_where_all_samples_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int | None, epochs: float
) -> None:
    """Scores of a part of the test set are compared with none of the whole."""
    scores: list[float] = []

    def evaluate(self: Evaluator, model: Any, num_samples: int | None = None) -> dict[str, float]:
        scores.append(0.1 * (len(scores) + 1))
        return {"p1": scores[-1]}

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    summary = make_trainer(tmp_path / "run", epochs=epochs, eval_rounds=2, eval_samples=samples).run()
    assert summary is not None
    best, last = (load_model(tmp_path / "run" / name)[0] for name in (BEST_MODEL, LAST_MODEL))
    is_whole = samples is None or samples >= NUM_TEST
    # After rounds 2 and 4, and once more where that was another model or a part of the samples.
    assert len(scores) == (2 if is_whole and epochs == 1.0 else 3)
    assert summary["best"] == {"p1": scores[-1] if is_whole else scores[1]} and summary["final"] == {"p1": scores[-1]}
    assert all(torch.equal(best[name], last[name]) for name in best) == (is_whole or epochs == 1.0)


def test_who_writes_a_model_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk is no stuck rank."""
    under_way: list[str] = []
    found = []
    save_file = run_directory.save_file

    @contextlib.contextmanager
    def long_task(transport: Any, what: str) -> Iterator[None]:
        under_way.append(what)
        yield
        under_way.pop()

    def save(tensors: Any, path: Path, **options: Any) -> None:
        found.append((path.name, *under_way))
        save_file(tensors, path, **options)

    monkeypatch.setattr(trainer_module, "long_task", long_task, raising=False)
    monkeypatch.setattr(run_directory, "save_file", save)
    make_trainer(tmp_path / "run", epochs=1, eval_rounds=3).run()
    assert found[0] == (BEST_MODEL, "writing the best model")
    assert found[-1] == (LAST_MODEL, "writing the run directory") and all(len(one) == 2 for one in found)


def test_a_recording_that_cannot_be_opened_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    def begin(transport: LocalTransport) -> str:
        with pytest.raises(AgreedError) as error:
            make_trainer(tmp_path / "run", transport, record=True, epochs=1)
        return str(error.value)

    (tmp_path / "run" / CLAIMS_FILE).mkdir(parents=True)
    first, second = LocalWorld(2).run(begin)
    assert first == second and "Is a directory" in first and CLAIMS_FILE in first
    assert [path.name for path in (tmp_path / "run").iterdir()] == [CLAIMS_FILE]


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_recording_that_a_full_disk_refuses_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_freed: bool
) -> None:
    trainer = make_trainer(tmp_path / "run", record=True, epochs=1)
    assert isinstance(trainer._recording, RecordingFile)
    claims, disk = tmp_path / "run" / CLAIMS_FILE, tmp_path / "disk"
    claims.rename(disk)
    claims.symlink_to("/dev/full")

    def free(record: Any) -> None:
        if is_freed and record.round == 2:
            disk.rename(claims)

    trainer._session.records.append(free)
    if is_freed:
        trainer.run()
    else:
        with pytest.raises(AgreedError, match=r"run directory \S+run cannot be written: .*No space left on device"):
            trainer.run()
        disk.rename(claims)
    assert caplog.text.count(f"{CLAIMS_FILE} cannot be written: [Errno 28] No space left on device. The run goes on") == 1
    assert sorted(read_recording(tmp_path / "run")[1]) == ([0, 1, 2, 3] if is_freed else [])


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_the_cursor_is_there_again_however_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_interrupted: bool
) -> None:
    after_round = Trainer._after_round

    def show_and_end(trainer: Trainer, record: Any) -> None:
        after_round(trainer, record)
        assert capsys.readouterr().out.count("\x1b[?25l") == 1
        if is_interrupted:
            raise KeyboardInterrupt
        trainer._session.stop(agreed=True)
        trainer._session.preempted = signal.SIGINT

    monkeypatch.setattr(Trainer, "_after_round", show_and_end)
    monkeypatch.setattr(command, "open_data", lambda *_: (rows("train", 80), rows("test", NUM_TEST)))
    monkeypatch.setattr(command, "use_device", lambda *_, **options: torch.device("cpu"))
    options = TrainConfig(out=str(tmp_path / "run"), calibration=False, checkpoint_interval=0, hidden_size=4, epochs=2)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
        code = command.train(Config(batch_size=8, mega_batch=20), options, transport=LocalTransport(), terminal=True)
        assert code == EXIT_INTERRUPTED
    assert "\x1b[?25h" in capsys.readouterr().out
