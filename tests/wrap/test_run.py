"""The command and the drop-in over whole jobs: reports, measured speeds, and failures that end the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from needs import need_host_names

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [sys.executable, "-m", "hvd_adaptive", "run"]
# Where a step costs nearly the same whatever its samples, equal shares are as good as others, and are kept; batches of two sizes
# look like noise; and other processes may disturb a rank for a while.
COSTLY_SAMPLES = ["--batch-size", "64", "--width", "2048", "--drop-last", "--epochs", "40"]


def check_shares_followed(job: Any) -> None:
    """The ranks' speeds are 4:1. In the end a disturbance may have made them alike, or equal shares be on trial."""
    shares = re.search(r"shares: ([\d.]+), ([\d.]+) % of each global batch, changed (once|\d+ times)", job.stderr)
    assert shares is not None and float(shares[1]) >= 50, job.describe()
    of_rank_0 = [int(size) for size in re.findall(r"Train Epoch: .* Batch: (\d+)", job.stdout)]
    assert of_rank_0[0] == 64 and max(of_rank_0) > 0.6 * 128, job.describe()


def test_measured_speeds_with_workers_that_unpickle_the_scripts_classes(run_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    job = run_job(
        [*RUN, "-np", "2", "--interval", "5", "--slowdown", "1,4", str(SCRIPTS / "mnist.py"), "--out", str(out),
         "--num-workers", "1", "--context", "forkserver", "--persistent", *COSTLY_SAMPLES],
        timeout=300,
    )  # fmt: skip
    assert job.returncode == 0 and out.exists(), job.describe()
    check_shares_followed(job)
    assert "left alone: DataLoader 2" in job.stderr and "the ceiling" in job.stderr, job.describe()


def test_a_dry_run_reports_and_ends(run_job: Any, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    job = run_job(
        [*RUN, "-np", "2", "--dry-run", str(SCRIPTS / "mnist.py"), "--epochs", "1000", "--out", str(out)], timeout=200
    )
    assert job.returncode == 0 and not job.timed_out and not out.exists(), job.describe()
    assert "intercepted: DistributedOptimizer (SGD, op=Average)" in job.stderr, job.describe()
    assert "would be adaptive: DataLoader 1 (Doubled, DistributedSampler, batch_size=16)" in job.stderr, job.describe()


@pytest.mark.parametrize(
    ("mode", "num_ranks", "said"),
    [
        ("adasum", 2, "not intercepted: DistributedOptimizer (SGD, op=Adasum)"),
        ("manual", 2, "no optimizer that is intercepted steps on its batches"),
        ("plain", 1, "there is one rank"),
        # Its steps are merged, in a world of one.
        ("plain", 1, "outer step: nesterov"),
    ],
)
def test_a_dry_run_ends_without_a_wrapped_optimizer_too(mode: str, num_ranks: int, said: str, run_job: Any) -> None:
    options = ["--strategy", "local", "--outer-step", "nesterov"] if "outer step" in said else []
    job = run_job([*RUN, "-np", str(num_ranks), "--dry-run", *options, str(SCRIPTS / "other_ways.py"), mode], timeout=200)
    assert job.returncode == 0 and said in job.stderr and "(validation)" not in job.stderr, job.describe()
    assert "to the end" not in job.stdout and job.stdout.count("of rank 0") in (15, 16), job.describe()


def test_a_dry_run_tries_unequal_shares(run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", "--dry-run", "--slowdown", "1,4", str(SCRIPTS / "other_ways.py"), "plain"], timeout=200)
    assert job.returncode == 0 and "would be adaptive" in job.stderr and "to the end" not in job.stdout, job.describe()
    sizes = {int(line.split()[-1]) for line in job.stdout.splitlines() if "of rank 0" in line}
    assert max(sizes) > 8 and re.search(r"shares: [\d.]+, [\d.]+ % of each global batch", job.stderr), job.describe()
    assert "these were tried" not in job.stderr, job.describe()
    job = run_job([*RUN, "-np", "2", "--dry-run", str(SCRIPTS / "other_ways.py"), "breaks"], timeout=200)
    assert job.returncode != 0 and "only batches of eight" in job.stderr, job.describe()
    assert "unequal shares, which the dry run tried" in job.stderr, job.describe()


@pytest.mark.parametrize(
    ("mode", "error", "is_scripts"), [("cuts", "its weight would be wrong", False), ("mismatches", "RuntimeError", True)]
)
def test_unequal_shares_are_named_beside_the_scripts_errors_only(mode: str, error: str, is_scripts: bool, run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", "--shares", "1,3", str(SCRIPTS / "other_ways.py"), mode], timeout=200)
    assert job.returncode == 1 and error in job.stderr, job.describe()
    assert ("the error below came while ranks had unequal shares" in job.stderr) == is_scripts, job.describe()


def test_the_scripts_own_figures_are_explained(run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", "--shares", "1,3", str(SCRIPTS / "other_ways.py"), "averages"], timeout=200)
    assert job.returncode == 0 and "len(batch) is the rank's share" in job.stderr, job.describe()
    assert "in training (allreduce 'accuracy') counts each rank alike" in job.stderr, job.describe()


def test_local_steps(run_job: Any) -> None:
    """Options of the script that begin like ours are its own."""
    job = run_job(
        [*RUN, "-np", "2", "--strategy", "local", "--mega-batch", "400", "--slowdown", "1,4", str(SCRIPTS / "mnist.py"),
         "--out", os.devnull, *COSTLY_SAMPLES],
        timeout=300,
    )  # fmt: skip
    assert job.returncode == 0, job.describe()
    merges = re.search(r"local steps: (\d+) merges, at last every [3-5] steps", job.stderr)
    assert merges is not None and 24 <= int(merges[1]) <= 48, job.describe()
    check_shares_followed(job)
    assert "validation and checkpoints see the merged model at the end of a whole pass" in job.stderr, job.describe()


@pytest.mark.parametrize(("mode", "differ"), [("average", True), ("teacher", True), ("merged", False)])
def test_copies_of_the_model_that_follow_local_steps_are_named(mode: str, differ: bool, run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", "--strategy", "local", str(SCRIPTS / "copies.py"), mode], timeout=200)
    assert job.returncode == 0 and job.stdout.count("differ" if differ else "are equal") == 2, job.describe()
    assert ("a copy of the model (a moving average, a teacher) differs between ranks" in job.stderr) == differ, job.describe()


def test_the_drop_in_is_one_changed_line(run_job: Any) -> None:
    job = run_job(
        [sys.executable, str(SCRIPTS / "drop_in.py")], np=2, env={"HVD_ADAPTIVE_SHARES": "1,3"}, timeout=200
    )
    assert job.returncode == 0, job.describe()
    assert "rank 0 batches [4, 8]" in job.stdout and "rank 1 batches [8, 12]" in job.stdout, job.describe()
    assert job.stderr.count("compatibility report") == 1, job.describe()


@pytest.mark.parametrize("launcher", [[], ["--gloo"]])
def test_horovods_own_launcher(launcher: list[str], run_job: Any) -> None:
    """Under Gloo, too: what ranks tell each other goes through Horovod."""
    need_host_names()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["horovodrun", *launcher, "-np", "2", "hvd-adaptive", "run", "--shares", "1,3", str(SCRIPTS / "mnist.py")]
    # As in an activated environment; ranks of a busy machine may come to Gloo's meeting more than its 30 s apart.
    job = run_job(["env", f"PATH={path}", "HOROVOD_GLOO_TIMEOUT_SECONDS=120", *command], timeout=300, alone=True)
    assert job.returncode == 0, job.describe()
    assert "shares: 25.0, 75.0 %" in job.stdout + job.stderr, job.describe()


def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(run_job: Any) -> None:
    job = run_job([*RUN, "-np", "3", str(SCRIPTS / "failing.py"), "raise"], timeout=200)
    end = time.time() - job.outlived_s
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    # Of what ranks say: the launcher's notice of the end comes another way, and may overtake the reason.
    lines = job.stderr.splitlines()
    first = next((n for n, line in enumerate(lines) if re.match(r"rank \d+ failed:|hvd_adaptive: |Traceback", line)), 0)
    assert lines[first] == "rank 1 failed:" and "failing.py" in lines[first + 2], job.describe()
    assert "KeyError: 'on purpose'" in job.stderr, job.describe()
    raised = re.search(r"raising at ([\d.]+)", job.stdout)
    # Ten seconds, and as many for a machine that stalls.
    assert raised is not None and end - float(raised[1]) < 20, job.describe()


def test_a_script_finds_its_file_after_a_change_of_folder(run_job: Any, tmp_path: Path) -> None:
    (tmp_path / "away.py").write_text("""
import os, sys
import horovod.torch as hvd
hvd.init()
os.chdir("/")
print(open(os.path.abspath(__file__)).read().count("import os"))
sys.exit(("bad", "config"))
""")
    job = run_job([*RUN, "-np", "1", "away.py"], cwd=tmp_path, timeout=100)
    assert job.returncode == 1 and job.stdout.strip() == "2" and "('bad', 'config')" in job.stderr, job.describe()


def test_a_rank_that_leaves_early_ends_the_job(run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", str(SCRIPTS / "failing.py"), "exit"], timeout=200)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()


def test_a_script_that_fails_ends_with_its_own_code(run_job: Any) -> None:
    # Ranks that are forks of the zygote would not take their interpreter apart.
    job = run_job([*RUN, "-np", "2", str(SCRIPTS / "failing.py"), "code"], timeout=200, forked=False)
    assert job.returncode == 3 and "terminate called" not in job.stderr and not job.leftover, job.describe()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_ends_with_a_code_when_all_have_trained_ends_the_job(rank: int, run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", str(SCRIPTS / "failing.py"), "one code", str(rank)], timeout=200, forked=False)
    assert job.returncode == 3 and not job.timed_out and not job.leftover, job.describe()
    assert "heartbeat" not in job.stderr, job.describe()
    assert f"rank {rank} left the script with exit code 3, at {SCRIPTS / 'failing.py'}:" in job.stderr, job.describe()


def test_a_frozen_rank_is_named(run_job: Any, tmp_path: Path) -> None:
    ready = tmp_path / "pid"

    def freeze(child: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 150
        while not (ready.exists() and ready.read_text()) and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(int(ready.read_text()), signal.SIGSTOP)

    job = run_job(
        [*RUN, "-np", "2", "--stall-limit-s", "10", str(SCRIPTS / "failing.py"), "freeze", str(ready)],
        timeout=240,
        during=freeze,
    )
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    assert "rank 1" in job.stderr and "is frozen" in job.stderr, job.describe()


@pytest.mark.parametrize(
    ("num_ranks", "signals"), [(2, "the group"), (2, "the launcher"), (1, "the group"), (2, "one rank")]
)
def test_ctrl_c_tells_what_was_done(num_ranks: int, signals: str, run_job: Any, tmp_path: Path) -> None:
    ready = tmp_path / "pid"

    def interrupt(child: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 150
        while not (ready.exists() and ready.read_text()) and time.monotonic() < end:
            time.sleep(0.1)
        if signals == "the group":
            os.killpg(child.pid, signal.SIGINT)
        else:
            os.kill(child.pid if signals == "the launcher" else int(ready.read_text()), signal.SIGINT)
        times.append(time.time())

    times: list[float] = []
    command = [*RUN, *(["-np", "2"] if num_ranks > 1 else []), str(SCRIPTS / "failing.py"), "interrupt", str(ready)]
    command = ["setsid", *command] if signals == "the group" else command
    job = run_job(command, timeout=240, during=interrupt, alone=num_ranks == 1)
    # The other ranks only know that one is gone.
    assert job.returncode == (1 if signals == "one rank" else 130) and not job.timed_out and not job.leftover, job.describe()
    assert time.time() - job.outlived_s - times[0] < 20, job.describe()
    said = re.findall(r"hvd-adaptive: rank \d was (interrupted by SIGINT|asked to end \(SIGTERM)", job.stderr)
    assert len(said) == 1, job.describe()
    if signals != "one rank":
        assert "Traceback" not in job.stderr, job.describe()
        assert "intercepted: DistributedOptimizer (SGD, op=Average)" in job.stderr, job.describe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "2", "no_such.py"], "'no_such.py' is not there"),
        (["--mega-batch", "64", str(SCRIPTS / "mnist.py")], "needs strategy local, got 'sync'"),
        (["--strategy", "local", "--compression", "maxmin:99", str(SCRIPTS / "mnist.py")], "compression: "),
        (["--shares", "1,0", "x.py"], "one number > 0 a rank"),
        (["--slowdown", "0.5,1", "x.py"], ">= 1"),
        (["-np", "2", "--shares", "1,2,3", str(SCRIPTS / "mnist.py")], "one number a rank: 2 ranks, got 3 in '1,2,3'"),
        (["-np", "2", "-m", "no_such.module"], "module 'no_such.module' is not there"),
        (["python", "-c", "pass"], "needs a script"),
    ],
)
def test_bad_options_are_refused_at_once(arguments: list[str], message: str, run_job: Any) -> None:
    job = run_job([*RUN, *arguments], alone=True)
    assert job.returncode == 2 and message in job.stderr, job.describe()


def test_a_number_of_shares_that_only_the_ranks_know_to_be_wrong(run_job: Any) -> None:
    """Horovod's own launcher, say, tells it in another way than the one that is looked at."""
    job = run_job([*RUN, "--shares", "1,2", str(SCRIPTS / "synthetic.py")], timeout=200, alone=True)
    assert job.returncode == 2 and "one number a rank: 1 ranks, got 2" in job.stderr, job.describe()
    assert "Traceback" not in job.stderr, job.describe()


@pytest.mark.parametrize(
    "command", [["python", "-u", "synthetic.py"], ["-m", "synthetic"], [sys.executable, "-m", "synthetic", "--same-data"]]
)
def test_the_command_that_people_know_stands_behind_run(command: list[str], run_job: Any) -> None:
    job = run_job([*RUN, *command], cwd=SCRIPTS, timeout=200, alone=True)
    assert job.returncode == 0 and "there is one rank" in job.stderr, job.describe()


def test_one_rank_needs_no_launcher(run_job: Any) -> None:
    # Horovod starts MPI by itself there, which must find its files.
    job = run_job([*RUN, str(SCRIPTS / "synthetic.py")], timeout=200)
    assert job.returncode == 0 and "there is one rank" in job.stderr, job.describe()


def test_options_of_run_behind_the_script_are_named(run_job: Any) -> None:
    job = run_job([*RUN, str(SCRIPTS / "mnist.py"), "-np", "2", "-n", "5", "--interval=5"], timeout=200, alone=True)
    # A script may have an -n of its own.
    message = "adaptive: -np, --interval=5: options of run go before the script"
    assert job.returncode == 2 and message in job.stderr, job.describe()


def test_a_script_without_horovod_is_named(run_job: Any) -> None:
    job = run_job([*RUN, str(SCRIPTS / "failing.py"), "never"], timeout=200, alone=True)
    assert job.returncode == 2 and "never called hvd.init()" in job.stderr, job.describe()


def test_a_worker_that_dies_ends_the_job_with_its_error(run_job: Any) -> None:
    job = run_job([*RUN, "-np", "2", str(SCRIPTS / "worker_dies.py")], timeout=200)
    end = time.time() - job.outlived_s
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    # PyTorch's words ("is killed") or ours ("was killed"); or PyTorch's where it has lost the worker's status by asking twice.
    words = r"worker \((pid \d+\) (is|was) killed by signal: Killed|pid\(s\) \d+\) exited unexpectedly)"
    assert re.search(words, job.stderr), job.describe()
    assert "rank 1 failed" in job.stderr, job.describe()
    # PyTorch looks after its workers every five seconds; the stall limit is far longer.
    assert end - float(job.stdout.partition("killed at ")[2].split()[0]) < 40, job.describe()
