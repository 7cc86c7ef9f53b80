"""calibrate: what follows from measured steps, and the file."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.algorithm.speed_model import fit_line
from hvd_adaptive.calibrate.choices import choose, may_choose, may_cut, most_fragments, settled, table
from hvd_adaptive.calibrate.file import (
    Calibration,
    Choice,
    options_of,
    read_table,
    to_toml,
    write_file,
)
from hvd_adaptive.calibrate.memory_ceiling import largest_by_growth, limit_bytes, peak_bytes, reset_peak
from hvd_adaptive.calibrate.recommend import (
    predict,
    predict_fragments,
    recommend_batches,
    recommend_mega_batch,
)
from hvd_adaptive.cli import option_sources
from hvd_adaptive.cli.arguments import check_writable
from hvd_adaptive.cli.calibrate_options import check_calibrate
from hvd_adaptive.cli.option_sources import build_configs, read_config_file, with_config_file
from hvd_adaptive.cli.run import run_config
from hvd_adaptive.config import Config
from hvd_adaptive.wrap.run_options import RunConfig

RANK: dict[str, Any] = {
    "host": "alpha", "device": "cpu", "threads": 1, "fixed_s": 1e-3, "per_work_s": 1e-4, "fit_error": 0.01, "jitter": 0.02,
    "alone": 1.0, "together": 1.1, "slowdown": 1.0, "memory": "not measured", "batch_size": [32, 64], "step_work": [32.0, 64.0],
    "step_s": [4e-3, 7e-3],
}  # fmt: skip
TABLE: dict[str, Any] = {
    "format": 1, "created": "2026-11-21T16:00:00+00:00", "num_samples": 1000, "work": "samples", "work_per_sample": 1.0,
    "model_bytes": 4000, "claim_s": 2e-5, "claim_p99_s": 1e-4, "versions": {"torch": "2.13.0"},
    "ranks": [RANK, {**RANK, "largest_batch": 128}],
    "link": {"num_hosts": 1, "latency_s": 1e-3, "per_byte_s": 1e-9, "fit_error": 0.1, "bytes": [4096], "seconds": [1e-3]},
    "merge": {
        "mega_batch": [640], "payload_bytes": [4000], "merge_s": [2e-3], "control_s": [1e-3], "wait_s": [1e-3], "round_s": [0.1],
        "local_s": 1e-3,
    },
    "sync": {"step_s": [5e-3, 5e-3], "lengthened": [1.1, 1.1], "exchange_s": 1e-3},
    "horovod": {"step_s": [5e-3, 5e-3], "lengthened": [1.0, 1.0], "exchange_s": 1e-3},
    "predicted": {"samples_per_s": 1000.0},
}  # fmt: skip


@given(st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.integers(3, 8))
def test_a_line_is_found_again(fixed_s: float, per_work_s: float, num_sizes: int) -> None:
    work = 2.0 ** np.arange(num_sizes)
    a, c, error = fit_line(work, fixed_s + per_work_s * work)
    if per_work_s * np.median(work) > 0.1 * (fixed_s + per_work_s * np.median(work)):
        assert a == pytest.approx(fixed_s, rel=1e-6, abs=1e-9) and c == pytest.approx(per_work_s, rel=1e-6) and error < 1e-6
    assert a >= 0 and c > 0


def test_noise_gives_no_negative_part() -> None:
    a, c, error = fit_line(np.array([1.0, 2, 4]), np.array([0.9, 2.1, 4.4]))
    assert a == 0 and 0.9 < c < 1.2 and 0 < error < 0.3
    a, c, _ = fit_line(np.array([1.0, 2, 4]), np.array([5.0, 5, 4.9]))
    assert c > 0 and a > 4
    assert fit_line(np.array([8.0]), np.array([2.0])) == (0.0, 0.25, 0.0)
    with pytest.raises(ValueError, match="must be equally many, and > 0"):
        fit_line(np.array([1.0, 0]), np.array([1.0, 1]))


def batches(fixed_s: list[float], sample_s: list[float], **more: Any) -> Any:
    largest = np.array(more.pop("largest", [np.inf] * len(fixed_s)))
    options = {"batch_size": 64, "dataset_size": 10_000, **more}
    return recommend_batches(fixed_s=np.array(fixed_s), sample_s=np.array(sample_s), largest=largest, **options)


def test_bounds_follow_from_what_every_step_costs() -> None:
    # A step costs as much as 20 samples on the worse rank: half at 20, a tenth at 180.
    found = batches([1e-3, 2e-3], [1e-4, 1e-4])
    assert (found.batch_size, found.min_batch_size, found.max_batch_size, found.notes) == (64, 20, 180, [])
    # Without fixed cost the paper's bounds stay.
    found = batches([0, 0], [1e-4, 1e-4])
    assert (found.min_batch_size, found.max_batch_size) == (8, 64)
    # Where it dominates, larger batches are named, not taken: accuracy was not measured.
    found = batches([0.1, 0], [1e-4, 1e-4])
    assert (found.batch_size, found.min_batch_size, found.max_batch_size) == (64, 64, 512)
    assert "batches of 512 would be 5.6" in found.notes[0] and "rank 0" in found.notes[0]


def test_memory_bounds_batches() -> None:
    found = batches([1e-3, 2e-3], [1e-4, 1e-4], largest=[np.inf, 100.0])
    assert (found.batch_size, found.max_batch_size) == (64, 80)
    found = batches([1e-3, 2e-3], [1e-4, 1e-4], largest=[np.inf, 40.0])
    assert (found.batch_size, found.max_batch_size) == (32, 32) and "batch_size is 32 instead of 64: rank 1" in found.notes[0]
    assert found.min_batch_size <= 32
    with pytest.raises(ValueError, match="rank 0 has no memory for a batch of one sample"):
        batches([1e-3], [1e-4], largest=[1.0])


def test_given_bounds_stay_unless_memory_forbids_them() -> None:
    # 20 and 180, were none given.
    for low, high, found_low, found_high in ((64, 64, 64, 64), (8, None, 8, 180), (None, 512, 20, 512)):
        found = batches([1e-3, 2e-3], [1e-4, 1e-4], min_batch_size=low, max_batch_size=high)
        assert (found.min_batch_size, found.max_batch_size, found.notes) == (found_low, found_high, [])
    # Larger batches are not named where they are not wanted.
    assert batches([0.1], [1e-4], max_batch_size=64).notes == []
    found = batches([1e-3], [1e-4], min_batch_size=64, max_batch_size=200, largest=[100.0])
    assert (found.min_batch_size, found.max_batch_size) == (64, 80)
    assert found.notes == ["max_batch_size is 80 instead of 200: rank 0 has memory for 100 samples"]
    found = batches([1e-3], [1e-4], min_batch_size=64, max_batch_size=64, largest=[40.0])
    assert (found.batch_size, found.min_batch_size, found.max_batch_size) == (32, 32, 32)
    assert [note.partition(":")[0] for note in found.notes] == [
        "batch_size is 32 instead of 64", "min_batch_size is 32 instead of 64", "max_batch_size is 32 instead of 64"
    ]  # fmt: skip


@given(st.floats(0, 0.2), st.floats(1e-6, 1e-2), st.integers(1, 1024), st.integers(100, 10**6))
def test_any_recommendation_is_a_valid_configuration(fixed_s: float, sample_s: float, batch_size: int, dataset: int) -> None:
    found = batches([fixed_s], [sample_s], batch_size=batch_size, dataset_size=dataset)
    mega, _ = recommend_mega_batch(
        batch_size=found.batch_size, least=100 * found.batch_size, communication_s=0.01, samples_per_s=1 / sample_s, share=0.03,
        dataset_size=dataset,
    )  # fmt: skip
    config, _ = build_configs({
        "batch_size": found.batch_size, "min_batch_size": found.min_batch_size, "max_batch_size": found.max_batch_size,
        "mega_batch": mega,
    })  # fmt: skip
    assert config.mega_batch_samples % config.batch_size == 0


def test_merges_get_their_share_of_the_time() -> None:
    options: dict[str, Any] = {"batch_size": 64, "least": 640, "samples_per_s": 10_000.0, "share": 0.03}
    mega, note = recommend_mega_batch(communication_s=0.03, dataset_size=100_000, **options)
    assert note is None and mega % 64 == 0
    assert 0.03 / (0.03 + mega / 10_000) == pytest.approx(0.03, rel=0.02)
    assert recommend_mega_batch(communication_s=1e-6, dataset_size=100_000, **options) == (640, None)
    # 3.1%, in a quarter of the data, is as good as 3%.
    assert recommend_mega_batch(communication_s=0.03, dataset_size=37_000, **options)[1] is None
    mega, note = recommend_mega_batch(communication_s=1.0, dataset_size=10_000, **options)
    assert mega == 2496 and note is not None and "merges take 80% of the time" in note


def test_the_prediction_counts_steps_and_the_end_of_a_round() -> None:
    # 2,000 and 1,000 samples a second, and 0.1 s of each 0.5 s is not computing.
    found = predict(
        step_s=np.array([0.032, 0.064]), batch_size=64, mega_batch=1200, merge_s=0.05, control_s=0.02, wait_s=0.03
    )
    assert found == pytest.approx(1200 / 0.5)


def test_fragments_take_as_long_as_steps_or_exchange_whichever_is_longer() -> None:
    # 3,000 samples a second: 0.4 s of steps.
    options: dict[str, Any] = {
        "step_s": np.array([0.032, 0.064]), "batch_size": 64, "mega_batch": 1200, "rest_s": 0.05, "control_s": 0.02,
        "wait_s": 0.03,
    }  # fmt: skip
    assert predict_fragments(exchange_s=0.3, **options) == pytest.approx(1200 / 0.5)
    assert predict_fragments(exchange_s=0.9, **options) == pytest.approx(1200 / 1.0)


def test_what_does_not_fit_into_memory_is_cut_into_micro_batches_where_that_is_allowed() -> None:
    found = batches([1e-3, 2e-3], [1e-4, 1e-4], largest=[np.inf, 45.0], may_cut=True)
    # 36 samples fit, and 32 is the largest part of 64 that does.
    assert (found.batch_size, found.min_batch_size, found.max_batch_size, found.micro_batch_size) == (64, 64, 64, 32)
    # 64 samples take 8.4 ms at once, 10.4 ms in two parts.
    assert "micro_batch_size is 32: rank 1 has memory for 45" in found.notes[0] and "up to 1.24 times as long" in found.notes[0]
    config = settled(Config(), found)
    assert may_choose(config, (), "sync", "none") and config.micro_batch_size == 32
    # Parts of less than an eighth would be mostly overhead, and whole batches are left alone where they fit.
    assert batches([1e-3], [1e-4], largest=[5.0], may_cut=True).micro_batch_size is None
    assert batches([1e-3], [1e-4], largest=[80.0], may_cut=True).micro_batch_size is None
    assert may_cut(Config()) and not may_cut(Config(micro_batch_size=32)) and not may_cut(Config(work="nonzeros"))
    # With a smaller batch the learning rate keeps its meaning in `local` alone.
    smaller = settled(Config(), batches([1e-3], [1e-4], largest=[40.0]))
    assert smaller.reference_batch_size == 64 and not may_choose(smaller, (), "sync", "none")


def test_micro_batches_for_memory_go_with_every_strategy_that_has_them() -> None:
    found = read_table(TABLE, "x")
    values = {"batch_size": 64, "min_batch_size": 64, "max_batch_size": 64, "micro_batch_size": 32}
    assert options_of(values, found, strategy="sync") == {"batch_size": 64, "micro_batch_size": 32}
    assert options_of(values, found, strategy="horovod") == {"batch_size": 64}
    # Plain Horovod's batches have no bounds.
    assert options_of({"max_batch_size": 64}, found, strategy="horovod") == {}
    # A script's forwards take what it gives them, so that a share is what has to fit: 128 samples are the most of rank 1.
    for strategy in ("local", "sync"):
        assert options_of(values, found, strategy=strategy, for_script=True)["max_batch_size"] == 102
        assert "micro_batch_size" not in options_of(values, found, strategy=strategy, for_script=True)
    for strategy in ("local", "sync", "horovod"):
        build_configs({"strategy": strategy, **options_of(values, found, strategy=strategy)})


def test_growth_gives_a_ceiling_only_where_it_can_be_seen() -> None:
    gib = 2**30
    largest, how = largest_by_growth({64: gib, 128: gib + 64 * 2**20}, 2 * gib)
    assert largest == 128 + (2 * gib - gib - 64 * 2**20) // 2**20 and "1024 KiB a sample" in how
    assert largest_by_growth({64: gib, 128: gib + 4096}, 2 * gib)[0] is None
    assert largest_by_growth({64: gib}, 2 * gib)[0] is None and largest_by_growth({1: 0, 2: 0}, None)[0] is None
    assert largest_by_growth({64: gib, 128: gib + 64 * 2**20}, gib // 2)[0] == 0


def test_a_process_may_grow_by_its_part_of_what_is_free() -> None:
    # Its peak, with which the limit is compared, holds what it has already.
    reset_peak()
    assert limit_bytes(2 << 30, 2) == pytest.approx(peak_bytes() + (1 << 30), abs=64 << 20) and limit_bytes(None, 2) is None


@pytest.mark.parametrize("name", ["c.toml", "c.json"])
def test_the_file_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    found = read_table(TABLE, "x")
    options = {"batch_size": 64, "data": 'a "b" \\ \x7f é\n', "slowdown": None, "perturbation": True, "lr": 0.5}
    write_file(tmp_path / name, options, found, comment="a comment")
    whole = read_config_file(str(tmp_path / name), measurements=True)
    assert read_table(whole.pop("calibration"), "x") == found
    assert whole == {key: value for key, value in options.items() if value is not None}
    # What train reads has no table left in it.
    assert read_config_file(str(tmp_path / name)) == whole


def test_toml_of_nested_tables() -> None:
    text = to_toml({"a": 1, "t": {"x": [1, 2], "u": {"y": "z"}}, "l": [{"v": 1.5}, {"v": 2.0}], "none": None})
    assert text == 'a = 1\n\n[t]\nx = [1, 2]\n\n[t.u]\ny = "z"\n\n[[l]]\nv = 1.5\n\n[[l]]\nv = 2.0\n'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(format=2), "calibration.format must be 1, got 2"),
        (lambda t: t.pop("claim_s"), "calibration.claim_s is missing"),
        (lambda t: t["ranks"][1].pop("host"), r"calibration.ranks\[1\].host is missing"),
        (lambda t: t["ranks"][0].update(fixed_s="fast"), r"ranks\[0\].fixed_s must be a number >= 0, got 'fast'"),
        (lambda t: t["ranks"][0].update(fixed_s=float("nan")), "must be a number >= 0, got nan"),
        (lambda t: t["ranks"][1].update(per_work_s=0), r"calibration.ranks\[1\].per_work_s must be > 0, got 0.0"),
        (lambda t: t.update(model_bytes=0), "calibration.model_bytes must be > 0, got 0"),
        (lambda t: t["link"].update(num_hosts=0), "calibration.link.num_hosts must be > 0, got 0"),
        (lambda t: t["ranks"][0].update(step_s=[]), r"ranks\[0\]: batch_size, step_work and step_s must have one entry"),
        (lambda t: t["link"].update(speed=1), "link.speed is unknown"),
        (lambda t: t.update(merge=[]), r"merge must be a table, got \[\]"),
        (lambda t: t.update(ranks=[]), "ranks must have at least one rank"),
        (lambda t: t.update(num_samples=1.5), "num_samples must be a whole number >= 0, got 1.5"),
        (lambda t: t.update(versions={"torch": 2}), "versions must be a table of texts"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, change: Any, message: str) -> None:
    table = json.loads(json.dumps(TABLE))
    change(table)
    (tmp_path / "c.json").write_text(json.dumps({"calibration": table}))
    with pytest.raises(ValueError, match=f"c.json: .*{message}"):
        read_config_file(str(tmp_path / "c.json"))


def test_sync_is_not_bound_by_what_was_recommended_for_local(tmp_path: Path) -> None:
    file = str(tmp_path / "c.json")
    write_file(Path(file), {"min_batch_size": 32, "max_batch_size": 256}, read_table(TABLE, "x"), comment="")
    assert with_config_file(file, {"lr": 0.5}, {}) == {"min_batch_size": 32, "max_batch_size": 256, "lr": 0.5}
    for options, environment in (({"strategy": "sync"}, {}), ({}, {"strategy": "sync"})):
        # Of 128 samples that the memory of rank 1 takes.
        assert with_config_file(file, options, environment) == {"max_batch_size": 102, **options}
    write_file(Path(file), {"max_batch_size": 256}, read_table({**TABLE, "ranks": [RANK, RANK]}, "x"), comment="")
    assert with_config_file(file, {"strategy": "sync"}, {}) == {"strategy": "sync"}
    assert with_config_file(file, {"strategy": "sync", "min_batch_size": 8}, {})["min_batch_size"] == 8
    # Bounds that were given stay, unless memory sets a smaller one.
    for high, bound in ((90, 90), (120, 102)):
        given = read_table({**TABLE, "bounds": ["max_batch_size"]}, "x")
        write_file(Path(file), {"min_batch_size": 32, "max_batch_size": high}, given, comment="")
        assert with_config_file(file, {"strategy": "sync"}, {}) == {"strategy": "sync", "max_batch_size": bound}
        assert with_config_file(file, {"strategy": "horovod"}, {}) == {"strategy": "horovod"}
    # In a run's own configuration it was somebody's choice.
    (tmp_path / "c.json").write_text(json.dumps({"min_batch_size": 32, "calibration": True, "strategy": "sync"}))
    assert with_config_file(file, {}, {})["min_batch_size"] == 32


def ways(*speeds: tuple[str, str, float]) -> list[Choice]:
    return [Choice(strategy=s, compression=c, mega_batch=640, samples_per_s=speed) for s, c, speed in speeds]


def test_the_choice_weighs_speed_against_samples_and_keeps_what_was_given_where_the_gain_is_small() -> None:
    # `local` needs 1.2 times the samples: 1,199 a second of it are not worth 1,000 of `sync`, but no tenth worse either.
    few = ways(("local", "none", 1100), ("sync", "none", 1000))
    assert choose(few) is few[0]
    better = ways(("local", "none", 1000), ("local", "maxmin:4", 1099), ("sync", "none", 950), ("horovod", "none", 2000))
    assert choose(better) is better[2]
    coded = ways(("local", "none", 1000), ("local", "maxmin:4", 1300), ("sync", "none", 900))
    assert choose(coded) is coded[1]
    lines = table(coded, coded[1])
    assert lines[2].split() == ["local,", "maxmin:4", "640", "1,300", "1.20x", "1.00", "<-", "chosen"] and "1.30" in lines[1]
    assert lines[3].split() == ["sync", "-", "900", "1.00x", "1.20"]


def test_fragments_are_chosen_only_where_they_gain_more_than_the_samples_that_they_need() -> None:
    whole, sync = ways(("local", "maxmin:4", 1000), ("sync", "none", 500))
    four = dataclasses.replace(whole, merge_fragments=4, samples_per_s=1150, source="computed")
    # 15% faster, but 7% more samples.
    assert choose([whole, four, sync]) is whole
    faster = dataclasses.replace(four, samples_per_s=1200)
    assert choose([whole, faster, sync]) is faster
    two = dataclasses.replace(faster, merge_fragments=2)
    assert choose([whole, two, sync]) is whole
    lines = table([whole, two], whole)
    assert lines[2].split() == ["local,", "maxmin:4,", "2", "fragments", "640", "~1,200", "1.36x", "0.94"] and lines[3][0] == "~"
    assert most_fragments(["a.weight", "b.weight"], [10, 10]) == 2 and most_fragments(["a.weight", "a.bias"], [10, 1]) is None
    assert most_fragments([f"blocks.{i}.weight" for i in range(6)], [9] * 6) == 4


def test_nothing_is_chosen_that_the_given_options_forbid() -> None:
    assert may_choose(Config(), {"batch_size"}, "sync", "maxmin:4") and may_choose(Config(), (), "local", "maxmin:4")
    # train takes no choice where one of the two stands in the file, on the command line or in a variable.
    assert not may_choose(Config(), {"strategy"}, "local", "maxmin:4")
    assert not may_choose(Config(compression="fp16"), (), "sync", "none")
    assert may_choose(Config(), (), "local", "maxmin:4", 2) and not may_choose(Config(), {"merge_fragments"}, "local", "none", 2)
    assert not may_choose(Config(merge_weights="fisher-rows"), {"merge_weights"}, "local", "none", 2)
    # It would refuse these together.
    assert not may_choose(Config(merge_period="auto"), {"merge_period"}, "sync", "none")
    assert not may_choose(Config(sparse_merge="always"), {"sparse_merge"}, "local", "maxmin:4")


# The data and the model of TABLE.
predicted_speed = functools.partial(option_sources.predicted_speed, num_samples=1000, model_bytes=4000)


def test_train_takes_the_recommended_way_unless_one_is_given_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "c.json"
    chosen = {"strategy": "sync", "compression": "maxmin:4", "mega_batch": 640, "samples_per_s": 1000.0}
    values = {"mega_batch": 640, "max_batch_size": 180, "calibration": {**TABLE, "predicted": chosen, "choices": [chosen]}}
    file.write_text(json.dumps(values))
    taken = with_config_file(str(file), {}, {}, takes_choice=True)
    assert (taken["strategy"], taken["compression"], taken["max_batch_size"]) == ("sync", "maxmin:4", 102)
    assert predicted_speed(str(file), build_configs(taken)[0], world_size=2) == 1000
    assert predicted_speed(str(file), build_configs(taken)[0], world_size=3) is None
    assert predicted_speed(None, Config(), world_size=2) is None
    # Nor for other batches or speeds than were measured, which rank 0 says in a line.
    caplog.set_level("INFO", "hvd_adaptive")
    for other, said in (
        ({"max_batch_size": 90}, "max_batch_size 102; this run has max_batch_size 90: no speed is predicted, calibrate again"),
        ({"slowdown": "1,2"}, "slowdown 1,1; this run has slowdown 1,2: no"),
    ):
        assert predicted_speed(str(file), build_configs(taken, other)[0], world_size=2) is None
        assert f"c.json was measured with {said}" in caplog.messages[-1]
    assert predicted_speed(str(file), build_configs(taken)[0], world_size=2, num_samples=400, model_bytes=2000) is None
    assert "1,000 samples, a model of 0.004 MB; this run has 400 samples, a model of 0.002 MB: no" in caplog.messages[-1]
    file.write_text(json.dumps({**values, "batch_size": 32}))
    assert predicted_speed(str(file), build_configs(taken)[0], world_size=2) is None
    assert "batch_size 32; this run has batch_size 64" in caplog.messages[-1] and len(caplog.messages) == 4
    file.write_text(json.dumps(values))
    # Of a way chosen by hand the prediction is there where it was measured.
    by_hand = {"strategy": "local", "compression": "none", "mega_batch": 640}
    more = [chosen, {**by_hand, "samples_per_s": 900.0}, {**by_hand, "merge_fragments": 2, "samples_per_s": 950.0}]
    more[2]["source"] = "computed"
    file.write_text(json.dumps({**values, "calibration": {**TABLE, "predicted": chosen, "choices": more}}))
    assert predicted_speed(str(file), Config(**by_hand, max_batch_size=180), world_size=2) == 900
    assert predicted_speed(str(file), Config(**by_hand, merge_fragments=2), world_size=2) is None
    assert predicted_speed(str(file), Config(**{**by_hand, "mega_batch": 1280}), world_size=2) is None
    fragments = {**by_hand, "merge_fragments": 2, "samples_per_s": 950.0}
    file.write_text(json.dumps({**values, "calibration": {**TABLE, "predicted": fragments, "choices": [fragments]}}))
    taken = build_configs(with_config_file(str(file), {}, {}, takes_choice=True))[0]
    assert taken.merge_fragments == 2 and predicted_speed(str(file), taken, world_size=2) == 950
    assert "merge_fragments" not in with_config_file(str(file), {"compression": "fp16"}, {}, takes_choice=True)
    file.write_text(json.dumps({**values, "calibration": {**TABLE, "predicted": chosen, "choices": [chosen]}}))
    for by_hand, environment in (({"strategy": "local"}, {}), ({}, {"compression": "fp16"})):
        taken = with_config_file(str(file), by_hand, environment, takes_choice=True)
        assert "compression" not in taken and taken.get("strategy", "local") == "local" and taken["max_batch_size"] == 180
        assert predicted_speed(str(file), build_configs(environment, taken)[0], world_size=2) is None
    # A script trains another model: nothing is compressed that was not asked for.
    assert not run_config(argparse.Namespace(config=str(file)), {}).merging().encodes
    # Files of older versions say nothing of it.
    file.write_text(json.dumps({"mega_batch": 640, "calibration": TABLE}))
    assert with_config_file(str(file), {}, {}, takes_choice=True)["strategy"] == "local"


def test_run_takes_from_a_file_what_it_knows(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"batch_size": 64, "mega_batch": 640, "max_batch_size": 180, "calibration": TABLE}))
    config = run_config(argparse.Namespace(config=str(file)), {})
    assert config.max_batch_size == 102 and config.mega_batch is None
    local = run_config(argparse.Namespace(config=str(file), strategy="local"), {})
    file.write_text(json.dumps({"mega_batch": 640, "max_batch_size": 180, "lr_rule": "auto", "strategy": "local"}))
    assert run_config(argparse.Namespace(config=str(file)), {}).lr_rule == "linear"
    file.write_text(json.dumps({"batch_size": 64, "mega_batch": 640, "max_batch_size": 180, "calibration": TABLE}))
    assert local.mega_batch == 640 and local.max_batch_size == 180
    assert run_config(argparse.Namespace(config=str(file)), {"HVD_ADAPTIVE_STRATEGY": "local"}).max_batch_size == 180
    assert run_config(argparse.Namespace(config=str(file), max_batch_size="90"), {}).max_batch_size == 90
    with pytest.raises(ValueError, match="mega_batch 64 needs strategy local"):
        run_config(argparse.Namespace(config=str(file), mega_batch="64"), {})
    # How gradients are encoded is for every strategy.
    file.write_text(json.dumps({"compression": "maxmin:4", "outer_lr": 0.5}))
    config = run_config(argparse.Namespace(config=str(file)), {})
    assert config.compression == "maxmin:4" and config.outer_lr == RunConfig().outer_lr
    file.write_text('{"bach_size": 64}')
    with pytest.raises(ValueError, match="unknown option 'bach_size'; did you mean batch_size"):
        run_config(argparse.Namespace(config=str(file)), {})


def test_a_read_calibration_is_typed() -> None:
    found = read_table(TABLE, "x")
    assert isinstance(found, Calibration) and found.ranks[1].largest_batch == 128 and found.ranks[0].largest_batch is None


@pytest.mark.parametrize(
    ("config", "out", "seconds", "message"),
    [
        (Config(strategy="sync"), "a.toml", 1.0, "got strategy 'sync': leave it out, and choose by hand later"),
        (Config(logical_ranks=4), "a.toml", 1.0, "^calibrate measures the ranks that there are, and logical_ranks 4 follow"),
        (Config(), "a.txt", 1.0, r"--out must end in \.toml or \.json"),
        (Config(), "a.toml", 0.0, "--seconds must be > 0 and finite, got 0"),
        (Config(), "a.toml", float("nan"), "--seconds must be > 0 and finite, got nan"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(config: Config, out: str, seconds: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_calibrate(config, out, seconds)


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--out /proc/x.toml: cannot be written: No such file"):
        check_writable("--out", Path("/proc/x.toml"))
    old = tmp_path / "old.toml"
    old.write_text("seed = 1\n")
    check_writable("--out", old)
    check_writable("--out", tmp_path / "new.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["old.toml"] and old.read_text() == "seed = 1\n"
