"""Configuration: every bad value is refused by name, sources are ranked, files round-trip."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_adaptive.cli.main import _train_configs, main
from hvd_adaptive.cli.option_sources import build_configs, read_config_file, read_environment, run_path
from hvd_adaptive.cli.parser import make_parser
from hvd_adaptive.cli.run import run_config
from hvd_adaptive.cli.train import recorded
from hvd_adaptive.cli.use_model import choose_data
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.config import Config
from hvd_adaptive.session.resume import Identity
from hvd_adaptive.validation import parse_slowdown
from hvd_adaptive.wrap.run_options import RunConfig
from hvd_adaptive.xmc.train_config import TrainConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"min_batch_size": 512, "max_batch_size": 256},
            "min_batch_size must be <= max_batch_size, got 512 > 256",
        ),
        ({"batch_size": 64, "max_batch_size": 32}, "batch_size must be within"),
        ({"batch_size": 0}, "batch_size must be > 0, got 0"),
        ({"batch_size": "64"}, "batch_size must be an int, got '64'"),
        ({"batch_size": True}, "batch_size must be an int, got True"),
        ({"island": 2}, 'island must be a str, got 2: write "2"'),
        ({"lr_decay": float("nan")}, "lr_decay must be finite"),
        ({"seed": 10**20}, "seed must be a number of 64 bits .*, got 100000000000000000000"),
        ({"strategy": "locale"}, "strategy must be one of local, sync, horovod, sma, got 'locale'"),
        (
            {"accumulation_steps": 2},
            "accumulation_steps 2 needs strategy sync, got 'local': it would have no effect",
        ),
        ({"strategy": "horovod", "global_batch_size": 64}, "global_batch_size 64 needs strategy sync, got 'horovod'"),
        ({"strategy": "horovod", "max_batch_size": 64}, "max_batch_size 64 needs strategy local or sync, got 'horovod'"),
        ({"strategy": "sma", "min_batch_size": 8}, "min_batch_size 8 needs strategy local or sync, got 'sma'"),
        ({"strategy": "sync", "accumulation_steps": 0}, "accumulation_steps must be > 0"),
        ({"strategy": "sync", "work": "nonzeros"}, "work 'nonzeros' needs strategy local, got 'sync'"),
        (
            {"strategy": "sync", "batch_size_rule": "paper"},
            "batch_size_rule must be one of proportional, fixed, static for strategy 'sync', got 'paper'",
        ),
        ({"batch_size_rule": "static"}, "heterogpu, proportional for strategy 'local', got 'static'"),
        ({"compression": "fp16", "strategy": "sma"}, "compression 'fp16' needs strategy local or sync, got 'sma'"),
        ({"compression": "fp16", "auto_bits": 9}, "auto_bits chooses bits of maxmin codes: it needs compression 'maxmin:BITS'"),
        ({"compression": "maxmin:4", "auto_bits": -1}, "auto_bits must be >= 0"),
        ({"compression": "maxmin:1", "auto_bits": 9}, "auto_bits needs a compression whose first codec is maxmin of 2 to 8 bits"),
        ({"compression": "fp8"}, "compression: unknown codec 'fp8': known are none, fp16, bf16, maxmin"),
        ({"compression": "maxmin:99"}, r"compression: codec 'maxmin:99': maxmin: bits must be in \[1, 8\], got 99"),
        ({"compression": ""}, "compression: unknown codec ''"),
        ({"compression": "none; head*=zip"}, "compression: unknown codec 'zip'"),
        (
            {"strategy": "sync", "loss_reduction": "targets", "compression": "maxmin:4"},
            "loss_reduction 'targets' with a compression needs error_feedback False, got True",
        ),
        (
            {"strategy": "sync", "loss_reduction": "targets", "compression": "maxmin:4; b*=fp16", "error_feedback": False},
            "needs another compression than fp16",
        ),
        ({"compression": "fp16", "sparse_merge": "always"}, "compression 'fp16' needs sparse_merge auto or never, got 'always'"),
        ({"compression": "fp16", "sparse_merge": "always"}, "compression .fp16. needs sparse_merge auto or never, got .always."),
        ({"strategy": "sync", "merge_weights": "fisher-rows"}, "merge_weights 'fisher-rows' needs strategy local, got 'sync'"),
        ({"compression": "fp16", "reducer": "auto"}, "reducer must be one of by-host, sra, hierarchical, allreduce, got 'auto'"),
        ({"logical_ranks": 2, "dispatch": "equal"}, "logical_ranks needs dispatch dynamic, got 'equal'"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"perturbation": True}, "perturbation True needs merge_weights paper or heterogpu, got 'auto'"),
        ({"perturbation_delta": 0.2}, "perturbation_delta 0.2 needs perturbation True, got False"),
        ({"strategy": "horovod", "outer_momentum": 0.5}, "outer_momentum 0.5 needs strategy local or sma, got 'horovod'"),
        ({"merge_share": 0.1}, "merge_share 0.1 needs merge_period auto, got None"),
        ({"batch_size_step": 8.0}, "batch_size_step 8.0 needs batch_size_rule paper or heterogpu, got 'fixed'"),
        ({"reducer": "hierarchical"}, "reducer 'hierarchical' needs a compression, got 'auto'"),
        ({"stall_limit_s": 0.5}, "stall_limit_s must be >= 1"),
        ({"bach_size": 3}, "unknown option 'bach_size'; did you mean batch_size"),
        ({"target_p1": 1.5}, r"target_p1 must be in \(0, 1\]"),
        ({"test_data": "x"}, "test_data needs data"),
        ({"momentum": 0.9}, "momentum 0.9 needs optimizer momentum, got 'rowwise-adagrad'"),
        ({"optimizer": "adagrad", "weight_decay": 0.1}, "weight_decay 0.1 needs input_gradients 'dense' or"),
        ({"input_gradients": "dense", "weight_decay": 0.1}, "needs another optimizer than 'rowwise-adagrad'"),
        ({"patience": 0}, "patience must be > 0, got 0"),
        ({"patience": 3, "eval_rounds": 0}, "patience needs evaluations"),
        ({"target_p1": 0.5, "eval_rounds": 0}, "target_p1 needs evaluations"),
        ({"input_gradients": "dense", "sparse_merge": "always"}, "needs input_gradients 'sparse'"),
        ({"strategy": "sync", "loss_reduction": "targets"}, "is for your own loop, which counts them in batch.num_targets"),
        ({"lr": float("inf")}, "lr must be finite"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"merge_share": 1.0}, r"merge_share must be in \(0, 1\), got 1.0"),
        ({"slowdown": "1,a"}, "slowdown: '1,a' is not a list of numbers"),
        ({"slowdown": "1,0.5"}, "factors must be finite and >= 1"),
        ({"slowdown": "5:1,2"}, "a schedule starts at 0"),
        ({"slowdown": "0:1,2;3:1"}, "every entry has as many factors"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_configs(values)


def test_an_option_that_there_is_not_is_told_with_its_like() -> None:
    with pytest.raises(TypeError, match="Config has no option 'bath_size': did you mean batch_size or min_batch_size"):
        Config(bath_size=3)  # type: ignore[call-arg]


def test_the_config_of_an_older_run_is_read() -> None:
    for strategy in ("local", "sync", "horovod"):
        assert Config(strategy=strategy, merge_period="fixed", merge_share=0.03).merge_period == "fixed"
    with pytest.raises(ValueError, match="merge_period 'auto' needs strategy local"):
        Config(strategy="sync", merge_period="auto")


def test_schedules_are_parsed() -> None:
    assert parse_slowdown("4,2") == [(0.0, (4.0, 2.0))]
    assert parse_slowdown("0:1,2;30:2,1") == [(0.0, (1.0, 2.0)), (30.0, (2.0, 1.0))]


def test_defaults_follow_the_batch_size() -> None:
    config = Config(batch_size=128)
    assert config.batch_size_bounds == (16, 128)
    assert config.mega_batch_samples == 6_400
    assert config.batch_size_step_samples == 8
    assert Config(batch_size_rule="heterogpu").batch_size_step_samples == 32
    assert [Config(strategy=name).size_rule for name in ("local", "sync", "horovod")] == [
        "fixed",
        "proportional",
        "fixed",
    ]
    assert Config(batch_size_rule="proportional").batch_size_bounds == (8, 512)


def test_arguments_beat_the_file_and_that_beats_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('batch-size = 32\nlr_rule = "sqrt"\n')
    config, train = build_configs(
        read_environment(
            {"HVD_ADAPTIVE_BATCH_SIZE": "8", "HVD_ADAPTIVE_SEED": "7", "HVD_ADAPTIVE_LR": "2", "HOME": "x"}
        ),
        read_config_file(str(file)),
        {"lr_rule": "none"},
    )
    assert (config.batch_size, config.seed, config.lr_rule, train.lr) == (32, 7, "none", 2.0)


def test_test_data_go_with_the_data_that_they_were_named_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would train on one data set and be scored on another."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.json"

    def chosen(*arguments: str, command: str = "train") -> tuple[str | None, str | None]:
        train = _train_configs(make_parser().parse_args([command, *arguments]))[1]
        return train.data, train.test_data

    a, of_file = str(tmp_path / "a"), ("--config", str(file))
    file.write_text(json.dumps({"data": a, "test_data": "/test-of-a"}))
    for command in ("train", "calibrate"):
        assert chosen(*of_file, command=command) == (a, "/test-of-a")
        assert chosen(*of_file, "--data", "b", command=command) == ("b", None)
        assert chosen(*of_file, "--data", "b", "--test-data", "t", command=command) == ("b", "t")
        assert chosen(*of_file, "--test-data", "t", command=command) == (a, "t")
        # As docs/calibrate.md has it: the same data.
        assert chosen(*of_file, "--data", "a", command=command) == ("a", "/test-of-a")
    monkeypatch.setenv("HVD_ADAPTIVE_TEST_DATA", "/t")
    assert chosen("--data", "b") == ("b", None)
    monkeypatch.setenv("HVD_ADAPTIVE_DATA", "/v")
    assert chosen() == ("/v", "/t") and chosen("--data", "b") == ("b", None) and chosen(*of_file) == (a, "/test-of-a")
    file.write_text(json.dumps({"data": a}))
    assert chosen(*of_file) == (a, None)


def test_a_runs_own_configuration_can_be_read_back(tmp_path: Path) -> None:
    config, train = build_configs({"slowdown": "4,2", "calibration": False, "epochs": 2})
    file = tmp_path / "config.json"
    values = {**dataclasses.asdict(train), **dataclasses.asdict(config)}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    assert build_configs(read_config_file(str(file))) == (config, train)


@pytest.mark.parametrize("strategy", ["sync", "local"])
def test_a_trainings_own_configuration_goes_for_a_script(tmp_path: Path, strategy: str) -> None:
    """It has all options of train, whose defaults are for its own model."""
    file = tmp_path / "config.json"

    def of_script(**chosen: Any) -> RunConfig:
        config, train = build_configs({"strategy": strategy, **chosen})
        values = {**dataclasses.asdict(train), **dataclasses.asdict(config)}
        file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
        return run_config(argparse.Namespace(config=str(file)), {})

    assert of_script() == RunConfig(strategy=strategy)
    chosen = {"compression": "maxmin:4", "reducer": "allreduce", "stall_limit_s": 20.0}
    assert of_script(**chosen) == RunConfig(strategy=strategy, **chosen)
    # A short file has only what somebody has chosen.
    file.write_text(json.dumps({"strategy": strategy, "stall_limit_s": 60.0, "reducer": "by-host"}))
    assert run_config(argparse.Namespace(config=str(file)), {}) == RunConfig(strategy=strategy, stall_limit_s=60.0)


def test_a_home_directory_in_paths_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is made in a folder named ~, and config.json says where the data are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("toy_train.txt", "toy_test.txt"):
        (tmp_path / name).touch()
    names = ("data", "test_data", "cache_dir", "out", "resume")
    _, train = build_configs({name: f"~/{name}" for name in names})
    assert [getattr(train, name) for name in names] == [str(tmp_path / name) for name in names]
    assert build_configs({"replay": "~/a"})[0].replay == str(tmp_path / "a")
    _, train = build_configs({"data": "~/toy"})
    assert recorded(train).data == str(tmp_path / "toy")
    with pytest.raises(ValueError, match="data must be a str"):
        build_configs({"data": 3})


def test_jobs_that_slurm_starts_together_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config, train = build_configs({"name": "a"})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert re.fullmatch(r"runs/a-\d{8}-\d{6}", str(run_path(config, train)))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert re.fullmatch(r"runs/a-\d{8}-\d{6}-17", str(run_path(config, train)))
    assert run_path(config, dataclasses.replace(train, out="b")) == Path("b")


def test_a_model_is_used_on_what_arguments_then_variables_then_its_run_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def chosen(*arguments: str) -> tuple[str | None, ...]:
        train = choose_data(vars(make_parser().parse_args(["evaluate", str(tmp_path), *arguments])), tmp_path)
        return train.data, train.test_data, train.cache_dir, train.device

    monkeypatch.chdir(tmp_path)
    own = recorded(TrainConfig(cache_dir="c", device="cuda:1"))
    own = dataclasses.replace(own, data="/own", test_data="/own-test")
    (tmp_path / "config.json").write_text(json.dumps({**dataclasses.asdict(own), "batch_size": 8}))
    assert chosen() == ("/own", "/own-test", None, "auto"), "the folder is gone"
    Path("c").mkdir()
    assert chosen() == ("/own", "/own-test", str(tmp_path / "c"), "auto")
    # Another data set has another test file and, maybe, lies on another machine.
    assert chosen("--data", "/a") == ("/a", None, None, "auto")
    assert chosen("--data", "/a", "--test-data=/t", "--device", "cpu") == ("/a", "/t", None, "cpu")
    monkeypatch.setenv("HVD_ADAPTIVE_CACHE_DIR", "/v")
    monkeypatch.setenv("HVD_ADAPTIVE_DEVICE", "cuda:0")
    assert chosen("--device", "cpu") == ("/own", "/own-test", "/v", "cpu")
    # Test data go with the data that they were named with.
    monkeypatch.setenv("HVD_ADAPTIVE_TEST_DATA", "/t")
    assert chosen() == ("/own", "/own-test", "/v", "cuda:0") and chosen("--data", "/a")[:2] == ("/a", None)
    monkeypatch.setenv("HVD_ADAPTIVE_DATA", "/b")
    assert chosen()[:2] == ("/b", "/t") and chosen("--data", "/a")[:2] == ("/a", None)
    monkeypatch.delenv("HVD_ADAPTIVE_TEST_DATA")
    assert chosen() == ("/b", None, "/v", "cuda:0")
    assert chosen("--data", "/a", "--cache-dir", "/d") == ("/a", None, "/d", "cuda:0")
    # What is a copy of the model alone has no config.json.
    (tmp_path / "config.json").unlink()
    assert chosen() == ("/b", None, "/v", "cuda:0")
    monkeypatch.delenv("HVD_ADAPTIVE_DATA")
    with pytest.raises(ValueError, match=r"config.json, which names the model's data, is not there: .* or give --data"):
        chosen()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "= 3", "not valid toml"),
        ("a.json", "[1]", "must hold a table"),
        ("a.json", "{", "not valid json"),
        ("a.json", '{"seed": 1, "seed": 2}', "not valid json: 'seed' comes twice"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config_file(str(tmp_path / name))
    with pytest.raises(ValueError, match="cannot be read"):
        read_config_file(str(tmp_path / "absent.toml"))


def test_an_option_that_is_gone_may_be_unset_only(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"overlap_merge": false, "outer_bias_correction": false, "batch_size": 8}')
    assert read_config_file(str(file)) == {"batch_size": 8}
    ours = Identity(model=[], data={}, options={"batch_size": 8})
    assert not ours.changed_options({"options": {"overlap_merge": False, "batch_size": 8}}, frozenset())
    [told] = ours.changed_options({"options": {"overlap_merge": True, "batch_size": 8}}, frozenset())
    assert told == "overlap_merge was True, and there is no such option any more"
    # A value that is gone is refused, and any other one may go on in its place.
    ours = Identity(model=[], data={}, options={"batch_size": 8, "reducer": "by-host"})
    assert not ours.changed_options({"options": {"reducer": "auto", "batch_size": 8}}, frozenset())
    assert len(ours.changed_options({"options": {"reducer": "sra", "batch_size": 8}}, frozenset())) == 1
    file.write_text('{"reducer": "auto", "compression": "fp16"}')
    with pytest.raises(ValueError, match="reducer must be one of by-host, sra, hierarchical, allreduce, got 'auto'"):
        build_configs(read_config_file(str(file)))
    file.write_text('{"overlap_merge": true}')
    with pytest.raises(ValueError, match="unknown option 'overlap_merge'"):
        build_configs(read_config_file(str(file)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('batch_size = "abc"', "batch_size must be an int, got 'abc' (batch_size is from --config {file})"),
        ("batch_size = -1", "batch_size must be > 0, got -1 (batch_size is from --config {file})"),
        ("max_batch_size = 4", "max_batch_size is from --config {file}"),
        ("max_batch_size = 4", "min_batch_size is from variable HVD_ADAPTIVE_MIN_BATCH_SIZE"),
    ],
)
def test_an_error_says_where_a_value_is_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setenv("HVD_ADAPTIVE_MIN_BATCH_SIZE", "8")
    file = tmp_path / "options.toml"
    file.write_text(f"{line}\n")
    assert main(["train", "--config", str(file)]) == 2
    assert message.format(file=file) in capsys.readouterr().err
    # What the command line says is from there.
    assert main(["train", "--config", str(file), "--batch-size", "-2", "--max-batch-size", "64"]) == 2
    assert "batch_size is from" not in capsys.readouterr().err.replace("min_batch_size is from", "")
    assert main(["simulate", "--calibration", "nowhere.toml"]) == 2
    assert "--calibration nowhere.toml: cannot be read" in capsys.readouterr().err


def test_bad_variables_are_named() -> None:
    with pytest.raises(
        ValueError, match="HVD_ADAPTIVE_BATCHSIZE: unknown option 'batchsize'; did you mean batch_size"
    ):
        read_environment({"HVD_ADAPTIVE_BATCHSIZE": "3"})
    with pytest.raises(ValueError, match=r"must be an int, got 'many' \(batch_size is from variable HVD_ADAPTIVE_BATCH_SIZE\)"):
        read_environment({"HVD_ADAPTIVE_BATCH_SIZE": "many"})
    with pytest.raises(ValueError, match="perturbation must be true or false"):
        read_environment({"HVD_ADAPTIVE_PERTURBATION": "maybe"})


def test_variables_of_the_world_count_for_commands_without_options_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, asked = torch.get_num_threads(), {}
    monkeypatch.setattr("hvd_adaptive.comm.connect", lambda **options: asked.update(options) or LocalTransport())
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setenv("HVD_ADAPTIVE_STALL_LIMIT_S", "20")
    monkeypatch.setenv("HVD_ADAPTIVE_NUM_THREADS", str(before + 1))
    commands = (["evaluate", str(tmp_path)], ["predict", str(tmp_path)], ["bench", "comm"])
    for command in commands:
        asked.clear()
        assert main(command) == 2 and asked["stall_limit_s"] == 20, "there is no model, and no other rank"
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
    capsys.readouterr()
    monkeypatch.setenv("HVD_ADAPTIVE_STALL_LIMIT_S", "0")
    for command in commands:
        for number in ([], ["-np", "2"]):
            assert main([*command, *number]) == 2
            said = "stall_limit_s must be > 0, got 0.0 (stall_limit_s is from variable HVD_ADAPTIVE_STALL_LIMIT_S)"
            assert said in capsys.readouterr().err


def test_a_run_without_limits_ends_when_it_gets_no_better() -> None:
    assert (TrainConfig().max_epochs, TrainConfig().evaluations_to_wait) == (50, 10)
    assert TrainConfig(epochs=2).evaluations_to_wait is None
    assert TrainConfig(epochs=2, patience=3).evaluations_to_wait == 3
    assert (TrainConfig(patience=3).max_epochs, TrainConfig(patience=3).evaluations_to_wait) == (None, 3)
    assert (TrainConfig(eval_rounds=0).max_epochs, TrainConfig(eval_rounds=0).evaluations_to_wait) == (50, None)
    assert TrainConfig(time_limit=3).max_epochs is None
    assert TrainConfig(epochs=2, time_limit=3).max_epochs == 2
