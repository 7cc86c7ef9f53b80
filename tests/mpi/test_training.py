"""The command over real ranks: agreement, exactly-once, equal scores for any number of ranks, and failures by name."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from hvd_adaptive.transport.horovod_mpi import loaded_mpi_libraries

COMMAND = [sys.executable, "-m", "hvd_adaptive"]


def train_arguments(data: Path, out: Path) -> list[str]:
    return ["train", "--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out)]


@pytest.fixture
def train(run_job: Any, data: Path, tmp_path: Path) -> Any:
    def run(*options: str, np: int | None, out: str = "run", **job: Any) -> Any:
        return run_job(
            [*COMMAND, *train_arguments(data, tmp_path / out), "--no-calibration", *options], np=np, **job
        )

    return run


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return json.loads((path / "summary.json").read_text()), rounds


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["local", "sync", "horovod"])
def test_any_number_of_ranks_trains_and_agrees(
    train: Any, tmp_path: Path, world_size: int, strategy: str
) -> None:
    job = train(
        "--strategy",
        strategy,
        "--epochs",
        "2",
        "--batch-size",
        "16",
        "--mega-batch",
        "500",
        "--lr",
        "4",
        np=world_size,
    )
    assert job.returncode == 0, job.describe()
    summary, rounds = read(tmp_path / "run")
    assert summary["world_size"] == world_size and summary["ranks_agreed"] is True
    assert summary["samples"] == 4000 and summary["epochs"] == 2
    assert rounds[-1]["loss"] < 0.9 * rounds[0]["loss"]
    assert summary["final"]["p1"] > 0.3
    if strategy != "horovod":
        assert sum(summary["ranks"]["num_samples"]) == 4000
        assert all(r["weight_sum"] == pytest.approx(1) for r in rounds)


def test_encoded_deltas_are_fewer_bytes_and_the_same_model_everywhere(train: Any, tmp_path: Path) -> None:
    common = ["--epochs", "1", "--batch-size", "16", "--mega-batch", "500", "--lr", "4", "--sparse-merge", "never"]
    for name, options in (("plain", []), ("encoded", ["--compression", "maxmin:4; output*=maxmin:8"])):
        job = train(*common, *options, np=3, out=name)
        assert job.returncode == 0, job.describe()
    plain, encoded = (read(tmp_path / name)[0] for name in ("plain", "encoded"))
    assert encoded["ranks_agreed"] and encoded["samples"] == 2000
    assert 0.1 < encoded["payload_bytes"] / plain["payload_bytes"] < 0.25
    assert encoded["final"]["p1"] > plain["final"]["p1"] - 0.1
    job = train("--compression", "maxmin:9", np=2, out="bad")
    assert job.returncode == 2 and job.stderr.count("compression: ") == 1, job.describe()


def test_scores_are_equal_for_any_number_of_ranks(
    train: Any, run_job: Any, data: Path, tmp_path: Path
) -> None:
    assert train("--epochs", "1", "--batch-size", "16", "--lr", "4", np=2).returncode == 0
    common = ["evaluate", str(tmp_path / "run"), "--cache-dir", str(data / "cache")]
    answers = {}
    for world_size in (None, 1, 2, 3, 4):
        job = run_job([*COMMAND, *common], np=world_size)
        assert job.returncode == 0, job.describe()
        answers[world_size] = json.loads(job.stdout)
    assert all(answer == answers[None] for answer in answers.values()), answers
    summary, _ = read(tmp_path / "run")
    assert answers[None] == {name: round(value, 6) for name, value in summary["best"].items()}


def test_predictions_are_what_was_scored(train: Any, run_job: Any, data: Path, tmp_path: Path) -> None:
    assert train("--epochs", "2", "--batch-size", "16", "--lr", "4", np=2).returncode == 0
    job = run_job([*COMMAND, "predict", str(tmp_path / "run"), "--cache-dir", str(data / "cache"), "-k", "3"])
    assert job.returncode == 0, job.describe()
    predictions = [json.loads(line) for line in job.stdout.splitlines()]
    with gzip.open(data / "toy_test.txt.gz", "rt") as file:
        truth = [{int(x) for x in line.split(" ")[0].split(",")} for line in file.read().splitlines()[1:]]
    assert [p["row"] for p in predictions] == list(range(700))
    p1 = np.mean([p["labels"][0] in labels for p, labels in zip(predictions, truth, strict=True)])
    assert p1 == pytest.approx(read(tmp_path / "run")[0]["best"]["p1"])
    assert all(sorted(p["probabilities"], reverse=True) == p["probabilities"] for p in predictions)


def test_saved_models_and_configuration_repeat_the_run(train: Any, tmp_path: Path) -> None:
    options = [
        "--epochs",
        "1",
        "--batch-size",
        "16",
        "--mega-batch",
        "400",
        "--outer-step",
        "none",
        "--seed",
        "3",
    ]
    assert train(*options, np=1, out="first").returncode == 0
    assert train("--config", str(tmp_path / "first" / "config.json"), np=1, out="second").returncode == 0
    first, second = (load_file(tmp_path / name / "model-last.safetensors") for name in ("first", "second"))
    assert all((first[name] == second[name]).all() for name in first)
    assert read(tmp_path / "first")[0]["model_hash"] == read(tmp_path / "second")[0]["model_hash"]


@pytest.mark.parametrize(("rule", "step"), [("paper", "0.5"), ("heterogpu", "4"), ("proportional", "1")])
def test_batch_sizes_follow_emulated_speeds(train: Any, tmp_path: Path, rule: str, step: str) -> None:
    job = train(
        "--batch-size-rule", rule, "--batch-size", "16", "--min-batch-size", "4", "--max-batch-size", "64",
        "--batch-size-step", step, "--slowdown", "20,1", "--epochs", "4", "--mega-batch", "500", np=2,
    )  # fmt: skip
    assert job.returncode == 0, job.describe()
    summary, rounds = read(tmp_path / "run")
    slow, fast = rounds[-1]["ranks"]["batch_size"]
    assert slow < 16 < fast
    assert summary["slowdown"] == "20,1" and "EMULATED slowdown 20,1" in job.stdout
    assert summary["ranks"]["num_samples"][1] > 2 * summary["ranks"]["num_samples"][0]


def test_shares_of_sync_follow_emulated_speeds(train: Any, tmp_path: Path) -> None:
    job = train(
        "--strategy", "sync", "--global-batch-size", "64", "--accumulation-steps", "2", "--loss-reduction", "sum", "--lr", "0.06",
        "--slowdown", "20,1", "--epochs", "4", "--mega-batch", "500", np=2,
    )  # fmt: skip
    assert job.returncode == 0, job.describe()
    summary, rounds = read(tmp_path / "run")
    slow, fast = rounds[-1]["ranks"]["batch_size"]
    assert slow < 26 and slow + fast == 64
    assert rounds[-1]["ranks"]["weight"] == [slow / 64, fast / 64]
    assert summary["samples"] == sum(summary["ranks"]["num_samples"]) == 8000 and summary["inexact"] == []
    assert rounds[-1]["loss"] < 0.9 * rounds[0]["loss"]


def test_work_counted_in_nonzeros(train: Any, tmp_path: Path) -> None:
    job = train("--work", "nonzeros", "--batch-size", "16", "--epochs", "1", np=2)
    assert job.returncode == 0, job.describe()
    assert read(tmp_path / "run")[0]["samples"] == 2000


def test_a_time_limit_and_a_target_end_the_run(train: Any, tmp_path: Path) -> None:
    assert train("--time-limit", "1", "--mega-batch", "200", np=2).returncode == 0
    summary, rounds = read(tmp_path / "run")
    assert rounds[-2]["train_s"] < 1 <= summary["train_s"]
    assert (
        train(
            "--target-p1", "0.2", "--epochs", "30", "--lr", "4", "--batch-size", "16", np=2, out="target"
        ).returncode
        == 0
    )
    summary, rounds = read(tmp_path / "target")
    assert (
        summary["target_train_s"] == pytest.approx(rounds[-1]["train_s"], abs=1e-5)
        and rounds[-1]["eval"]["p1"] >= 0.2
    )
    assert all(r["eval"]["p1"] < 0.2 for r in rounds[:-1])


BAD = [
    (
        ["--batch-size-rule", "clever"],
        {},
        "batch_size_rule must be one of fixed, paper, heterogpu, ",
    ),
    (
        ["--min-batch-size", "512", "--max-batch-size", "256"],
        {},
        "min_batch_size must be <= max_batch_size, got 512 > 256",
    ),
    (["--device", "cuda"], {}, "torch sees no GPU"),
    (["--slowdown", "1,2,3"], {}, "slowdown must have one factor a rank: 2 ranks, got 3 factors"),
    (["--out", "/proc/nowhere"], {}, "run directory /proc/nowhere cannot be written"),
    (["--config", "absent.toml"], {}, "--config absent.toml: cannot be read"),
    (["--data", "absent"], {}, "absent"),
    ([], {"HVD_ADAPTIVE_BATCHSIZE": "3"}, "HVD_ADAPTIVE_BATCHSIZE: unknown option"),
]


@pytest.mark.parametrize(("options", "env", "message"), BAD, ids=[case[2][:30] for case in BAD])
def test_bad_input_ends_all_ranks_with_one_message(
    train: Any, options: list[str], env: dict[str, str], message: str
) -> None:
    job = train(*options, np=2, env=env, timeout=60)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert job.stderr.count("hvd-adaptive: error:") == 1 and message in job.stderr, job.describe()
    assert "Traceback" not in job.stderr, job.describe()
    assert job.wall_s < 20, job.describe()


def per_rank(*variants: list[str]) -> list[str]:
    """A program whose ranks run the command with different options."""
    script = f"import os, sys; v = {list(variants)!r}; os.execv(sys.executable, v[int(os.environ['OMPI_COMM_WORLD_RANK'])])"
    return [sys.executable, "-c", script]


def test_ranks_with_different_options_or_data_are_refused(run_job: Any, data: Path, tmp_path: Path) -> None:
    base = [*COMMAND, *train_arguments(data, tmp_path / "run")]
    job = run_job(per_rank(base, [*base, "--batch-size", "32"]), np=2, timeout=60)
    assert job.returncode != 0, job.describe()
    assert "the ranks do not agree: batch_size is 64 on rank 0 and 32 on rank 1" in job.stderr, job.describe()

    other = tmp_path / "other"
    shutil.copytree(data, other, ignore=shutil.ignore_patterns("cache"))
    text = gzip.decompress((other / "toy_train.txt.gz").read_bytes()).decode().replace(":1.", ":2.", 1)
    with gzip.open(other / "toy_train.txt.gz", "wt") as file:
        file.write(text)
    script = tmp_path / "where.py"
    # The same option on both ranks, as two hosts have it, and different files behind it.
    script.write_text(
        "import os, sys\n"
        f"os.chdir([{str(data)!r}, {str(other)!r}][int(os.environ['OMPI_COMM_WORLD_RANK'])])\n"
        f"command = {COMMAND!r} + ['train', '--data', '.', '--out', {str(tmp_path / 'run')!r}]\n"
        f"os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r} + os.environ['OMPI_COMM_WORLD_RANK']\n"
        "os.environ['OMPI_COMM_WORLD_LOCAL_RANK'] = '0'\n"
        "os.execv(command[0], command)\n"
    )
    job = run_job([sys.executable, str(script)], np=2, timeout=60)
    assert job.returncode != 0 and not job.timed_out, job.describe()
    assert "hvd-adaptive: error" in job.stderr, job.describe()


def test_mismatched_mpi_libraries_are_refused(run_job: Any, tmp_path: Path) -> None:
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60).stdout
    (library,) = loaded_mpi_libraries(maps)
    # Another name inside, too: the loader takes a library that it has by that name already.
    name = os.path.basename(library)
    other = name[:-1] + "x"
    copy = tmp_path / other
    copy.write_bytes(Path(library).read_bytes().replace(name.encode() + b"\0", other.encode() + b"\0"))
    # The copy must still find what the original finds beside itself.
    folders = sorted({os.path.dirname(path) for path in re.findall(r"(/\S+\.so\S*)", maps)})
    # Loaded after Horovod's, mpi4py would take the library that is there.
    program = (
        "import sys, mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; from hvd_adaptive.cli import main; "
        f"sys.exit(main(['train', '--out', {str(tmp_path / 'run')!r}]))"
    )
    libraries = {"MPI4PY_LIBMPI": str(copy), "LD_LIBRARY_PATH": ":".join(folders)}
    job = run_job([sys.executable, "-c", program], np=2, env=libraries, timeout=60)
    assert job.returncode != 0 and not job.timed_out, job.describe()
    assert "Horovod and mpi4py use different MPI libraries" in job.stderr and str(copy) in job.stderr, (
        job.describe()
    )


def test_singletons_are_refused(train: Any) -> None:
    job = train(np=None, env={"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, timeout=60)
    assert job.returncode != 0 and "openmpi started 4 ranks" in job.stderr, job.describe()


def test_gloo_is_refused(run_job: Any, tmp_path: Path) -> None:
    horovodrun = Path(sys.executable).with_name("horovodrun")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(horovodrun), "--gloo", "-np", "2", *COMMAND, "train", "--out", str(tmp_path / "run")]
    job = run_job(command, env={"PATH": path}, timeout=90)
    assert job.returncode != 0 and not job.timed_out, job.describe()
    assert "horovodrun ran with Gloo" in job.stdout + job.stderr, job.describe()


@pytest.mark.parametrize("launcher", ["-np", "horovodrun"])
def test_the_readmes_launchers(run_job: Any, data: Path, tmp_path: Path, launcher: str) -> None:
    arguments = [*train_arguments(data, tmp_path / "run"), "--epochs", "1"]
    if launcher == "-np":
        command = ["hvd-adaptive", *arguments, "-np", "2"]
    else:
        command = ["horovodrun", "-np", "2", "hvd-adaptive", *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # As in an activated environment.
    job = run_job(["env", f"PATH={path}", *command])
    assert job.returncode == 0, job.describe()
    assert read(tmp_path / "run")[0]["world_size"] == 2
