"""Batch scripts: those in slurm/ come from the renderer, and no value becomes anything but itself."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.cli.main import main
from hvd_adaptive.cluster.batch_script import BatchScript, Component, render

FOLDER = Path(__file__).parents[2] / "slurm"
LIMIT_S = 120


def title(purpose: str, file: str) -> tuple[str, ...]:
    return (
        purpose,
        f"    sbatch slurm/{file}.sbatch --data PREFIX --epochs 5     # any option of `hvd-adaptive train`",
        "Submit it where .venv is, or with VENV=/path/to/it. Options of sbatch win over the lines below. "
        "docs/slurm.md says more.",
    )


def scripts_to_copy() -> dict[str, str]:
    """Returns the texts of slurm/*.sbatch by file name."""
    two_nodes = (Component(nodes=2),)
    scripts: Sequence[tuple[str, str, dict[str, object]]] = (
        ("one-node", "All GPUs of one node.", {}),
        (
            "several-nodes",
            "Several nodes, the ranks started by srun. Without --mpi=pmix at your site: several-nodes-mpirun.sbatch.",
            {"components": two_nodes},
        ),
        (
            "several-nodes-mpirun",
            "Several nodes, the ranks started by mpirun: needs no PMIx in Slurm.",
            {"components": two_nodes, "launcher": "mpirun"},
        ),
        (
            "mixed-gpus-constraint",
            "Nodes of two kinds in one partition, of each a given number; the names are features of your nodes "
            "(`sinfo -o '%n %f'`).",
            {"components": (Component(nodes=2, constraint="[a100*1&v100*1]"),)},
        ),
        (
            "mixed-gpus-hetjob",
            "Nodes of two kinds with different numbers of GPUs, or in two partitions: a heterogeneous job, one world of ranks.",
            {"components": (Component(constraint="a100"), Component(ntasks_per_node=2, constraint="v100"))},
        ),
        (
            "preemptible",
            "Saves a checkpoint when the job is preempted or near its time limit, is queued again, and goes on by itself.",
            {"components": two_nodes, "requeue": True},
        ),
        (
            "preemptible-mpirun",
            "As preemptible.sbatch, the ranks started by mpirun: needs no PMIx in Slurm.",
            {"components": two_nodes, "requeue": True, "launcher": "mpirun"},
        ),
    )
    return {
        f"{name}.sbatch": render(BatchScript(title=title(purpose, name), **options))  # type: ignore[arg-type]
        for name, purpose, options in scripts
    }


def test_the_scripts_to_copy_are_what_is_rendered() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.glob("*.sbatch")}
    assert texts == scripts_to_copy(), "write scripts_to_copy() to slurm/"


NASTY = ["it's", 'say "hi"', "$(touch FLAG)", "`touch FLAG`", "a b", "*", "~", "; touch FLAG", "\\", "-x", "é", "#", "$HOME", ""]


@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_arguments_arrive_as_they_are(tmp_path: Path, launcher: str, requeue: bool) -> None:
    """In a shell, with stand-ins for the programs that write down what they get."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("srun", "hvd-adaptive"):
        tool = tools / name
        tool.write_text(f'#!{sys.executable}\nimport sys\nopen({str(tmp_path / "got")!r}, "w").write(repr(sys.argv[1:]))\n')
        tool.chmod(0o755)
    (tools / "activate").touch()
    venv = tmp_path / "a venv's"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").touch()
    script = BatchScript(
        command=("train", *NASTY), launcher=launcher, requeue=requeue, venv=str(venv), name="two words", prologue=("true",)
    )
    env = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "3"}
    done = subprocess.run(["bash"], input=render(script), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    got = eval((tmp_path / "got").read_text())
    expected = ["train", *(["-np", "3"] if launcher == "mpirun" else [])]
    expected += ["--out", "runs/7", "--resume", "auto"] if requeue else []
    expected = ["--mpi=pmix", "hvd-adaptive", *expected] if launcher == "srun" else expected
    assert got == [*expected, *NASTY] and not (tmp_path / "FLAG").exists()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), flags=re.M)
    assert found is not None
    return bool(int(found[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("is_told", "code", "state", "is_requeued"),
    [
        (True, 75, "RUNNING", True),
        (True, 137, "RUNNING", True),
        (True, 0, "RUNNING", False),
        (True, 75, "COMPLETING", False),
        (False, 75, "RUNNING", True),
        (False, 1, "RUNNING", False),
    ],
)
def test_when_a_job_is_queued_again(tmp_path: Path, is_told: bool, code: int, state: str, is_requeued: bool) -> None:
    """The script under bash; Slurm's part of it is in tests/slurm."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    programs = {
        # Takes a while after the signal, as ranks do.
        "srun": f"trap 'sleep 0.3; exit {code}' USR1; touch started; for i in $(seq 1000); do sleep 0.05; done; exit {code}",
        "squeue": f"echo {state}",
        "scontrol": 'echo "$@" > requeued',
    }
    if not is_told:
        programs["srun"] = f"touch started; exit {code}"
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "job").write_text(render(BatchScript(requeue=True, venv=str(tmp_path))))
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "job"], env=env, cwd=tmp_path)
    end_s = time.monotonic() + LIMIT_S
    # The ranks may be quicker than the script, which is told only once it has begun to wait for them.
    while not (tmp_path / "started").exists() or (is_told and not catches(job.pid, signal.SIGUSR1)):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    if is_told:
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
        # As a preemption does to all processes.
        job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == code
    assert (tmp_path / "requeued").exists() == is_requeued
    assert not is_requeued or (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_one_job_of_an_array_is_queued_again_by_itself(tmp_path: Path) -> None:
    """One of them has the array's number, by which Slurm means all."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    programs = {
        "srun": "exit 75",
        "squeue": 'echo RUNNING; if [[ "$*" != *_* ]]; then echo PENDING; fi',
        "scontrol": 'echo "$@" > requeued',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    array = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    script = render(BatchScript(requeue=True, venv=str(tmp_path)))
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **array}
    assert subprocess.run(["bash"], input=script, env=env, cwd=tmp_path, text=True, timeout=LIMIT_S).returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 7_2\n"


@pytest.mark.parametrize(("num_failures", "program"), [(2, "squeue"), (2, "scontrol"), (99, "squeue"), (99, "scontrol")])
def test_a_slurm_that_does_not_answer_at_once_queues_the_job_again_all_the_same(
    tmp_path: Path, num_failures: int, program: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    fails = f"echo x >> calls; if [ $(wc -l < calls) -le {num_failures} ]; then exit 1; fi"
    programs = {"srun": "exit 75", "squeue": "echo RUNNING", "scontrol": 'echo "$@" > requeued', "sleep": "echo $1 >> pauses"}
    programs[program] = f"{fails}; {programs[program]}"
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    script = render(BatchScript(requeue=True, venv=str(tmp_path)))
    job = subprocess.run(["bash"], input=script, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert job.returncode == 75
    gives_up = num_failures == 99
    assert (tmp_path / "requeued").exists() != gives_up
    assert ("so it is not queued again: scontrol requeue 7" in job.stderr) == gives_up
    assert (tmp_path / "pauses").read_text().split() == (["1", "2", "4", "8", "0"] if gives_up else ["1", "2"])


def test_each_component_has_its_own_number_of_cores(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    (tmp_path / "bin" / "srun").write_text(f'#!{sys.executable}\nimport sys\nprint(sys.argv[1:])\n')
    (tmp_path / "bin" / "srun").chmod(0o755)
    components = (Component(cpus_per_task=8), Component(cpus_per_task=3))
    script = render(BatchScript(components=components, command=("run", "a b.py"), venv=str(tmp_path)))

    def parts(**env: str) -> list[list[str]]:
        path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **env}
        done = subprocess.run(["bash"], input=script, env=path, capture_output=True, text=True, timeout=LIMIT_S)
        words = eval(done.stdout)
        return [words[: words.index(":")], words[words.index(":") + 1 :]]

    def part(index: int, num_cores: int) -> list[str]:
        options = ["--mpi=pmix", f"--het-group={index}", f"--cpus-per-task={num_cores}"]
        return [*options, "env", f"OMP_NUM_THREADS={num_cores}", "hvd-adaptive", "run", "a b.py"]

    assert parts() == [part(0, 8), part(1, 3)]
    # Options of sbatch win, and Slurm tells them so.
    assert parts(SLURM_CPUS_PER_TASK_HET_GROUP_0="6", SLURM_CPUS_PER_TASK_HET_GROUP_1="1") == [part(0, 6), part(1, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ("train", "a\nb")}, "command must be of single lines"),
        ({"prologue": ("a\rb",)}, "prologue must be of single lines"),
        ({"venv": "a\nb"}, "venv must be of single lines"),
        ({"name": "a\n#SBATCH --uid=0"}, "name must be a line without quotes and backslashes"),
        ({"account": 'a"b'}, "account must be a line without quotes"),
        ({"time": ""}, "time must be a line without quotes and backslashes, not empty, got ''"),
        ({"launcher": "ssh"}, "launcher must be srun or mpirun, got 'ssh'"),
        ({"requeue": True, "command": ("run", "x.py")}, "requeue needs the command train"),
        ({"time": "banana"}, "time must be one of Slurm's, .*got 'banana'"),
        ({"time": "1-"}, "time must be one of Slurm's"),
        ({"time": "1:2:3:4"}, "time must be one of Slurm's"),
        ({"signal_s": 0}, r"signal_s must be in \[1, 65535\]"),
        ({"requeue": True, "time": "3:00"}, "time 3:00 must be longer than signal_s, 120 s, and the minute"),
        ({"requeue": True, "time": "0-1", "signal_s": 3600}, "time 0-1 must be longer than signal_s, 3600 s"),
        ({"components": (Component(), Component()), "launcher": "mpirun"}, "components of a heterogeneous job need"),
    ],
)
def test_what_cannot_stand_in_a_script_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchScript(**options)


@pytest.mark.parametrize("time", ["90", "30:00", "04:00:00", "2-0", "2-12:30", "1-02:03:04", "UNLIMITED"])
def test_slurms_times(time: str) -> None:
    assert f"--time={time}\n" in render(BatchScript(time=time, requeue=True))


def test_components_are_checked() -> None:
    with pytest.raises(ValueError, match="nodes must be >= 1, got 0"):
        Component(nodes=0)
    with pytest.raises(ValueError, match="constraint must be a line"):
        Component(constraint="a\\b")
    assert "--gpus" not in "".join(Component(gpus_per_node=0).lines())


def test_the_command_shows_saves_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "job.sbatch"
    second = [":", "--constraint", "v100"]
    assert main(["submit", "--nodes", "2", "--output", str(saved), *second, "--", "train", "--epochs", "2"]) == 0
    text = capsys.readouterr().out
    assert saved.read_text() == text
    assert text.count("#SBATCH hetjob") == 1 and text.count(" hvd-adaptive train --epochs 2") == 2
    # A mistake is found now, not when the job's turn comes.
    for arguments, message in (
        (["--output", str(saved), "--", "train"], f"--output {saved} cannot be written"),
        (["--", "train", "--epochs", "-1"], "epochs must be > 0"),
        (["--", "train", "-np", "2"], "leave -np out"),
        (["--nodes", "2", "--", "train", "--slowdown", "1,2,4"], "8 ranks, got 3 factors"),
        (["--nodes", "3", ":", "--", "run", "--slowdown", "1,2", __file__], "16 ranks, got 2 factors"),
        (["--signal-s", "60", "--", "train"], "--signal-s needs --requeue"),
        (["--", "train", "--elastic", "--max-np", "2"], "--elastic starts them itself"),
        (["--", "train", "--elastic-batch", "fixed-per-rank"], "needs reference_ranks"),
        (["--", "train", "--island", "3"], "got 3 and 4 ranks: choose 2 or 4"),
        (["--", "run", str(tmp_path / "x.py")], "is not there"),
        (["--nodes", "2"], "needs a command after --"),
        (["--", "rm", "-rf"], "needs a command after --"),
    ):
        assert main(["submit", *arguments]) == 2
        assert message in capsys.readouterr().err
    # What may change until then, or is so on this host only, is told.
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "rounds.jsonl").write_text("{}\n")
    for arguments, warning in (
        (["--", "train", "--data", str(tmp_path / "none")], "none' is no file"),
        (["--", "train", "--resume", str(tmp_path / "none")], "there is no checkpoint in"),
        (["--", "train", "--out", str(tmp_path / "old")], "holds a run already"),
        (["--requeue", "--", "train", "--out", str(tmp_path / "old")], ""),
        (["--requeue", "--", "train"], ""),
        (["--venv", str(tmp_path), "--", "train"], f"{tmp_path}/bin/activate, which the script reads, is not there"),
    ):
        assert main(["submit", "--venv", sys.prefix, *arguments]) == 0
        told = capsys.readouterr().err
        assert warning in told if warning else not told
    # Quoted, as they are in the script, the shell leaves them alone.
    monkeypatch.setenv("HOME", "/home/me")
    assert main(["submit", "--venv=~/venv", "--log=~/%j.out", "--", "train"]) == 0
    text = capsys.readouterr().out
    assert "\n. /home/me/venv/bin/activate\n" in text and "\n#SBATCH --output=/home/me/%j.out\n" in text
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("sbatch") is None and main(["submit", "--yes", "--", "train"]) == 2
    assert "there is no sbatch on PATH" in capsys.readouterr().err
