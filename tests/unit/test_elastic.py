"""Elasticity without ranks: hosts, backing off, the rule for batches, and what the command refuses."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hvd_adaptive.algorithm.world_scale import lr_factor, planned_mega_batch, scaled_config
from hvd_adaptive.cli.main import main
from hvd_adaptive.cli.option_sources import read_environment
from hvd_adaptive.cli.run import run_config
from hvd_adaptive.cluster import hosts, job_memory
from hvd_adaptive.cluster.blame import blame, is_first_sign, same_host
from hvd_adaptive.cluster.hosts import (
    Backoff,
    assign,
    parse_hosts,
    run_script,
    slurm_environment,
    slurm_hosts,
)
from hvd_adaptive.cluster.supervisor import Elastic
from hvd_adaptive.config import Config
from hvd_adaptive.wrap.run_options import RunConfig

SCRIPT = str(Path(__file__).parents[1] / "wrap" / "scripts" / "elastic.py")


def test_discovery_scripts_are_horovods() -> None:
    assert parse_hosts("a.x:1\na.y:1\na:0\n") == {"a.x": 1, "a.y": 1}
    assert parse_hosts("a:2\n b-1.x:4 \n\nc\nd:0\n") == {"a": 2, "b-1.x": 4, "c": 1}
    for text, message in (
        ("a:2 b:2", "a line must be host:slots, got 'a:2 b:2'"),
        ("-o:1", "a line must be host:slots"),
        ("a:-1", "a line must be host:slots"),
        ("a:1\na:2", "host a is printed twice$"),
        ("a:1\nb:1\nA.x:2", "host a is printed twice, also as A.x"),
        (f"localhost:1\n{socket.gethostname()}:2", "host localhost is printed twice, also as"),
        ("a:99999999999999", "a line must be host:slots"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_hosts(text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo oops >&2; exit 3", "exit code 3: oops"),
        ("exit 5", "exit code 5$"),
        ("echo 'a b'", "a line must be host:slots"),
        (None, "No such file"),
    ],
)
def test_a_script_that_fails_is_named(tmp_path: Path, body: str | None, message: str) -> None:
    script = tmp_path / "discover"
    if body is not None:
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    with pytest.raises(ValueError, match=f"--host-discovery-script {script}: .*{message}"):
        run_script(str(script))


def test_a_script_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, pids = tmp_path / "discover", tmp_path / "pids"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >> {pids}\nif [ -e hangs ]; then wait; fi\necho a\nkill $!\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    def all_have_ended() -> bool:
        # One that nobody waits for has no command line, and another may have its number by now.
        lines = (Path(f"/proc/{pid}/cmdline") for pid in pids.read_text().split())
        return not any(line.exists() and line.read_bytes().startswith(b"sleep") for line in lines)

    discovery = hosts.Discovery(lambda: run_script(str(script)), 1000.0)
    assert discovery.hosts == {"a": 1}
    (tmp_path / "hangs").touch()
    discovery.ask_now(0.0)
    wait_until(lambda: len(pids.read_text().split()) == 2)
    discovery.close()
    wait_until(all_have_ended)
    monkeypatch.setattr(hosts, "_SCRIPT_LIMIT_S", 0.5)
    with pytest.raises(ValueError, match="timed out after"):
        run_script(str(script))
    wait_until(all_have_ended)
    monkeypatch.undo()
    command = "import sys; from hvd_adaptive.cluster.hosts import *; Discovery(lambda: run_script(sys.argv[1]), 1.0)"
    with subprocess.Popen([sys.executable, "-c", command, str(script)], cwd=tmp_path) as launcher:
        wait_until(lambda: len(pids.read_text().split()) == 4)
        launcher.terminate()
        assert launcher.wait(60) == 75
    wait_until(all_have_ended)


def test_a_signal_waits_until_a_script_that_is_started_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, popen, started = tmp_path / "discover", subprocess.Popen, []
    script.write_text("#!/bin/sh\nsleep 1000\n")
    script.chmod(0o755)

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SystemExit) as left:
        hosts.Discovery(lambda: run_script(str(script)), 1.0)
    assert left.value.code == 75 and started[0].poll() == -signal.SIGKILL
    # It is told once.
    monkeypatch.undo()
    script.write_text("#!/bin/sh\necho a\n")
    assert run_script(str(script)) == {"a": 1}


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Slurm's commands, as far as what they print goes (tests/slurm has real ones)."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def answer(**answers: str) -> None:
        for name, text in answers.items():
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)

    answer(scontrol='echo "$3" | tr , "\\n"')
    return answer


def test_the_nodes_that_a_slurm_job_has_now_and_that_still_work(slurm_commands: Callable[..., None]) -> None:
    # n5 is up, but no longer the job's; n6 came later; n2 to n4 are the job's in state only.
    slurm_commands(squeue='echo "8 n9"; echo "7 n1,n2,n3,n4,n6"')
    slurm_commands(sinfo="printf 'n1 mixed\nn2 down\nn3 allocated*\nn4 draining\nn6 mixed\n'")
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3,n4,n5", "SLURM_TASKS_PER_NODE": "2(x3),1,4"}
    assert slurm_hosts(env) == {"n1": 2, "n4": 1, "n6": 4}
    with pytest.raises(ValueError, match=r"SLURM_TASKS_PER_NODE is '2\(x2\)', but the job has 5 nodes"):
        slurm_hosts({**env, "SLURM_TASKS_PER_NODE": "2(x2)"})
    with pytest.raises(ValueError, match="squeue names no nodes of job 9"):
        slurm_hosts({**env, "SLURM_JOB_ID": "9"})


def test_mpirun_hears_of_the_nodes_that_a_launch_is_for(slurm_commands: Callable[..., None]) -> None:
    env = {"SLURM_JOB_NODELIST": "n1,n2", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_JOB_CPUS_PER_NODE": "8,4"}
    env["SLURMD_NODENAME"] = "n1"
    changed = slurm_environment(env, {"n2": 1, "n3": 2})
    # With the node that mpirun runs on, so that srun is told which of them it is to use.
    assert changed["SLURM_JOB_NODELIST"] == changed["SLURM_NODELIST"] == "n2,n3,n1"
    assert changed["SLURM_TASKS_PER_NODE"] == "1,2,1" and changed["SLURM_JOB_CPUS_PER_NODE"] == "4,8,8"
    assert changed["SLURM_NNODES"] == changed["SLURM_JOB_NUM_NODES"] == "3"
    assert slurm_environment(env, {"n1": 2})["SLURM_NTASKS"] == "2"
    assert slurm_environment({}, {"localhost": 2}) == {}


def test_ranks_stay_where_they_are() -> None:
    found = {"a": 2, "b": 2, "c": 4}
    assert assign(found, 3) == {"a": 2, "b": 1}
    assert assign(found, 5, first={"c": 4}) == {"c": 4, "a": 1}
    assert assign(found, 99) == found
    assert assign({}, 3) == {}


def test_hosts_that_keep_failing_are_left_out_ever_longer() -> None:
    backoff = Backoff()
    assert backoff.failed("a", 0.0) == 0
    assert [backoff.failed("a", float(at)) for at in (10, 30, 60)] == [5, 10, 20]
    assert backoff.usable({"a": 2, "b": 2}, 79.0) == {"b": 2}
    assert backoff.usable({"a": 2, "b": 2}, 80.5) == {"a": 2, "b": 2}
    # Long ago is forgotten.
    assert backoff.failed("a", 5000.0) == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mpirun noticed that process rank 1 with PID 0 on node beta exited on signal 9 (Killed).", ("beta", 0.0)),
        (
            "hvd_adaptive: rank 3 on beta (pid 17) is frozen: no heartbeat for 5.2 s; its last sign of life: working 'x'. "
            "Rank 0 on alpha found this and ends the job.",
            ("beta", 5.2),
        ),
        ("hvd_adaptive: rank 3 on beta (pid 17) is stuck: alive, but no progress for 9.0 s while others wait", ("beta", 0.0)),
        ("  Remote daemon: [[5,0],1] on node beta", ("beta", 0.0)),
        ("ssh: connect to host beta port 22: Connection refused", ("beta", 0.0)),
        ("ssh: Could not resolve hostname beta: Name or service not known", ("beta", 0.0)),
        ("rank 1 failed: ValueError on node", None),
    ],
)
def test_who_is_blamed(line: str, expected: Any) -> None:
    assert blame(line) == expected


def test_a_first_sign_is_no_blame() -> None:
    line = "Primary job  terminated normally, but 1 process returned"
    assert is_first_sign(line) and blame(line) is None
    assert not is_first_sign("mpirun noticed that process rank 1 with PID 0 on node beta exited on signal 9 (Killed).")


def test_one_host_by_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"alpha": "10.0.0.1", "alpha.east": "10.0.0.1", "beta": "10.0.0.2", "node": "127.0.1.1", "other": "127.0.1.1"}

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        address = host if host.count(".") == 3 else addresses.get(host)
        if address is None:
            raise socket.gaierror(f"{host} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "here.east")
    for one, other in (
        ("alpha", "alpha.east"),
        ("ALPHA", "alpha"),
        ("beta", "10.0.0.2"),
        ("here", "localhost"),
        ("127.0.0.1", "here.east"),
        ("nowhere", "nowhere.east"),
    ):
        assert same_host(one, other) and same_host(other, one)
    # Names of 127.0.1.1 are each host's own.
    for one, other in (
        ("alpha", "beta"),
        ("alpha.east", "alpha.west"),
        ("alpha", "alphabet"),
        ("node", "other"),
        ("10.0.0.1", "10.0.0.2"),
        ("10", "10.0.0.2"),
        ("nowhere", "elsewhere"),
    ):
        assert not same_host(one, other) and not same_host(other, one)


def test_a_fixed_total_batch_keeps_learning_rate_and_steps() -> None:
    config = Config(batch_size=64, reference_ranks=4, batch_size_rule="paper")
    for ranks in (1, 2, 8, 16):
        scaled = scaled_config(config, ranks)
        assert scaled.batch_size * ranks == 64 * 4
        assert scaled.reference_batch_size == scaled.batch_size and lr_factor(config, ranks) == 1
        assert scaled.mega_batch is None and planned_mega_batch(scaled, ranks) == planned_mega_batch(config, 4) == 3200
        assert planned_mega_batch(scaled_config(dataclasses.replace(config, mega_batch=700), ranks), ranks) == 700
        low, high = scaled.batch_size_bounds
        assert (low * ranks, high * ranks) == (8 * 4, 64 * 4)
        assert scaled.batch_size_step_samples == pytest.approx(config.batch_size_step_samples * 4 / ranks)
    assert scaled_config(config, 4) is config
    assert scaled_config(Config(batch_size=64), 7) == Config(batch_size=64)
    # Rounded to whole samples, never to none; sync stays exact.
    assert scaled_config(Config(batch_size=2, reference_ranks=1), 7).batch_size == 1
    sync = Config(strategy="sync", batch_size=10, reference_ranks=4)
    assert {scaled_config(sync, ranks).global_batch_size for ranks in (1, 3, 7)} == {40}
    # Its shares are bound by what was given, and by nothing else.
    assert (scaled_config(sync, 3).min_batch_size, scaled_config(sync, 3).max_batch_size) == (None, None)
    bound = scaled_config(Config(strategy="sync", batch_size=12, max_batch_size=24, reference_ranks=4), 2)
    assert (bound.min_batch_size, bound.max_batch_size) == (None, 48)
    given = Config(strategy="sync", global_batch_size=99, reference_ranks=4)
    assert {scaled_config(given, ranks).global_batch_size for ranks in (2, 3)} == {99}


def test_a_fixed_batch_a_rank_scales_the_learning_rate_of_synchronous_steps() -> None:
    for strategy, factor in (("local", 1.0), ("sma", 1.0), ("sync", 0.5), ("horovod", 0.5)):
        config = Config(strategy=strategy, batch_size=64, reference_ranks=4, elastic_batch="fixed-per-rank")
        scaled = scaled_config(config, 2)
        assert (scaled.batch_size, scaled.mega_batch, planned_mega_batch(scaled, 2)) == (64, None, 1600)
        assert scaled_config(dataclasses.replace(config, mega_batch=700), 2).mega_batch == 350
        assert lr_factor(config, 2) == lr_factor(scaled, 2) == factor
    config = Config(strategy="sync", global_batch_size=100, reference_ranks=4, elastic_batch="fixed-per-rank")
    assert scaled_config(config, 3).global_batch_size == 75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--elastic"], "--elastic needs --max-np"),
        (["train", "--elastic", "--min-np", "3", "--max-np", "2"], "--min-np must be >= 1 and <= --max-np, got 3 and 2"),
        (["train", "--elastic", "--max-np", "2", "--elastic-timeout", "0"], "--elastic-timeout must be > 0 s, got 0"),
        (["train", "--elastic", "--max-np", "2", "--record"], "record repeats a run with its number of ranks"),
        (["train", "--elastic", "--max-np", "2", "--slowdown", "2,1"], "slowdown '2,1' has a factor a rank"),
        (["train", "--elastic", "--max-np", "2", "--host-discovery-script", "/no/such"], "--host-discovery-script /no/such"),
        (["train", "--min-np", "2"], "--min-np is for --elastic"),
        (["train", "--elastic-timeout", "20", "-np", "2"], "--elastic-timeout is for --elastic"),
        (["train", "--elastic", "--max-np", "2", "--lr", "-1"], "lr must be > 0, got -1"),
        (["train", "--elastic", "--max-np", "2", "-np", "2"], "-np 2 is --max-np with --elastic, which is given as 2"),
        (["run", "--elastic", SCRIPT], "--elastic needs --max-np"),
        (["run", "--min-np=2", SCRIPT], "--min-np is for --elastic"),
        (["run", "--commit-dir", "a", SCRIPT], "--commit-dir is for --elastic"),
        (["run", "--elastic", "--max-np=2", "-np", "3", SCRIPT], "-np 3 is --max-np with --elastic, which is given as 2"),
        (["run", "--elastic", "--max-np", "2", "--dry-run", SCRIPT], "dry_run ends after a few steps: leave --elastic out"),
        (["run", "--elastic", "--max-np", "2", "--shares", "1,2", SCRIPT], "shares '1,2' has a number a rank"),
        (["run", "--elastic", "--max-np", "2", "--slowdown", "1,2", SCRIPT], "slowdown '1,2' has a number a rank"),
        (["run", "--elastic", "--max-np", "2", "no_such.py"], "'no_such.py' is not there"),
    ],
)
def test_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error:") == 1


def test_memory_of_killed_supervisors_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_memory, "_SHARED_MEMORY", tmp_path)
    stale = tmp_path / f"hvd-adaptive-{os.getuid()}-0123"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "round-00000001").mkdir()
    foreign = tmp_path / f"hvd-adaptive-{os.getuid()}x-0123"
    foreign.mkdir()
    first, lock = job_memory.make_memory()
    assert not stale.exists() and foreign.exists()
    second, other = job_memory.make_memory()
    # The first one's supervisor lives.
    assert first != second and first.exists() and first.stat().st_mode & 0o777 == 0o700
    lock.close()
    other.close()


def test_discovery_goes_on_with_what_it_knew(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = [{"a": 1}, ValueError("script: broken"), ValueError("script: broken"), {"b": 1}]
    may_change = threading.Event()

    def ask() -> hosts.Hosts:
        if len(answers) == 1:
            assert may_change.wait(60)
        answer = answers.pop(0) if answers else {"b": 1}
        if isinstance(answer, ValueError):
            raise answer
        return answer

    discovery = hosts.Discovery(ask, 0.02)
    wait_until(lambda: len(answers) == 1)
    assert discovery.hosts == {"a": 1}
    may_change.set()
    wait_until(lambda: discovery.hosts == {"b": 1})
    discovery.close()
    assert caplog.text.count("script: broken; going on with the hosts known before: {'a': 1}") == 1
    slow = hosts.Discovery(lambda: {"a": 1}, 1000.0)
    slow.hosts = {}
    slow.ask_now(60.0)
    assert slow.hosts == {"a": 1}
    slow.close()
    with pytest.raises(ValueError, match="no first answer"):
        hosts.Discovery(lambda: (_ for _ in ()).throw(ValueError("no first answer")), 1.0)


def test_a_first_answer_that_slurm_owes_is_asked_for_again(
    slurm_commands: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2"}
    once = "if [ ! -e asked ]; then touch asked; echo no controller >&2; exit 1; fi"
    slurm_commands(squeue=f'{once}; echo "7 n1"', sinfo="echo n1 mixed")
    discovery = hosts.Discovery(lambda: slurm_hosts(env), 0.02, 60.0)
    assert discovery.hosts == {"n1": 2}
    discovery.close()
    (tmp_path / "asked").unlink()
    with pytest.raises(ValueError, match="no controller"):
        hosts.Discovery(lambda: slurm_hosts(env), 1.0, 0.1)
    # What another question does not change is told at once.
    for wrong in (lambda: slurm_hosts({**env, "SLURM_TASKS_PER_NODE": "2,1"}), lambda: run_script("/no/such")):
        with pytest.raises(ValueError, match=r"but the job has 1 nodes|/no/such"):
            hosts.Discovery(wrong, 1.0, 600.0)


def test_limits() -> None:
    assert Elastic(min_np=1, max_np=1).timeout_s == 600


def test_what_a_script_is_told_is_no_option_of_what_it_starts() -> None:
    assert read_environment({"HVD_ADAPTIVE_LAUNCH": "2"}) == {}
    assert run_config(environment={"HVD_ADAPTIVE_LAUNCH": "2"}) == RunConfig()
