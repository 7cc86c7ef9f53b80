"""``--elastic``: runs a training or a script again when ranks or hosts are lost, and moves it when hosts come or go.

A supervisor process starts the ranks under mpirun as ``-np`` does. What they are, and how far, is the job's to tell (see
elastic_jobs); the supervisor asks them by SIGUSR1 to stop in order, and judges the end of a launch by its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from hvd_adaptive.cluster.blame import blame, cannot_reach, is_first_sign, is_local, same_host
from hvd_adaptive.cluster.elastic_jobs import EVENT, Job, Launch
from hvd_adaptive.cluster.hosts import (
    LOCAL,
    Backoff,
    Discovery,
    Hosts,
    assign,
    changes,
    run_script,
    slurm_environment,
    slurm_hosts,
)
from hvd_adaptive.cluster.job_memory import make_memory
from hvd_adaptive.cluster.output import Lines
from hvd_adaptive.cluster.relaunch import build_command, start
from hvd_adaptive.cluster.signals import Stop, blocked, ending_signals, handled, pass_on
from hvd_adaptive.exit_codes import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_TOO_FEW_HOSTS

# A job that ends so often without getting on will not do better.
_TRIES = 3
_TICK_S = 0.1
_ANSWER_LIMIT_S = 5.0
_CHUNK_BYTES = 1 << 16
# A launcher that has told of a fault ends within seconds, if it can end at all.
_LAUNCHER_END_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What may happen to a job's size.

    Attributes:
        min_np: fewest ranks to go on with.
        max_np: most ranks.
        script: host discovery script; None: the nodes of the Slurm job, else this machine.
        timeout_s: how long to wait for enough hosts.
    """

    min_np: int
    max_np: int
    script: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_np <= self.max_np:
            raise ValueError(f"--min-np must be >= 1 and <= --max-np, got {self.min_np} and {self.max_np}")
        if not self.timeout_s > 0:
            raise ValueError(f"--elastic-timeout must be > 0 s, got {self.timeout_s}")

    def ask(self) -> Hosts:
        """Returns the hosts there are now.

        Raises:
            ValueError: if the script or Slurm does not tell.
        """
        if self.script is not None:
            return run_script(self.script)
        if "SLURM_JOB_NODELIST" in os.environ:
            return slurm_hosts(os.environ)
        return {LOCAL: self.max_np}


class Supervisor:
    """Keeps a job going. From the main thread.

    Args:
        options: the job's limits.
        make_job: makes the job, given a folder in memory that is there until the end.

    Raises:
        ValueError: if the hosts cannot be found out.
    """

    def __init__(self, options: Elastic, make_job: Callable[[Path], Job]) -> None:
        self._options = options
        self._backoff = Backoff()
        self._discovery = Discovery(options.ask, 1.0 if options.script else 10.0, options.timeout_s)
        self._memory, self._memory_lock = make_memory()
        self._job = make_job(self._memory)
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = Stop()
        self._unsent: tuple[int, bool] | None = None
        self._started_s = 0.0
        self._forwarded: tuple[signal.Signals, ...] = ()
        self._asked = self._ended = self._is_finished = False
        self._waiting_hosts = ""
        self._is_amid_line = False
        self._failed_s: float | None = None
        self._blamed_s: float | None = None
        self._blamed: list[str] = []
        self._silent_s = 0.0
        self._is_unreached = False
        self._unreached_s: float | None = None

    def run(self) -> int:
        """Runs the job to its end; returns its exit code: 69 for too few hosts, 75 for an end by a signal, 130 for Ctrl-C.

        Raises:
            RuntimeError: there is no usable mpirun, or this process is already a rank.
        """
        with self._signals():
            try:
                return self._supervise()
            finally:
                if self._child is not None and self._child.poll() is None:
                    self._child.terminate()
                    self._child.wait()
                self._discovery.close()
                self._close_job()
                shutil.rmtree(self._memory, ignore_errors=True)
                self._memory_lock.close()

    def _close_job(self) -> None:
        try:
            left = self._job.close(finished=self._is_finished)
        except OSError as error:
            left = f"what the job leaves cannot be kept: {error}"
        if left:
            self._say(left)

    def _supervise(self) -> int:
        cause, tries, has_begun = "start", 0, False
        parts_s: dict[str, float] = {}
        hosts: Hosts = {}
        blamed: list[str] = []
        ended_s = time.monotonic()
        for number in range(1, sys.maxsize):
            found = self._wait_for_hosts(hosts)
            if found is None:
                return self._stop.exit_code if self._stop.first else EXIT_TOO_FEW_HOSTS
            hosts = found
            parts_s["wait"] = parts_s.get("wait", 0.0) + time.monotonic() - ended_s
            launch = Launch(number, hosts, cause, blamed, self._job.num_done(), parts_s)
            code = self._run_once(launch)
            ended_s = time.monotonic()
            self._is_finished = self._job.is_finished(code)
            if self._is_finished or code == EXIT_BAD_INPUT:
                return code
            if self._stop.first:
                return self._stopped_code(launch, code)
            if launch.has_begun:
                has_begun, self._unreached_s = True, None
            # What was lost is not to be tried once more.
            self._discovery.ask_now(_ANSWER_LIMIT_S)
            parts_s = {"notice": self._silent_s, "teardown": ended_s - (self._failed_s or ended_s)}
            if self._ended or self._job.was_stopped(code):
                cause, blamed = "hosts changed", []
                # What made earlier launches fail did not keep this one from its work.
                tries = 0 if launch.has_begun else tries
                continue
            # mpirun may say nothing of a host that was taken from the job.
            is_others = bool(self._blamed) or not launch.hosts.keys() <= self._discovery.hosts.keys()
            failed = self._count_failures(launch)
            lost_s = self._unreached_s or ended_s
            waits = has_begun and not launch.has_begun and self._is_unreached and bool(failed)
            # A host that is to blame is left out and tried again.
            self._unreached_s = lost_s if waits and ended_s - lost_s < self._options.timeout_s else None
            if self._unreached_s is None:
                tries = 0 if self._job.has_got_on(launch, code, blamed=is_others) else tries + 1
            ended = f"job ended with exit code {code}" if code else "mpirun ended, and not the job"
            if launch.has_begun or cause == "start":
                cause, blamed = ended, failed
            else:
                # The fault is the one before; this launch was a part of the wait.
                parts_s = {**launch.parts_s, "wait": launch.parts_s["wait"] + ended_s - launch.started_s}
            self._say(f"{ended}; {self._job.saved()}")
            if tries == _TRIES:
                why = f"{_TRIES} launches one after another {self._job.no_progress}"
                self._say(f"{why}: giving up. Look at the ranks' output above")
                return code or 1
        raise AssertionError

    def _stopped_code(self, launch: Launch, code: int) -> int:
        """Returns the exit code of a job that was asked to end by a signal, given its launcher's; says what is lost."""
        name, in_order = signal.Signals(self._stop.first).name, self._job.stops_in_order
        if in_order and launch.has_begun:
            if (code != EXIT_FAULT and code <= 128) or self._stop.is_at_once or code == 128 + signal.SIGUSR1:
                return self._stop.job_code(code, in_order=True)
            self._say(f"ended by {name}; a rank was lost before all had saved (exit code {code})")
            return self._stop.exit_code
        # A plain script may do with SIGUSR1 what it likes, and go on.
        if not in_order and self._stop.first == signal.SIGUSR1 and code != 128 + signal.SIGUSR1:
            return code
        if launch.has_begun:
            self._say(f"ended by {name}; the script does not use hvd.elastic, so only what it saved itself is kept")
        else:
            self._say(f"launch {launch.number} ended by {name} before its first {self._job.stops_at}")
        return self._stop.exit_code

    def _wait_for_hosts(self, before: Hosts) -> Hosts | None:
        """Returns the ranks by host for the next launch; None if there are too few for too long, or a signal came."""
        said_s = time.monotonic()
        begin_s, said = self._unreached_s or said_s, ""
        while not self._stop.first:
            now_s = time.monotonic()
            hosts = assign(self._backoff.usable(self._discovery.hosts, now_s), self._options.max_np, first=before)
            if sum(hosts.values()) >= self._options.min_np:
                return hosts
            waiting = {h: round(s) for h in self._discovery.hosts if (s := self._backoff.remaining(h, now_s))}
            usable = f"{sum(hosts.values())} slots on {', '.join(hosts) or 'no host'}"
            text = f"waiting for hosts: {usable}, --min-np is {self._options.min_np}"
            text += f"; left out after failures: {', '.join(waiting)}" if waiting else ""
            if text != said or now_s - said_s >= 30:
                self._say(f"{text} ({self._options.timeout_s - (now_s - begin_s):.0f} s left)")
                said, said_s = text, now_s
            if now_s - begin_s >= self._options.timeout_s:
                self._say(f"still too few hosts after {self._options.timeout_s:g} s (--elastic-timeout): ending")
                return None
            time.sleep(_TICK_S)
        return None

    def _run_once(self, launch: Launch) -> int:
        """Starts the job and watches it; returns its exit code."""
        self._failed_s, self._blamed_s, self._blamed, self._silent_s, self._is_unreached = None, None, [], 0.0, False
        # In a Slurm job mpirun would go to all its nodes, also to those that are lost.
        local = all(map(is_local, launch.hosts))
        places = None if local and "SLURM_JOB_ID" not in os.environ else launch.hosts
        argv = self._job.arguments(launch.number, local=local)
        command, env = build_command(sum(launch.hosts.values()), argv, hosts=places)
        for project in ("OMPI", "PRTE"):
            # mpirun waits for a second after each signal by which it ends the ranks that are left; they have nothing to save.
            env.setdefault(f"{project}_MCA_odls_base_sigkill_timeout", "0")
        env |= slurm_environment(env, launch.hosts)
        launch.started_s = self._started_s = time.monotonic()
        self._asked, self._ended, self._waiting_hosts = False, False, ""
        # Until the child is known a signal must wait: it could not be passed on.
        with blocked(self._forwarded):
            if self._stop.first:
                return self._stop.exit_code
            self._child = child = start(command, env, stderr=subprocess.PIPE)
        if self._unsent is not None:
            # The thread that asks for hosts has taken it in, and this one's handler ran when there was no child yet.
            pass_on(child, *self._unsent, started_s=launch.started_s)
        self._say(f"launch {launch.number} ({launch.cause}): ranks {launch.hosts}")
        assert child.stderr is not None
        reader = threading.Thread(target=self._pass_on, args=(child.stderr,), daemon=True)
        reader.start()
        while child.poll() is None:
            time.sleep(_TICK_S)
            if self._blamed_s is not None and time.monotonic() - self._blamed_s > _LAUNCHER_END_S:
                self._end_launcher(child)
                continue
            if not launch.has_begun:
                self._look_for_beginning(launch)
            elif not self._asked and not self._stop.first:
                self._move(launch, child)
        reader.join(timeout=2.0)
        self._child = None
        if not launch.has_begun:
            self._look_for_beginning(launch)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _end_launcher(self, child: subprocess.Popen[bytes]) -> None:
        """Kills a launcher that cannot end, as mpirun waits for its daemon on a host that it no longer reaches.

        Ranks see to that where they run beside it (launcher_end, which says why by SIGKILL); here may be none.
        """
        self._say(f"the launcher still runs {_LAUNCHER_END_S:g} s after the fault was told: it is killed")
        child.kill()
        child.wait()

    def _move(self, launch: Launch, child: subprocess.Popen[bytes]) -> None:
        """Has the ranks stop if they should be elsewhere."""
        usable = self._backoff.usable(self._discovery.hosts, time.monotonic())
        gone, come = changes(launch.hosts, usable, least=self._options.min_np, most=self._options.max_np)
        if come and not gone and not self._job.stops_in_order:
            if come != self._waiting_hosts:
                self._say(f"{come}: taken in when the script is started again; now it would lose what it has not saved")
            self._waiting_hosts = come
            return
        if not gone and not come:
            return
        self._failed_s, self._asked = time.monotonic(), True
        if self._job.stops_in_order:
            self._say(f"{gone or come}: the job stops at the next {self._job.stops_at}")
            child.send_signal(signal.SIGUSR1)
        else:
            self._say(f"{gone}: the script is ended, and started again on what is left")
            self._ended = True
            child.send_signal(signal.SIGTERM)

    def _look_for_beginning(self, launch: Launch) -> None:
        """Notices the first merge or step of a launch and records what it took to get there."""
        beginning = self._job.beginning(launch)
        if beginning is None:
            return
        launch.has_begun = True
        if launch.number == 1:
            return
        total_s = time.monotonic() - launch.started_s
        inside_s = beginning.parts_s
        launch.parts_s |= {"launch": max(0.0, total_s - sum(inside_s.values())), **inside_s}
        parts_s = {name: round(seconds, 3) for name, seconds in launch.parts_s.items()}
        entry = {
            "launch": launch.number,
            "cause": launch.cause,
            "blamed": launch.blamed,
            "hosts": launch.hosts,
            "ranks": sum(launch.hosts.values()),
            **beginning.record,
            "seconds": parts_s,
            "total_s": round(sum(parts_s.values()), 3),
        }
        try:
            if self._job.records is not None:
                with self._job.records.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
        except OSError as error:
            self._say(f"{self._job.records} cannot be written: {error}")
        text = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts_s.items())
        self._say(f"goes on {beginning.text}, {entry['total_s']:.1f} s after the fault ({text})")

    def _count_failures(self, launch: Launch) -> list[str]:
        """Counts the failure of a launch against the hosts that are to blame; returns them."""
        hosts = [host for host in launch.hosts if any(same_host(host, other) for other in self._blamed)]
        if not hosts and not launch.has_begun:
            # It never got going, and nobody says why: hosts that cannot be reached are the likeliest.
            hosts = [host for host in launch.hosts if not is_local(host)]
        for host in hosts:
            if seconds := self._backoff.failed(host, time.monotonic()):
                self._say(f"{host} has failed again: left out for {seconds:.0f} s")
        return hosts

    def _pass_on(self, stream: IO[bytes]) -> None:
        """Copies the job's stderr, looking for who is blamed and for what the ranks tell."""
        lines = Lines(self._hear, EVENT)
        while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
            self._show(lines.feed(chunk))
        self._show(lines.end())

    def _show(self, text: bytes) -> None:
        # Whose terminal is closed has nobody to tell, and the ranks must not wait for who reads what they say.
        with contextlib.suppress(OSError):
            sys.stderr.buffer.write(text)
            sys.stderr.buffer.flush()
        self._is_amid_line = not text.endswith(b"\n") if text else self._is_amid_line

    def _hear(self, line: str) -> bool:
        if self._job.hear(line):
            return True
        found = blame(line)
        if self._failed_s is None and (found is not None or is_first_sign(line)):
            self._failed_s = time.monotonic()
        if found is not None:
            # A script may call ssh, too, and a launcher that cannot ends by itself.
            if not line.startswith("ssh: "):
                self._blamed_s = self._blamed_s or time.monotonic()
            # Whom the launcher ends may be heard after its first sign.
            self._silent_s = max(self._silent_s, found[1])
            self._blamed.append(found[0])
        self._is_unreached |= cannot_reach(line)
        return False

    def _say(self, text: str) -> None:
        # Not behind a script's progress bar.
        with contextlib.suppress(OSError):
            print("\n" * self._is_amid_line + f"hvd-adaptive elastic: {text}", file=sys.stderr, flush=True)
        self._is_amid_line = False

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def forward(number: int, frame: FrameType | None) -> None:
            first = not self._stop.first
            counts = self._stop.take(number) or not self._job.stops_in_order
            # Ranks that were asked to move would take another SIGUSR1 for the order to end at once.
            if not counts or (first and self._asked):
                return
            in_order = first and self._job.stops_in_order
            if self._child is None:
                self._unsent = number, in_order
            else:
                pass_on(self._child, number, in_order, started_s=self._started_s)

        self._forwarded = (*ending_signals(), signal.SIGUSR1)
        with handled(self._forwarded, forward):
            yield
