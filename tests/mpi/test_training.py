"""The command over real ranks: agreement, exactly-once, equal scores for any number of ranks, and failures by name."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needs import need_host_names
from pairs import BACKENDS
from runs import read_run
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_adaptive.comm import horovod_mpi
from hvd_adaptive.comm.mpi_library import loaded_mpi_libraries

COMMAND = [sys.executable, "-m", "hvd_adaptive"]


def train_arguments(data: Path, out: Path) -> list[str]:
    return ["train", "--data", str(data), "--cache-dir", str(data / "cache"), "--out", str(out)]


@pytest.mark.mpi(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", ["local", "sync", "horovod"])
def test_any_number_of_ranks_trains_and_agrees(
    train: Any, shared_tmp_path: Path, num_ranks: int, strategy: str, use_backend: Any
) -> None:
    # Each strategy over each backend, and with each number of ranks; the baseline is Horovod's.
    turn = num_ranks + ["local", "sync"].index(strategy) if strategy != "horovod" else 0
    backend = use_backend(BACKENDS[turn % 2])
    options = ["--backend", backend, "--strategy", strategy]
    train(*options, "--epochs", "2", "--batch-size", "16", "--mega-batch", "500", "--eval-rounds", "1")
    summary, rounds = read_run(shared_tmp_path / "run")
    assert summary["world_size"] == num_ranks and summary["ranks_agreed"] is True
    assert summary["backend"] == backend
    assert summary["samples"] == 4000 and summary["epochs"] == 2
    assert rounds[-1]["loss"] < 0.9 * rounds[0]["loss"]
    assert summary["final"]["p1"] > 0.3
    if strategy != "horovod":
        assert sum(summary["ranks"]["num_samples"]) == 4000
        assert all(r["weight_sum"] == pytest.approx(1) for r in rounds)


@pytest.mark.mpi(1, 2)
def test_the_baseline_over_torch_is_for_one_rank(train: Any, shared_tmp_path: Path, num_ranks: int, use_backend: Any) -> None:
    from mpi4py import MPI

    options = ["--backend", use_backend("torch"), "--strategy", "horovod"]
    if num_ranks == 1:
        train(*options, "--epochs", "1", "--batch-size", "16")
        assert read_run(shared_tmp_path / "run")[0]["backend"] == "torch"
        return
    stderr = train(*options, code=2).stderr
    expected = int(MPI.COMM_WORLD.Get_rank() == 0)
    assert stderr.count("use strategy 'sync', 'local' or 'sma'") == expected, stderr


@pytest.mark.mpi(3)
def test_encoded_deltas_are_fewer_bytes_and_the_same_model_everywhere(train: Any, shared_tmp_path: Path) -> None:
    # Equal parts: else the two runs differ also by which rank was held up.
    common = ["--epochs", "1", "--batch-size", "16", "--mega-batch", "500", "--optimizer", "sgd", "--lr", "4"]
    common += ["--sparse-merge", "never"]
    common += ["--dispatch", "equal"]
    for name, options in (("plain", []), ("encoded", ["--compression", "maxmin:4; output*=maxmin:8"])):
        train(*common, *options, out=name)
    plain, encoded = (read_run(shared_tmp_path / name)[0] for name in ("plain", "encoded"))
    assert encoded["ranks_agreed"] and encoded["samples"] == 2000
    assert 0.1 < encoded["payload_bytes"] / plain["payload_bytes"] < 0.25
    assert encoded["final"]["p1"] > plain["final"]["p1"] - 0.1


@pytest.mark.mpi(1, 2, 3, 4)
def test_scores_are_those_of_one_rank(
    train: Any,
    command: Any,
    data: Path,
    shared_tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mpi4py import MPI

    from hvd_adaptive.cli.parser import make_parser
    from hvd_adaptive.cli.use_model import evaluate
    from hvd_adaptive.comm.threads import LocalTransport

    train("--epochs", "1", "--batch-size", "16")
    arguments = ["evaluate", str(shared_tmp_path / "run"), "--cache-dir", str(data / "cache")]
    said = MPI.COMM_WORLD.bcast(command(*arguments).stdout)
    scores = json.loads(said)
    before = torch.get_num_threads()
    monkeypatch.setenv("HVD_ADAPTIVE_NUM_THREADS", str(before + 1))
    evaluate(make_parser().parse_args(arguments), LocalTransport())
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
    assert scores == json.loads(capfd.readouterr().out)
    best = read_run(shared_tmp_path / "run")[0]["best"]
    assert scores == {name: round(value, 6) for name, value in best.items()}


@pytest.mark.mpi(2)
def test_predictions_are_what_was_scored(train: Any, command: Any, data: Path, shared_tmp_path: Path) -> None:
    from mpi4py import MPI

    train("--epochs", "2", "--batch-size", "16")
    answer = command("predict", shared_tmp_path / "run", "--cache-dir", data / "cache", "-k", "3")
    assert answer.code == 0
    if MPI.COMM_WORLD.Get_rank():
        assert answer.stdout == ""
        return
    predictions = [json.loads(line) for line in answer.stdout.splitlines()]
    with gzip.open(data / "toy_test.txt.gz", "rt") as file:
        truth = [{int(x) for x in line.split(" ")[0].split(",")} for line in file.read().splitlines()[1:]]
    assert [p["row"] for p in predictions] == list(range(700))
    p1 = np.mean([p["labels"][0] in labels for p, labels in zip(predictions, truth, strict=True)])
    assert p1 == pytest.approx(read_run(shared_tmp_path / "run")[0]["best"]["p1"])
    assert all(sorted(p["probabilities"], reverse=True) == p["probabilities"] for p in predictions)


@pytest.mark.mpi(1)
def test_saved_models_and_configuration_repeat_the_run(train: Any, shared_tmp_path: Path) -> None:
    train(
        "--epochs", "1", "--batch-size", "16", "--mega-batch", "400", "--outer-step", "none", "--seed", "3", out="first"
    )  # fmt: skip
    train("--config", shared_tmp_path / "first" / "config.json", out="second")
    first, second = (load_file(shared_tmp_path / name / "model-last.safetensors") for name in ("first", "second"))
    assert all((first[name] == second[name]).all() for name in first)
    assert len({read_run(shared_tmp_path / name)[0]["model_hash"] for name in ("first", "second")}) == 1


@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("rule", "step"),
    [("paper", ["--batch-size-step", "0.5"]), ("heterogpu", ["--batch-size-step", "4"]), ("proportional", [])],
    ids=["paper", "heterogpu", "proportional"],
)
def test_batch_sizes_follow_emulated_speeds(train: Any, shared_tmp_path: Path, rule: str, step: list[str]) -> None:
    from mpi4py import MPI

    answer = train(
        "--batch-size-rule", rule, "--batch-size", "16", "--min-batch-size", "4", "--max-batch-size", "64",
        *step, "--slowdown", "20,1", "--epochs", "3", "--mega-batch", "500",
    )  # fmt: skip
    summary, rounds = read_run(shared_tmp_path / "run")
    slow, fast = rounds[-1]["ranks"]["batch_size"]
    assert slow < 16 < fast
    assert summary["slowdown"] == "20,1"
    assert ("EMULATED slowdown 20,1" in answer.stdout) == (MPI.COMM_WORLD.Get_rank() == 0)
    assert summary["ranks"]["num_samples"][1] > 2 * summary["ranks"]["num_samples"][0]


@pytest.mark.mpi(2)
def test_shares_of_sync_follow_emulated_speeds(train: Any, shared_tmp_path: Path) -> None:
    # The samples of a step cost more than the step itself: else equal shares would be as good.
    train(
        "--strategy", "sync", "--global-batch-size", "256", "--accumulation-steps", "2", "--loss-reduction", "sum",
        "--optimizer", "sgd", "--lr", "0.06", "--hidden-size", "512", "--slowdown", "20,1", "--epochs", "4",
        "--mega-batch", "500",
    )  # fmt: skip
    summary, rounds = read_run(shared_tmp_path / "run")
    slow, fast = rounds[-1]["ranks"]["batch_size"]
    assert slow < 64 and slow + fast == 256
    # Shares may move within a round: the weights are those at its end, with which the next one begins.
    assert all(a["ranks"]["weight"] == [size / 256 for size in b["ranks"]["batch_size"]] for a, b in pairwise(rounds))
    assert summary["samples"] == sum(summary["ranks"]["num_samples"]) == 8000 and summary["inexact"] == []
    assert rounds[-1]["loss"] < 0.9 * rounds[0]["loss"]


@pytest.mark.mpi(2)
def test_work_counted_in_nonzeros(train: Any, shared_tmp_path: Path) -> None:
    train("--work", "nonzeros", "--batch-size", "16", "--epochs", "1")
    assert read_run(shared_tmp_path / "run")[0]["samples"] == 2000


@pytest.mark.mpi(2)
def test_a_time_limit_and_a_target_end_the_run(train: Any, shared_tmp_path: Path) -> None:
    train("--time-limit", "1", "--mega-batch", "200", "--eval-rounds", "1", "--tensorboard")
    _, rounds = read_run(shared_tmp_path / "run")
    assert rounds[-1]["train_s"] >= 1 and all(r["train_s"] < 1 for r in rounds[:-1])
    events = EventAccumulator(str(shared_tmp_path / "run" / "tensorboard")).Reload()
    for tag, values in {
        "round/loss": [r["loss"] for r in rounds],
        "test/p1": [r["eval"]["p1"] for r in rounds],
        "wait (s)/rank 1": [r["ranks"]["wait_s"][1] for r in rounds],
    }.items():
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(values)
        assert [event.step for event in events.Scalars(tag)] == [r["round"] for r in rounds]
    train("--target-p1", "0.2", "--epochs", "30", "--batch-size", "16", "--eval-rounds", "1", out="target")
    summary, rounds = read_run(shared_tmp_path / "target")
    assert (
        summary["target_train_s"] == pytest.approx(rounds[-1]["train_s"], abs=1e-5)
        and rounds[-1]["eval"]["p1"] >= 0.2
    )
    assert all(r["eval"]["p1"] < 0.2 for r in rounds[:-1])


REFUSED = [
    (["--device", "cuda"], "torch sees no GPU"),
    (["--slowdown", "1,2,3"], "slowdown must have one factor a rank: 2 ranks, got 3 factors"),
    (["--out", "/proc/nowhere"], "run directory /proc/nowhere cannot be written"),
    (["--data", "absent"], "absent"),
    (["--compression", "maxmin:9"], "compression: "),
    (["--hidden-size", "1000000000"], "hidden_size 1000000000: a rank's weights alone take "),
]


@pytest.mark.mpi(2)
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[case[1][:20] for case in REFUSED])
def test_what_ranks_refuse_together_is_said_once(train: Any, options: list[str], message: str) -> None:
    from mpi4py import MPI

    stderr = train(*options, code=2).stderr
    if MPI.COMM_WORLD.Get_rank():
        assert stderr == ""
    else:
        assert stderr.count("hvd-adaptive: error:") == stderr.count(message) == 1 and "Traceback" not in stderr, stderr


TOGETHER = {
    "merge-rule": (["--optimizer", "sgd", "--merge-weights", "dual-averaging"], "needs an optimizer with accumulators"),
    "outer-step": (["--outer-momentum", "0.5"], "there is no outer step unless outer_step is set"),
    "replay": (["--replay", "absent"], "is not there; name the directory of a run"),
    "resume": (["--resume", "absent"], "resume: there is no checkpoint in"),
}


@pytest.mark.mpi(2)
def test_a_refused_run_leaves_its_folder_free(train: Any, shared_tmp_path: Path) -> None:
    from mpi4py import MPI

    for case, (options, message) in TOGETHER.items():
        stderr = train(*options, out="new/run", code=2).stderr
        assert (message in stderr) == (MPI.COMM_WORLD.Get_rank() == 0), (case, stderr)
        assert not (shared_tmp_path / "new").exists(), case
        MPI.COMM_WORLD.Barrier()
    train("--epochs", "0.2", "--batch-size", "16", "--mega-batch", "200", out="new/run")
    assert read_run(shared_tmp_path / "new" / "run")[0]["samples"] >= 400


@pytest.mark.mpi(2)
def test_a_refused_run_leaves_what_was_there(train: Any, shared_tmp_path: Path) -> None:
    options = ["--epochs", "0.2", "--batch-size", "16", "--mega-batch", "200", "--checkpoint-interval", "1"]
    train(*options)
    before = sorted(path.relative_to(shared_tmp_path) for path in (shared_tmp_path / "run").rglob("*"))
    said = (shared_tmp_path / "run" / "rounds.jsonl").read_bytes()
    train(*options, "--hidden-size", "7", "--resume", "auto", code=2)
    train(*options, code=2)
    assert sorted(path.relative_to(shared_tmp_path) for path in (shared_tmp_path / "run").rglob("*")) == before
    assert (shared_tmp_path / "run" / "rounds.jsonl").read_bytes() == said


# Ranks that fail before they meet leave two seconds later, for rank 0 to speak, and a machine may hold that up for longer. Here
# they stay until the launcher ends them, as rank 0 has left.
OTHERS_STAY = ["bash", "-c", '[ "$OMPI_COMM_WORLD_RANK" = 0 ] && exec "$@"; "$@" || exec sleep 60', "rank"]
# One that a rank sees before the ranks meet, and one that they refuse together; the messages are tested elsewhere.
BAD = [
    (OTHERS_STAY, ["--min-batch-size", "512", "--max-batch-size", "256"], "must be <= max_batch_size, got 512 > 256"),
    ([], ["--data", "absent"], "absent"),
]


@pytest.mark.parametrize(("shell", "options", "message"), BAD, ids=["before", "after"])
def test_bad_input_ends_the_job_with_one_message(
    run_job: Any, data: Path, tmp_path: Path, shell: list[str], options: list[str], message: str
) -> None:
    job = run_job([*shell, *COMMAND, *train_arguments(data, tmp_path / "run"), *options], np=2, timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert job.stderr.count("hvd-adaptive: error:") == 1 and message in job.stderr, job.describe()
    assert "Traceback" not in job.stderr, job.describe()


@pytest.mark.mpi(2)
def test_ranks_with_different_options_or_data_are_refused(
    train: Any, command: Any, data: Path, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    stderr = train("--batch-size", "32" if rank else "64", code=2).stderr
    if rank == 0:
        assert "the ranks do not agree: batch_size is 64 on rank 0 and 32 on rank 1" in stderr

    # The same option on both ranks, as two hosts have it, and different files behind it.
    folder = shared_tmp_path / f"host{rank}"
    shutil.copytree(data, folder, ignore=shutil.ignore_patterns("cache"))
    if rank == 1:
        text = gzip.decompress((folder / "toy_train.txt.gz").read_bytes()).decode().replace(":1.", ":2.", 1)
        with gzip.open(folder / "toy_train.txt.gz", "wt") as file:
            file.write(text)
    monkeypatch.setattr(horovod_mpi, "socket", types.SimpleNamespace(gethostname=lambda: f"host{rank}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.chdir(folder)
    answer = command("train", "--data", ".", "--out", shared_tmp_path / "run")
    assert answer.code == 2
    if rank == 0:
        assert "the ranks do not agree: fingerprint of the training data" in answer.stderr, answer


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
    job = run_job([*OTHERS_STAY, sys.executable, "-c", program], np=2, env=libraries, timeout=200)
    assert job.returncode != 0 and not job.timed_out, job.describe()
    assert "Horovod and mpi4py use different MPI libraries" in job.stderr and str(copy) in job.stderr, (
        job.describe()
    )


def test_singletons_are_refused(run_job: Any, data: Path, tmp_path: Path) -> None:
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    job = run_job([*COMMAND, *train_arguments(data, tmp_path / "run")], env=env, timeout=200)
    assert job.returncode != 0 and "openmpi started 4 ranks" in job.stderr, job.describe()


def test_gloo_is_refused(run_job: Any, tmp_path: Path) -> None:
    need_host_names()
    horovodrun = Path(sys.executable).with_name("horovodrun")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [str(horovodrun), "--gloo", "-np", "2", *COMMAND, "train", "--out", str(tmp_path / "run")]
    job = run_job(command, env={"PATH": path}, timeout=200, alone=True)
    assert job.returncode != 0 and not job.timed_out, job.describe()
    assert "horovodrun ran with Gloo" in job.stdout + job.stderr, job.describe()


@pytest.mark.parametrize("launcher", ["-np", "horovodrun"])
def test_the_readmes_launchers(run_job: Any, data: Path, tmp_path: Path, launcher: str) -> None:
    arguments = [*train_arguments(data, tmp_path / "run"), "--epochs", "1"]
    if launcher == "-np":
        command = ["hvd-adaptive", *arguments, "-np", "2"]
    else:
        need_host_names()
        command = ["horovodrun", "-np", "2", "hvd-adaptive", *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # As in an activated environment.
    job = run_job(["env", f"PATH={path}", *command], timeout=300, alone=True)
    assert job.returncode == 0, job.describe()
    assert read_run(tmp_path / "run")[0]["world_size"] == 2


def test_one_rank_under_mpirun_writes_plain_lines_to_a_file(run_job: Any, data: Path, tmp_path: Path) -> None:
    """Though Open MPI gives it a pseudo-terminal."""
    job = run_job([*COMMAND, *train_arguments(data, tmp_path / "run"), "--epochs", "1", "-np", "1"], timeout=200, forked=False)
    assert job.returncode == 0, job.describe()
    assert "round 1 " in job.stdout and "\x1b" not in job.stdout, job.describe()
