"""calibrate: a whole calibration of one rank, with rounds and links made up, or with real steps of a small model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive.algorithm.ledger import round_size
from hvd_adaptive.calibrate import calibrator, rounds
from hvd_adaptive.calibrate.file import Calibration, LinkCalibration, chosen_options
from hvd_adaptive.calibrate.recommend import Recommendation
from hvd_adaptive.calibrate.rounds import Rounds
from hvd_adaptive.cli import calibrate as command
from hvd_adaptive.cli.option_sources import build_configs, read_config_file, with_config_file
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.records import RoundRecord
from hvd_adaptive.xmc.data import SparseDataset
from hvd_adaptive.xmc.train_config import TrainConfig

LINK = LinkCalibration(num_hosts=1, latency_s=1e-6, per_byte_s=1e-9, fit_error=0.1, bytes=[4096], seconds=[1e-3])
# What a rank measures of itself: steps of 64 samples take 10 ms.
RANK: dict[str, Any] = {
    "host": "alpha", "device": "cpu", "threads": 1, "fixed_s": 0.0, "per_work_s": 0.01 / 64, "fit_error": 0.01, "jitter": 0.02,
    "alone": 1.0, "memory": "not measured", "largest_batch": None, "batch_size": [32, 64], "step_work": [32.0, 64.0],
    "step_s": [5e-3, 1e-2],
}  # fmt: skip


class FakeRounds(Rounds):
    """Rounds over a link that takes `exchange_s`, or a quarter of it with codes; steps of 64 samples take 10 ms."""

    def __init__(self, config: Config, exchange_s: float, dataset_size: int) -> None:
        self.mega_batch, self.model_bytes = config.mega_batch_samples, 4000
        self.num_samples = round_size(0, dataset_size=dataset_size, mega_batch=self.mega_batch)
        num_steps = self.num_samples / 64
        self.most_fragments, self.weights_rows = 4, False
        self.payload_bytes = 4000 if config.compression == "none" else 1000
        exchange_s *= self.payload_bytes / self.model_bytes
        self.merge_s = exchange_s if config.merge_fragments == 1 else 0.0
        self.control_s = self.wait_s = 0.0
        compute_s = 0.01 * num_steps
        beside = config.strategy == "local" and config.merge_fragments > 1
        per_round = exchange_s * (1 if config.strategy == "local" else num_steps)
        self.round_s = self.seconds = max(compute_s, per_round) if beside else compute_s + per_round
        waits_s = 0.0 if config.strategy == "local" else per_round
        self._sums = {"num_steps": num_steps, "work": self.num_samples, "busy_s": compute_s, "claim_s": 0, "wait_s": waits_s}

    def total(self, *names: str) -> Any:
        return np.array([sum(self._sums[name] for name in names)])


def calibrate(config: Config, data: Any) -> tuple[Recommendation, Calibration]:
    one = calibrator.Calibrator(
        config, TrainConfig(hidden_size=4, device="cpu"), data, device=torch.device("cpu"), transport=LocalTransport(),
        memory_bytes=None, least_s=0.01, say=lambda line: None,
    )  # fmt: skip
    return one.run()


def pretend(monkeypatch: pytest.MonkeyPatch, exchange_s: float, dataset_size: int) -> list[tuple[Config, FakeRounds]]:
    """Has calibrations measure made-up ranks, links and rounds; returns a list that gets each configuration with its rounds."""
    played: list[tuple[Config, FakeRounds]] = []

    def play(config: Config, *args: Any, **options: Any) -> Rounds:
        played.append((config, FakeRounds(config, exchange_s, dataset_size)))
        return played[-1][1]

    # A model of 4,000 bytes.
    link = dataclasses.replace(LINK, per_byte_s=exchange_s / 4000)
    monkeypatch.setattr(calibrator, "play_rounds", play)
    monkeypatch.setattr(calibrator, "measure_link", lambda transport, device: link)
    monkeypatch.setattr(calibrator.Calibrator, "_measure_rank", lambda self: dict(RANK))
    return played


@pytest.mark.parametrize(("exchange_s", "fragments", "tried"), [(1e-3, 1, 0), (2.0, 4, 1)])
def test_fragments_are_tried_where_they_are_predicted_to_pay_and_taken_where_they_do(
    monkeypatch: pytest.MonkeyPatch, exchange_s: float, fragments: int, tried: int
) -> None:
    played = pretend(monkeypatch, exchange_s, 6400)
    chosen, found = calibrate(Config(), range(6400))
    assert found.predicted.merge_fragments == fragments and found.predicted.source == "measured"
    assert sum(config.merge_fragments > 1 for config, _ in played) == tried
    assert any(choice.source == "computed" for choice in found.choices)
    if tried:
        # With codes an exchange takes as long as the 50 steps between two merges, so that fragments hide it.
        assert found.predicted.compression == "maxmin:4" and chosen.mega_batch == found.predicted.mega_batch
        assert build_configs({"mega_batch": chosen.mega_batch, **chosen_options(found, ())})[0].merge_fragments == 4


@pytest.mark.parametrize(("exchange_s", "coded"), [(5e-4, False), (5e-3, True)])
@pytest.mark.parametrize("dataset_size", [400, 2200, 6400])
def test_codes_are_tried_by_a_steps_time_however_an_epoch_is_cut(
    monkeypatch: pytest.MonkeyPatch, dataset_size: int, exchange_s: float, coded: bool
) -> None:
    played = pretend(monkeypatch, exchange_s, dataset_size)
    _, found = calibrate(Config(mega_batch=3200), range(dataset_size))
    # An exchange takes a twentieth of a step, or a third of it. 25 steps have 1,600 samples, and real rounds 400, 2200 or 1600.
    assert any(config.strategy == "sync" and config.encodes for config, _ in played) == coded
    # A merge takes as long as such an exchange, once a round: as predicted, so measured.
    local = next(one for config, one in played if config.strategy == "local")
    assert found.choices[0].samples_per_s == pytest.approx(local.num_samples / local.seconds)


def test_few_data_are_merged_several_times_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    # An exchange of a second asks for more samples than there are. Where it takes no time, rounds are as short as those of train.
    for exchange_s, mega_batch in ((1.0, 64), (1e-6, 64)):
        pretend(monkeypatch, exchange_s, 400)
        assert calibrate(Config(), range(400))[0].mega_batch == mega_batch
    pretend(monkeypatch, 1.0, 400)
    assert calibrate(Config(batch_size=16), range(400))[0].mega_batch == 96


def test_a_rank_without_memory_for_a_sample_is_no_rank_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1e-3, 6400)
    monkeypatch.setattr(calibrator.Calibrator, "_measure_rank", lambda self: {**RANK, "largest_batch": 0})
    with pytest.raises(AgreedError, match="rank 0 has no memory for a batch of one sample"):
        calibrate(Config(), range(6400))


@pytest.mark.parametrize(
    "given",
    [{"min_batch_size": 64, "max_batch_size": 64}, {"min_batch_size": 32, "max_batch_size": 128, "micro_batch_size": 8}],
)
def test_the_file_holds_the_bounds_that_were_given(
    given: dict[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pretend(monkeypatch, 1e-3, 6400)
    monkeypatch.setattr(command, "open_data", lambda *args: (small_data(6400), None))
    monkeypatch.setattr(command, "use_device", lambda *args, **options: torch.device("cpu"))
    # The command changes it.
    caplog.set_level(logging.WARNING, "hvd_adaptive")
    file = tmp_path / "c.toml"
    config, train = build_configs(given, {"device": "cpu", "hidden_size": 4})
    command.calibrate(config, train, given, str(file), 0.01, LocalTransport())
    kept = read_config_file(str(file))
    assert {name: kept[name] for name in given} == given and kept["batch_size"] == 64


def test_where_sync_is_chosen_it_keeps_to_the_bounds_that_were_given_and_to_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    played = pretend(monkeypatch, 1e-6, 6400)
    monkeypatch.setattr(command, "open_data", lambda *args: (small_data(6400), None))
    monkeypatch.setattr(command, "use_device", lambda *args, **options: torch.device("cpu"))
    caplog.set_level(logging.WARNING, "hvd_adaptive")
    file, given = tmp_path / "c.toml", {"max_batch_size": 80}
    config, train = build_configs(given, {"device": "cpu", "hidden_size": 4})
    command.calibrate(config, train, given, str(file), 0.01, LocalTransport())
    assert next(config for config, _ in played if config.strategy == "sync").max_batch_size == 80
    said = capsys.readouterr().out
    assert "strategy sync" in said and "batch_size 64, max_batch_size 80, mega_batch" in said
    taken = with_config_file(str(file), {}, {}, takes_choice=True)
    assert taken["strategy"] == "sync" and taken["max_batch_size"] == 80 and "min_batch_size" not in taken


def small_data(num_samples: int) -> SparseDataset:
    """Rows with one feature and one label each."""
    ones = np.arange(num_samples + 1)
    features, labels = (np.arange(num_samples, dtype=np.int32) % number for number in (20, 7))
    return SparseDataset(
        name="a", split="train", num_features=20, num_labels=7, fingerprint="", x_indptr=ones, x_indices=features,
        x_values=np.ones(num_samples, np.float32), y_indptr=ones, y_indices=labels,
    )  # fmt: skip


# 25 steps of one rank have 400 samples.
@pytest.mark.parametrize("dataset_size", [150, 570])
def test_the_speed_is_that_of_the_samples_done(monkeypatch: pytest.MonkeyPatch, dataset_size: int) -> None:
    played: list[tuple[int, Sequence[RoundRecord]]] = []

    class KeptRounds(Rounds):
        def __init__(self, records: Sequence[RoundRecord], **options: Any) -> None:
            super().__init__(records, **options)
            played.append((self.mega_batch, list(records)))

    monkeypatch.setattr(rounds, "Rounds", KeptRounds)
    monkeypatch.setattr(calibrator, "measure_link", lambda transport, device: LINK)
    _, found = calibrate(Config(batch_size=16), small_data(dataset_size))
    speeds = []
    for planned, records in played:
        # Each round is a whole epoch, so the planned samples say nothing.
        if planned == 400:
            assert {record.num_samples for record in records} == {dataset_size * (i + 1) for i in range(len(records))}
            speeds.append(dataset_size * (len(records) - 1) / (records[-1].train_s - records[0].train_s))
    for strategy in ("sync", "horovod"):
        speed = next(one.samples_per_s for one in found.choices if one.strategy == strategy)
        assert any(speed == pytest.approx(one) for one in speeds), strategy


def test_a_rank_that_takes_less_than_an_eighth_of_the_batch_is_measured_at_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        if batch.num_samples > most:
            raise torch.OutOfMemoryError("no memory")
        return whole(model, optimizer, batch)

    whole = calibrator.local_step
    monkeypatch.setattr(calibrator, "local_step", step)
    monkeypatch.setattr(rounds, "local_step", step)
    monkeypatch.setattr(calibrator, "measure_link", lambda transport, device: LINK)
    most = 6
    chosen, found = calibrate(Config(batch_size=64), small_data(600))
    assert found.ranks[0].largest_batch == 6 and found.ranks[0].batch_size == [1, 3, 6]
    # A fifth is kept as reserve. Micro-batches of 4 would be less than an eighth of the batch, so the batch gets smaller.
    assert chosen.batch_size == 4 and "batch_size is 4 instead of 64: rank 0 has memory for 6 samples" in chosen.notes[0]
    most = 0
    with pytest.raises(RuntimeError, match="one sample does not fit into this rank's memory: use a smaller model"):
        calibrate(Config(batch_size=64), small_data(600))
    with pytest.raises(RuntimeError, match=r"a micro-batch of 8 does not fit .* use a smaller micro_batch_size or model"):
        calibrate(Config(batch_size=64, micro_batch_size=8), small_data(600))
