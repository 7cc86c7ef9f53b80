from __future__ import annotations

import io
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import terminal

from hvd_adaptive.cli.early_checks import check_slowdown_early
from hvd_adaptive.cluster import relaunch as module
from hvd_adaptive.cluster import signals
from hvd_adaptive.cluster.relaunch import (
    Launcher,
    choose_launcher,
    find_launcher,
    launch_command,
    meeting_place,
    python_module,
    recognize,
)

VERSIONS = {
    "openmpi4": "mpirun (Open MPI) 4.1.8\n\nReport bugs to",
    "openmpi5": "mpirun (Open MPI) 5.0.11\n",
    "hydra": "HYDRA build details:\n    Version:                                 4.3.2\n",
}


def make_command(num_ranks, env=None, flavour="openmpi4", num_cores=2, is_root=False):
    launcher = Launcher("/opt/bin/mpirun", flavour)
    return launch_command(
        num_ranks, ["prog", "--x"], env=env or {}, launcher=launcher, num_cores=num_cores, is_root=is_root
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot leave the working folder out")
def test_a_file_of_the_working_folder_is_not_pythons_own(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert subprocess.run([*python_module("hvd_adaptive"), "--version"], timeout=60).returncode == 0


def test_commands_of_the_flavours():
    head = ["/opt/bin/mpirun", "-np", "2"]
    by_slot = ["--bind-to", "none", "--map-by"]
    assert make_command(2)[0] == [*head, *by_slot, "slot", "--oversubscribe", "prog", "--x"]
    assert make_command(2, flavour="openmpi5")[0] == [*head, *by_slot, "slot:OVERSUBSCRIBE", "prog", "--x"]
    assert make_command(2, flavour="hydra")[0] == [*head, "-bind-to", "none", "prog", "--x"]


def test_threads_follow_the_cores():
    for num_ranks, num_cores, threads in ((2, 8, "4"), (4, 2, "1"), (2, 5.5, "2"), (2, 0.5, "1")):
        assert make_command(num_ranks, num_cores=num_cores)[1]["OMP_NUM_THREADS"] == threads


def test_the_users_own_variables_win():
    env = {"OMP_NUM_THREADS": "7", "OMPI_MCA_mpi_yield_when_idle": "0", "KEEP": "this"}
    _, result = make_command(4, env, num_cores=2)
    assert {name: result[name] for name in env} == env


def test_root_only_where_it_is_root():
    names = {f"{p}_ALLOW_RUN_AS_ROOT{c}" for p in ("OMPI", "PRTE") for c in ("", "_CONFIRM")}
    assert names <= make_command(2, is_root=True)[1].keys()
    assert not names & make_command(2)[1].keys()
    assert not names & make_command(2, flavour="hydra", is_root=True)[1].keys()


def test_in_a_schedulers_job_its_slots_count_and_variables_travel():
    env = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "HVD_ADAPTIVE_X": "1", "HOME": "/"}
    command, result = make_command(8, env)
    assert "--oversubscribe" not in command
    assert "OMP_NUM_THREADS" not in result
    assert command[command.index("HVD_ADAPTIVE_X") - 1] == "-x"
    assert "HOME" not in command


def test_each_node_of_a_schedulers_job_keeps_the_gpus_that_it_was_given():
    env = {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    launcher = Launcher("/opt/bin/mpirun", "openmpi4")

    def forwarded(env):
        command, _ = launch_command(
            2, ["prog"], env=env, launcher=launcher, num_cores=2, is_root=False, hosts={"a": 1, "b": 1}
        )
        return {name for before, name in itertools.pairwise(command) if before == "-x"}

    # Over ssh nothing else would tell the other host.
    assert forwarded(env) >= set(env)
    assert forwarded({**env, "SLURM_JOB_ID": "1"}) & set(env) == {"CUDA_DEVICE_ORDER"}


@pytest.mark.parametrize(
    "env",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "4"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_refused_inside_an_mpi_world(env):
    with pytest.raises(RuntimeError, match=r"-np 2 starts ranks of its own.*already rank 0 of"):
        make_command(2, env)


def test_allowed_in_an_interactive_slurm_shell():
    assert make_command(2, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "1"})


def test_no_ranks():
    with pytest.raises(ValueError, match="-np must be >= 1, got 0"):
        make_command(0)
    # Not of a slowdown that nobody has asked for.
    with pytest.raises(ValueError, match="-np must be >= 1, got -1"):
        check_slowdown_early(None, -1)


@pytest.mark.parametrize("flavour", VERSIONS)
def test_recognize(flavour):
    assert recognize("mpirun", VERSIONS[flavour]) == flavour


@pytest.mark.parametrize("text", ["mpirun (Open MPI) 3.1.0", "", "something else"])
def test_recognize_others(text):
    with pytest.raises(RuntimeError, match="neither Open MPI >= 4 nor MPICH"):
        recognize("mpirun", text)


def make_mpirun(folder: Path, version: str) -> Path:
    folder.mkdir()
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    return program


def test_the_launcher_beside_python_comes_first(tmp_path):
    own, path = (
        make_mpirun(tmp_path / "own", VERSIONS["hydra"]),
        make_mpirun(tmp_path / "path", VERSIONS["openmpi5"]),
    )
    env = {"PATH": f"{path.parent}:/bin"}
    assert find_launcher(env, beside=own.parent) == Launcher(str(own), "hydra")
    assert find_launcher(env, beside=tmp_path) == Launcher(str(path), "openmpi5")


def test_no_launcher_at_all(tmp_path):
    with pytest.raises(RuntimeError, match=r"no mpirun or mpiexec.*scripts/setup\.sh"):
        find_launcher({"PATH": str(tmp_path)}, beside=tmp_path)


def test_torchrun_starts_ranks_over_torch_where_there_is_no_mpirun(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_launcher", lambda env: find_launcher({"PATH": str(tmp_path)}, beside=tmp_path))
    launcher = choose_launcher({}, "torch")
    assert launcher == Launcher(sys.executable, "torchrun")
    for backend in ("horovod", "auto"):
        with pytest.raises(RuntimeError, match=r"no mpirun or mpiexec.*--backend torch"):
            choose_launcher({}, backend)
    command, env = launch_command(3, ["prog", "--x"], env={}, launcher=launcher, num_cores=6, is_root=True)
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node=3", "--no-python"]
    assert command == [*torchrun, "prog", "--x"]
    assert env["OMP_NUM_THREADS"] == "2" and not any(name.startswith(("OMPI_", "PRTE_")) for name in env)


def test_nobody_else_gets_the_port_where_ranks_meet():
    with meeting_place({}) as place:
        port = int(place["MASTER_PORT"])
        assert place["MASTER_ADDR"] == "127.0.0.1"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # Rank 0 does, and its connections are not lost to the holder.
        with socket.create_server(("127.0.0.1", port), reuse_port=True) as rank_0:
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=5), rank_0.accept()[0]:
                    pass


def test_a_place_that_the_user_names_stays():
    with meeting_place({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}) as place:
        assert place == {}
    with meeting_place({"SLURM_JOB_ID": "1"}) as place:
        assert place["MASTER_ADDR"] == socket.gethostname()


# A stand-in for the package: `python -m hvd_adaptive` in this folder runs these ranks instead.
RANKS = """
import os, pathlib, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
sys.stdout.write(f"rank {comm.rank} of {comm.size} {sys.argv[1:]} {os.environ['OMP_NUM_THREADS']}\\n")
sys.stdout.flush()
def save(*_):
    time.sleep(float(sys.argv[2]))
    pathlib.Path(f"saved-{comm.rank}").touch()
    sys.exit(75)
if sys.argv[1] == "save":
    signal.signal(signal.SIGUSR1, save)
if sys.argv[1] in ("sleep", "save", "load"):
    pathlib.Path(f"started-{comm.rank}").touch()
    time.sleep(300)
sys.exit(int(sys.argv[1]))
"""
PARENT = """
import importlib, sys
sys.path.insert(0, {real!r})
from hvd_adaptive.cluster.relaunch import relaunch
sys.exit(relaunch(2, sys.argv[1:], ends_in_order=sys.argv[1] in ("save", "load")))
"""


@pytest.fixture
def parent(tmp_path):
    package = tmp_path / "stand_in" / "hvd_adaptive"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(RANKS)
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(real=str(Path(__file__).resolve().parents[2])))
    return [sys.executable, str(script)], {"cwd": package.parent, "env": {"OMP_NUM_THREADS": ""}, "forked": False}


def test_ranks_run_and_the_exit_code_comes_back(run_job, parent):
    argv, options = parent
    result = run_job([*argv, "0"], **options)
    assert result.returncode == 0, result.describe()
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2 ['0'] 1", "rank 1 of 2 ['0'] 1"]
    assert run_job([*argv, "7"], **options).returncode == 7


def test_what_cannot_be_written_ends_the_ranks(run_job, parent):
    argv, options = parent
    result = run_job(["sh", "-c", 'exec "$@" > /dev/full', "sh", *argv, "sleep"], **options, timeout=120)
    assert not result.timed_out and not result.leftover, result.describe()
    assert result.returncode == 1 and "No space left on device" in result.stderr, result.describe()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_ranks(run_job, parent, number):
    argv, options = parent

    def interrupt(child):
        while len(list(options["cwd"].glob("started-*"))) < 2 and child.poll() is None:
            time.sleep(0.02)
        os.kill(child.pid, number)

    result = run_job([*argv, "sleep"], **options, during=interrupt, timeout=120)
    assert not result.timed_out, result.describe()
    # Not what it said: that may still have been on its way through the launcher.
    assert (options["cwd"] / "started-1").exists(), result.describe()
    assert result.returncode != 0
    assert not result.leftover


@pytest.mark.parametrize(
    ("ranks", "gaps_s", "saves"),
    # Ranks that load do not catch SIGUSR1 yet.
    [(["save", "1"], [0.2], True), (["save", "60"], [2.2], False), (["load"], [], False)],
    ids=["twice", "second", "early"],
)
def test_ranks_that_end_in_order(run_job, parent, ranks, gaps_s, saves):
    argv, options = parent

    def end(child):
        while len(list(options["cwd"].glob("started-*"))) < 2 and child.poll() is None:
            time.sleep(0.02)
        for gap_s in [0.0, *gaps_s]:
            time.sleep(gap_s)
            child.send_signal(signal.SIGTERM)

    result = run_job([*argv, *ranks], **options, during=end, timeout=120)
    assert result.returncode == 75 and not result.leftover, result.describe()
    assert len(list(options["cwd"].glob("saved-*"))) == 2 * saves, result.describe()


def test_an_order_that_the_launcher_drops_as_it_has_no_ranks_yet_is_repeated():
    launcher = f"trap '' USR1; kill -TERM {os.getpid()}; sleep 0.6; trap 'exit 75' USR1; sleep 5 & wait"
    assert module._run(["sh", "-c", launcher], os.environ, is_torchrun=False, ends_in_order=True) == 75


def test_a_closed_terminal_ends_the_ranks(run_job, parent):
    argv, options = parent
    # Rank 1 is there as well, or is about to be: mpirun ends both.
    command = [sys.executable, terminal.__file__, str(options["cwd"] / "started-0"), *argv, "sleep"]
    result = run_job(command, **options, timeout=120)
    assert not result.timed_out and not result.leftover, result.describe()
    assert (options["cwd"] / "started-0").exists(), result.describe()
    assert result.returncode != 0


@pytest.mark.parametrize(("in_order", "number"), [(False, "TERM"), (True, "USR1")])
@pytest.mark.parametrize("signal_first", [True, False])
def test_a_closed_terminal_tells_the_launcher_once(monkeypatch, tmp_path, signal_first, in_order, number):
    monkeypatch.setattr(signals, "_YOUNG_S", 0.0)
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(buffer=io.BufferedWriter(_Closed())))
    ways = [f"kill -HUP {os.getpid()}", "echo hello"]
    catch = [f"trap 'echo {name} >> {tmp_path / 'told'}' {name}" for name in ("TERM", "USR1")]
    launcher = "; ".join([*catch, ways[not signal_first], "sleep 0.3", ways[signal_first], "sleep 0.3", "true"])
    with pytest.raises(OSError, match="is closed"):
        module._run(["sh", "-c", launcher], os.environ, is_torchrun=False, ends_in_order=in_order)
    assert (tmp_path / "told").read_text() == f"{number}\n"


class _Closed(io.RawIOBase):
    """A terminal that is closed."""

    def writable(self) -> bool:
        return True

    def write(self, text: object) -> int:
        raise OSError("is closed")


def test_nohup_is_heeded(run_job, parent):
    argv, options = parent

    def hang_up(child):
        while len(list(options["cwd"].glob("started-*"))) < 2 and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(signal.SIGHUP)
        time.sleep(2.0)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)

    result = run_job(["nohup", *argv, "sleep"], **options, during=hang_up, timeout=120)
    assert not result.timed_out and not result.leftover, result.describe()


def test_a_launcher_that_does_not_heed_a_signal_is_named(monkeypatch, capfd):
    monkeypatch.setattr(signals, "_LONG_S", 0.1)
    command = ["sh", "-c", "trap '' USR1; echo ready; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout.readline() == b"ready\n"
        signals.pass_on(deaf, signal.SIGTERM, True, started_s=time.monotonic() - 60)
        said, limit_s = "", time.monotonic() + 30
        while "A second signal ends the job at once" not in said:
            assert time.monotonic() < limit_s
            said += capfd.readouterr().err
            time.sleep(0.05)
        deaf.kill()


def test_ranks_end_with_a_launcher_that_is_killed(run_job, parent):
    argv, options = parent

    def kill(child):
        while len(list(options["cwd"].glob("started-*"))) < 2 and child.poll() is None:
            time.sleep(0.02)
        child.kill()

    result = run_job([*argv, "sleep"], **options, during=kill, timeout=120)
    assert result.returncode == -signal.SIGKILL and not result.leftover, result.describe()


# Threads that fork and start processes beside it; preexec_fn would run Python in a child that has copied their locks.
THREADED = """
import os, signal, sys
sys.path.insert(0, {real!r})
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
from hvd_adaptive.cluster.relaunch import start
import subprocess
popen, seen = subprocess.Popen, []
subprocess.Popen = lambda *args, **options: seen.append(options) or popen(*args, **options)
child = start(["/bin/sh", "-c", "grep SigBlk /proc/self/status; ps -o sid= -p $$; echo $$"], os.environ)
print(child.wait(), child.pid, "preexec_fn" in seen[0], flush=True)
print(start(["/not/there"], os.environ).wait())
"""


def test_a_launcher_starts_without_code_between_fork_and_exec(run_job):
    result = run_job([sys.executable, "-c", THREADED.format(real=str(Path(__file__).resolve().parents[2]))])
    blocked, session, pid, said, missing = result.stdout.splitlines()
    assert int(blocked.split()[1], 16) == 0
    assert session.strip() == pid and said == f"0 {pid} False"
    assert missing == "127" and "/not/there cannot be started" in result.stderr


COUNTING = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
open(sys.argv[1], "w").close()
count = 0
while signal.sigtimedwait([signal.SIGTERM], 1.0 if count else 60.0) is not None:
    count += 1
with open(sys.argv[1], "w") as file:
    file.write(f"{count}\\n")
"""
MANY_THREADS = """
import os, sys, threading
sys.path.insert(0, {real!r})
from hvd_adaptive.cluster.relaunch import start
for _ in range(8):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
children = [start([sys.executable, "-c", sys.argv[1], path], os.environ) for path in sys.argv[2:]]
threading.Event().wait()
"""


def test_a_killed_parent_of_many_threads_ends_its_launcher_by_one_signal(run_job, tmp_path):
    # A second SIGTERM that meets mpirun while it ends can make it hang for ever.
    paths = [tmp_path / str(i) for i in range(8)]

    def kill(child):
        while not all(path.exists() for path in paths) and child.poll() is None:
            time.sleep(0.02)
        child.kill()

    script = MANY_THREADS.format(real=str(Path(__file__).resolve().parents[2]))
    result = run_job([sys.executable, "-c", script, COUNTING, *map(str, paths)], during=kill)
    assert result.returncode == -signal.SIGKILL and not result.leftover, result.describe()
    assert [path.read_text() for path in paths] == ["1\n"] * 8
