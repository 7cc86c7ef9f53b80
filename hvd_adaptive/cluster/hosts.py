"""Which hosts an elastic job may use: who says so, who has failed too often lately, and how ranks are dealt to them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType

from hvd_adaptive.cluster.binding import expand_counts
from hvd_adaptive.cluster.blame import has_same_name, is_local
from hvd_adaptive.cluster.signals import ending_signals, handled
from hvd_adaptive.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED

log = logging.getLogger(__name__)


class NoAnswerError(ValueError):
    """Slurm's commands failed. Its controller may be too busy, or starting again: a later question may be answered."""


Hosts = dict[str, int]
"""Slots by host name, in the order in which they are to be used."""

LOCAL = "localhost"
_SCRIPT_LIMIT_S = 30.0
# The discovery scripts that run now.
_running: set[subprocess.Popen[str]] = set()
_WINDOW_S = 600.0
_BACKOFF_S = 5.0
# What sinfo calls nodes that run nothing more. A trailing * means that a node does not answer.
_LOST_STATES = ("down", "drained", "fail", "error", "unknown", "future", "power", "reboot")


def parse_hosts(text: str) -> Hosts:
    """Reads what a discovery script printed: lines of ``host:slots``, or ``host`` for one slot, as Horovod's scripts do.

    Raises:
        ValueError: naming the line that is neither, or the host that comes twice.
    """
    hosts: Hosts = {}
    alike: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d{1,6}))?", line)
        if match is None:
            raise ValueError(f"a line must be host:slots, got {line[:200]!r}")
        host, slots = match[1], int(match[2] or 1)
        if host in hosts:
            raise ValueError(f"host {host} is printed twice")
        if slots:
            others = alike.setdefault("localhost" if is_local(host) else host.lower().partition(".")[0], [])
            if other := next((other for other in others if has_same_name(host, other)), None):
                raise ValueError(f"host {other} is printed twice, also as {host}")
            others.append(host)
        hosts[host] = slots
    return {host: slots for host, slots in hosts.items() if slots}


def run_script(script: str) -> Hosts:
    """Runs a discovery script, in a session of its own, and reads its hosts.

    Raises:
        ValueError: if it fails, takes more than 30 s, or prints something else.
    """
    child: subprocess.Popen[str] | None = None
    try:
        # Until it has a name it could not be ended.
        with _ORDER_TO_END.waiting():
            child = subprocess.Popen(
                [script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        _running.add(child)
        output, errors = child.communicate(timeout=_SCRIPT_LIMIT_S)
        if child.returncode:
            said = errors.strip()[-500:]
            raise ValueError(f"exit code {child.returncode}" + (f": {said}" if said else ""))
        return parse_hosts(output)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise ValueError(f"--host-discovery-script {script}: {error}") from None
    finally:
        if child is not None:
            _kill(child)
            with child:
                _running.discard(child)


def _kill(script: subprocess.Popen[str]) -> None:
    """Kills a script with all that it has started."""
    # The number of one that has been waited for may be another's.
    if script.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


class _OrderToEnd:
    """A signal that ends this process: at once, or when a block is left in which it has to wait."""

    def __init__(self) -> None:
        self._waits = False
        self._number = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Has a signal wait until this block is left. Signals come to the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        number, self._number = self._number, 0
        if number:
            _leave(number)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        if self._waits:
            self._number = number
        else:
            _leave(number)


_ORDER_TO_END = _OrderToEnd()


def _leave(number: int) -> None:
    print(f"hvd-adaptive elastic: ended by {signal.Signals(number).name} before the hosts were known", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED)


def slurm_hosts(env: Mapping[str, str]) -> Hosts:
    """The nodes that a Slurm job has now and that still work, with the tasks that Slurm counts on each.

    A job with ``--no-kill`` loses a node that goes down for good, also if that node is up again a moment later, and a job that
    is expanded gets nodes: the batch script's environment says neither.

    Args:
        env: the batch script's environment.

    Raises:
        ValueError: if Slurm's commands do not answer.
    """
    tasks = _counts(env, "SLURM_TASKS_PER_NODE")
    job = env["SLURM_JOB_ID"]
    # Components of a heterogeneous job have numbers of their own.
    lists = [line.split() for line in _ask("squeue", "--noheader", "--jobs", job, "--format=%A %N")]
    node_list = next((line[1] for line in lists if line[0] == job and len(line) > 1), None)
    if node_list is None:
        raise ValueError(f"squeue names no nodes of job {job}")
    names = _ask("scontrol", "show", "hostnames", node_list)
    states = dict(line.split(maxsplit=1) for line in _ask("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T"))
    return {
        name: tasks(name)
        for name in names
        if not states.get(name, "").startswith(_LOST_STATES) and not states.get(name, "").endswith("*")
    }


def _counts(env: Mapping[str, str], variable: str) -> Callable[[str], int]:
    """A count by node: what it had at the job's start, and for one that came later the most of any."""
    names = _ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"])
    counts = expand_counts(env.get(variable, "")) or [1] * len(names)
    if len(counts) != len(names):
        raise ValueError(f"{variable} is {env.get(variable)!r}, but the job has {len(names)} nodes")
    by_name = dict(zip(names, counts, strict=True))
    return lambda name: by_name.get(name, max(counts))


def slurm_environment(env: Mapping[str, str], hosts: Hosts) -> dict[str, str]:
    """The variables by which mpirun and srun take these hosts for the job's nodes, as Slurm's own script after a resize has them.

    Args:
        env: the batch script's environment.
        hosts: ranks by host.

    Returns:
        The variables to change; empty outside a Slurm job.

    Raises:
        ValueError: if Slurm's commands do not answer.
    """
    if "SLURM_JOB_NODELIST" not in env:
        return {}
    # mpirun starts on the batch script's node, and asks srun for certain nodes only where it does not use all it knows.
    nodes = {**hosts, **{name: 1 for name in [env.get("SLURMD_NODENAME")] if name and name not in hosts}}
    changed = dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), ",".join(nodes))
    changed |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(len(nodes)))
    changed |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(sum(nodes.values())))
    changed["SLURM_TASKS_PER_NODE"] = ",".join(map(str, nodes.values()))
    if "SLURM_JOB_CPUS_PER_NODE" in env:
        changed["SLURM_JOB_CPUS_PER_NODE"] = ",".join(map(str, map(_counts(env, "SLURM_JOB_CPUS_PER_NODE"), nodes)))
    return changed


def _ask(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCRIPT_LIMIT_S, check=True)
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or "").strip()[-500:]
        raise NoAnswerError(f"{' '.join(command)}: {error}" + (f" {said}" if said else "")) from None
    except OSError as error:
        raise ValueError(f"{' '.join(command)}: {error}") from None
    return [line for line in done.stdout.splitlines() if line.strip()]


def assign(hosts: Mapping[str, int], most: int, *, first: Collection[str] = ()) -> Hosts:
    """Deals up to ``most`` ranks to hosts: those in ``first`` before others, each filled before the next.

    Args:
        hosts: slots by host.
        most: largest number of ranks.
        first: hosts that are in use already, so that a job moves as little as it can.
    """
    dealt: Hosts = {}
    for host in sorted(hosts, key=lambda name: name not in first):
        if most > 0 and hosts[host] > 0:
            dealt[host] = min(most, hosts[host])
            most -= dealt[host]
    return dealt


def changes(hosts: Hosts, usable: Mapping[str, int], *, least: int, most: int) -> tuple[str, str]:
    """Returns what a job on these hosts should do without, and what it should have besides, in words; empty for nothing.

    Args:
        hosts: its ranks by host.
        usable: slots by host.
        least: fewest ranks to go on with.
        most: largest number of ranks.
    """
    better = assign(usable, most, first=hosts)
    gone = [
        f"{host} has room for {usable[host]} of its {count} ranks now" if usable.get(host) else f"{host} left"
        for host, count in hosts.items()
        if usable.get(host, 0) < count
    ]
    if gone and sum(better.values()) < least:
        gone = []
    come = [
        f"{host} has room for {count} ranks now instead of {hosts[host]}" if host in hosts else f"{host} came"
        for host, count in better.items()
        if count > hosts.get(host, 0)
    ]
    return ", ".join(gone), ", ".join(come if sum(better.values()) > sum(hosts.values()) else [])


class Backoff:
    """Leaves out hosts that keep failing: the second failure within ten minutes costs 5 s, each further one twice as much."""

    def __init__(self) -> None:
        self._failures: dict[str, list[float]] = {}

    def failed(self, host: str, now_s: float) -> float:
        """Counts a failure; returns for how many seconds the host is left out."""
        recent = [at_s for at_s in self._failures.get(host, []) if now_s - at_s < _WINDOW_S]
        self._failures[host] = [*recent, now_s]
        return self.remaining(host, now_s)

    def remaining(self, host: str, now_s: float) -> float:
        """Returns the seconds for which the host is still left out."""
        failures = self._failures.get(host, [])
        if len(failures) < 2:
            return 0.0
        return max(0.0, failures[-1] + min(_WINDOW_S, _BACKOFF_S * 2 ** (len(failures) - 2)) - now_s)

    def usable(self, hosts: Mapping[str, int], now_s: float) -> Hosts:
        """Returns the hosts that are not left out."""
        return {host: slots for host, slots in hosts.items() if not self.remaining(host, now_s)}


class Discovery:
    """Asks for the hosts again and again in a thread, so that a slow script holds up nobody. From the main thread.

    Args:
        ask: returns the hosts, or raises ValueError.
        interval_s: seconds between two questions.
        first_limit_s: how long to ask for the first answer, if Slurm fails.
    """

    def __init__(self, ask: Callable[[], Hosts], interval_s: float, first_limit_s: float = 0.0) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._done = False
        self._wanted = threading.Event()
        self._answered = threading.Event()
        self._failing = ""
        # A first answer must come: later ones may fail. A signal that ends this process ends the script, too.
        with handled(ending_signals(), _ORDER_TO_END.take):
            self.hosts = self._ask_first(time.monotonic() + first_limit_s)
        threading.Thread(target=self._run, name="discovery", daemon=True).start()

    def _ask_first(self, end_s: float) -> Hosts:
        while True:
            try:
                return self._ask()
            except NoAnswerError as error:
                if time.monotonic() + self._interval_s > end_s:
                    raise
                log.warning("%s; asking again in %g s", error, self._interval_s)
            time.sleep(self._interval_s)

    def close(self) -> None:
        """Asks no more, and ends a script that still runs."""
        self._done = True
        self._wanted.set()
        for script in list(_running):
            _kill(script)

    def ask_now(self, limit_s: float) -> None:
        """Asks at once and waits for the answer, but not for longer than a limit."""
        self._answered.clear()
        self._wanted.set()
        self._answered.wait(limit_s)

    def _run(self) -> None:
        while True:
            self._wanted.wait(self._interval_s)
            self._wanted.clear()
            if self._done:
                return
            try:
                self.hosts, self._failing = self._ask(), ""
            except ValueError as error:
                if str(error) != self._failing and not self._done:
                    log.warning("%s; going on with the hosts known before: %s", error, self.hosts)
                self._failing = str(error)
            self._answered.set()
