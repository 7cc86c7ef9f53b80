"""The supervisor of --elastic beside launchers that are shell scripts: when it gives up, and what becomes of signals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.cluster import hosts, job_memory, signals
from hvd_adaptive.cluster import supervisor as module
from hvd_adaptive.cluster.elastic_jobs import Beginning, Launch
from hvd_adaptive.cluster.hosts import LOCAL, changes
from hvd_adaptive.cluster.supervisor import Elastic, Supervisor

BLAME = "mpirun noticed that process rank 1 with PID 0 on node beta exited on signal 9 (Killed)."


class ShellJob:
    """A job whose launches each run a script of the shell, and merge at once where it is said so."""

    records: Path | None = None
    stops_at = "merge"
    no_progress = "ended before a new checkpoint"
    stops_in_order = True

    def __init__(self, *scripts: str, begins: tuple[bool, ...] = (), gets_on: bool = False) -> None:
        self._scripts, self._begins, self._gets_on = scripts, begins, gets_on
        self.num_launches = 0

    def num_done(self) -> int:
        return 0

    def arguments(self, number: int, *, local: bool) -> list[str]:
        self.num_launches = number
        return ["sh", "-c", self._scripts[min(number, len(self._scripts)) - 1]]

    def hear(self, line: str) -> bool:
        return False

    def beginning(self, launch: Launch) -> Beginning | None:
        return Beginning({}, "", {}) if self._begins and self._begins[launch.number - 1] else None

    def has_got_on(self, launch: Launch, code: int, *, blamed: bool) -> bool:
        return self._gets_on

    def was_stopped(self, code: int) -> bool:
        return code == 75

    def is_finished(self, code: int) -> bool:
        return code == 0

    def saved(self) -> str:
        return "nothing is saved"

    def close(self, *, finished: bool) -> str:
        return ""


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Supervisor]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(job_memory, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module, "build_command", lambda num_ranks, argv, hosts: (argv, dict(os.environ)))
    return lambda job: Supervisor(Elastic(min_np=1, max_np=2), lambda memory: job)


def test_it_gives_up_after_three_launches_without_progress(supervise: Any) -> None:
    job = ShellJob("exit 3")
    assert supervise(job).run() == 3 and job.num_launches == 3


def test_a_launch_that_worked_until_it_was_moved_breaks_a_row_of_failures(supervise: Any) -> None:
    # As where a host that is dead but listed comes back from being left out, again and again.
    failure, move = "exit 3", "exit 75"
    job = ShellJob(*[failure, failure, move] * 4, "exit 0", begins=(False, False, True) * 4 + (True,))
    assert supervise(job).run() == 0 and job.num_launches == 13
    # A move before anything was done says nothing.
    job = ShellJob(failure, failure, move, failure, begins=(False,) * 4)
    assert supervise(job).run() == 3 and job.num_launches == 4


def test_a_host_that_cannot_be_reached_is_waited_for(
    supervise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts, "_BACKOFF_S", 0.05)
    monkeypatch.setattr(Elastic, "ask", lambda self: {"localhost": 1, "beta": 1})
    unreached = "sleep 0.2; echo 'ORTE was unable to reliably start one or more daemons.' >&2; exit 1"

    def run(job: ShellJob, min_np: int = 2, timeout_s: float = 60.0) -> int:
        return Supervisor(Elastic(min_np=min_np, max_np=2, timeout_s=timeout_s), lambda memory: job).run()

    job = ShellJob("exit 3", *[unreached] * 4, "exit 0", begins=(True, *[False] * 4, True))
    job.records = tmp_path / "restarts.jsonl"
    assert run(job) == 0 and job.num_launches == 6
    (restart,) = map(json.loads, job.records.read_text().splitlines())
    assert restart["launch"] == 6 and restart["cause"] == "job ended with exit code 3" and restart["seconds"]["wait"] > 0.8
    # Another failure counts, and so does each where nothing has run before: an ssh that was never set up.
    job = ShellJob("exit 3", unreached, "exit 3", begins=(True, *[False] * 3))
    assert run(job) == 3 and job.num_launches == 4
    job = ShellJob(unreached, begins=(False,) * 3)
    assert run(job) == 1 and job.num_launches == 3
    # The hosts that are left are not to blame where the script itself calls ssh.
    refused = "echo 'ssh: connect to host storage port 22: Connection refused' >&2; exit 1"
    job = ShellJob("exit 3", refused, begins=(True, *[False] * 3))
    monkeypatch.setattr(Elastic, "ask", lambda self: {"localhost": 1})
    assert run(job, min_np=1) == 1 and job.num_launches == 3
    # All waiting together has the limit.
    monkeypatch.setattr(Elastic, "ask", lambda self: {"localhost": 1, "beta": 1})
    job = ShellJob("exit 3", unreached, begins=(True, *[False] * 9))
    capsys.readouterr()
    assert run(job, timeout_s=1.0) in (1, 69) and job.num_launches < 9


def test_a_host_that_was_taken_from_the_job_is_to_blame(supervise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"localhost": 1, "alpha": 1}, {"localhost": 1}]
    monkeypatch.setattr(Elastic, "ask", lambda self: answers.pop(0) if len(answers) > 1 else answers[0])
    job = ShellJob("exit 3", "exit 3", "exit 0")
    others: list[bool] = []
    monkeypatch.setattr(ShellJob, "has_got_on", lambda self, launch, code, *, blamed: others.append(blamed))
    assert supervise(job).run() == 0 and others == [True, False]


def test_a_launcher_that_cannot_end_is_killed(
    supervise: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LAUNCHER_END_S", 0.3)
    # As mpirun, which waits for its daemon on a host without power and cannot be ended by SIGTERM meanwhile.
    job = ShellJob(f"trap '' TERM; echo '{BLAME}' >&2; exec sleep 60", "exit 0")
    begin_s = time.monotonic()
    assert supervise(job).run() == 0 and job.num_launches == 2
    assert time.monotonic() - begin_s < 30
    assert "the launcher still runs 0.3 s after the fault was told: it is killed" in capsys.readouterr().err


def test_a_signal_that_comes_while_the_launcher_is_started_is_passed_on(supervise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = module.start

    def start_slowly(*arguments: Any, **options: Any) -> Any:
        child = start(*arguments, **options)
        # It is blocked in this thread, and so another one of this process takes it in.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return child

    monkeypatch.setattr(module, "start", start_slowly)
    assert supervise(ShellJob("sleep 20; exit 3")).run() == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_ranks_that_do_not_yet_catch_the_order_to_stop(
    supervise: Any, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    # The launcher's own exit code is 138 then.
    tell = f"touch {tmp_path}/begun; kill -{number.name[3:]} {os.getpid()}"
    assert supervise(ShellJob(f"{tell}; exec sleep 20")).run() == code
    assert (tmp_path / "begun").exists()


@pytest.mark.parametrize(("gap_s", "saves"), [(0.1, True), (4.0, False)])
def test_one_signal_delivered_twice_and_a_second_one(
    supervise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap_s: float, saves: bool
) -> None:
    monkeypatch.setattr(signals, "_SAME_SIGNAL_S", 1.0)
    # The launcher passes SIGTERM on by killing its ranks, and says 1.
    traps = f"trap 'sleep {1 if saves else 20} & wait $! && touch {tmp_path}/saved; exit 75' USR1; trap 'exit 1' TERM"
    tell = f"kill -TERM {os.getpid()}; sleep {gap_s}; kill -TERM {os.getpid()}"
    assert supervise(ShellJob(f"{traps}; ({tell}) & sleep 20 & wait $!")).run() == 75
    assert (tmp_path / "saved").exists() == saves


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (14, 75), (137, 75)])
def test_what_ranks_say_of_a_stop_stays_unless_one_was_lost(supervise: Any, code: int, expected: int) -> None:
    job = ShellJob(f"trap 'exit {code}' USR1; kill -TERM {os.getpid()}; sleep 20 & wait", begins=(True,))
    assert supervise(job).run() == expected


def test_an_order_that_the_launcher_drops_as_it_has_no_ranks_yet_is_repeated(supervise: Any) -> None:
    job = ShellJob(f"trap '' USR1; kill -TERM {os.getpid()}; sleep 0.6; trap 'exit 75' USR1; sleep 5 & wait", begins=(True,))
    assert supervise(job).run() == 75


@pytest.mark.parametrize(
    ("begins", "said"),
    [(False, "launch 1 ended by SIGTERM before its first merge"), (True, "the script does not use hvd.elastic")],
)
def test_ranks_that_have_nothing_to_save(supervise: Any, capsys: pytest.CaptureFixture[str], begins: bool, said: str) -> None:
    # The launcher says 1 of ranks that it kills.
    job = ShellJob(f"trap 'exit 1' TERM; kill -TERM {os.getpid()}; sleep 20 & wait", begins=(begins,))
    job.stops_in_order = False
    assert supervise(job).run() == 75 and said in capsys.readouterr().err


def test_slots_that_come_and_go_are_not_hosts() -> None:
    for ranks, present, expected in [
        (2, {LOCAL: 1}, (f"{LOCAL} has room for 1 of its 2 ranks now", "")),
        (1, {LOCAL: 2}, ("", f"{LOCAL} has room for 2 ranks now instead of 1")),
        (1, {"beta": 2}, (f"{LOCAL} left", "beta came")),
    ]:
        assert changes({LOCAL: ranks}, present, least=1, most=2) == expected
