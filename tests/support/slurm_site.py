"""A real Slurm over two hosts of this machine: munged, slurmctld, and a slurmd on each host; and a job in its queue."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from two_hosts import ENVIRONMENT, NAMES, NETWORK, TwoHosts

CPUS_PER_NODE = 6
_START_S = 180.0
_END_S = 10.0
_LAST_WORDS_S = 20.0
_ENDED = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT")

_CONFIGURATION = """
ClusterName=tests
FirstJobId={first_job}
SlurmctldHost={first}({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MessageTimeout=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,permit_job_expansion
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
GresTypes=gpu
"""


class SlurmSite:
    """Starts Slurm on two hosts; `close` ends it and all its jobs.

    Args:
        hosts: where it runs; the first host holds the controller, and commands run there.

    Attributes:
        environment: variables that Slurm's commands and the jobs need.
    """

    def __init__(self, hosts: TwoHosts) -> None:
        self._hosts = hosts
        # Not pytest's folder: a socket's path must be shorter than 108 characters.
        self._folder = Path(tempfile.mkdtemp(prefix=f"hva-{os.getpid()}-slurm-"))
        self.environment = {
            **ENVIRONMENT,
            "SLURM_CONF": f"{self._folder}/slurm.conf",
            # The hosts' container bridges lead nowhere.
            "OMPI_MCA_btl_tcp_if_include": f"{NETWORK}.0/24",
            "OMPI_MCA_oob_tcp_if_include": f"{NETWORK}.0/24",
            "PRTE_MCA_prte_if_include": f"{NETWORK}.0/24",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self._folder
        for name in ("state", *(f"{kind}-{name}" for kind in ("spool", "tmp") for name in NAMES)):
            (folder / name).mkdir()
        # Open MPI names a job's shared memory by host and Slurm's number, and another worker's site has hosts of the same names.
        first_job = os.getpid() % 10_000 * 1000 + 1
        lines = [_CONFIGURATION.format(first=NAMES[0], network=NETWORK, folder=folder, first_job=first_job)]
        for index, name in enumerate(NAMES):
            has = f"CPUs={CPUS_PER_NODE} RealMemory=1000 Gres=gpu:4 Feature=gpus-of-{name}"
            lines.append(f"NodeName={name} NodeAddr={NETWORK}.{index + 1} {has}\n")
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=10 State=UP\n")
        (folder / "slurm.conf").write_text("".join(lines))
        # GPUs in name only, so that scripts may ask for them.
        for index in range(4):
            (folder / f"gpu{index}").touch()
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-3]\n")
        # Nothing uses cgroups here; named, so that slurmd does not look for a mounted kind.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
        files |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
        # The folder is root's alone, which munged by itself does not think of /tmp.
        munged = self._daemon("munged", "--foreground", "--force", *(f"--{name}={file}" for name, file in files.items()))
        end_s = time.monotonic() + _START_S
        while munged.poll() is None and not files["socket"].is_socket() and time.monotonic() < end_s:
            time.sleep(0.05)
        self._daemon(*self._hosts.on(NAMES[0], ["slurmctld", "-D"]))
        for name in NAMES:
            self._start_node(name)
        self._wait_for_nodes()

    def _start_node(self, name: str) -> None:
        self._nodes[name] = self._daemon(*self._hosts.on(name, ["slurmd", "-D", "-N", name]))

    def lose(self, name: str) -> None:
        """Ends all that runs on a node at once, as when its power fails, and has Slurm take note."""
        self._daemons.remove(self._nodes[name])
        self._hosts.kill_all(name)
        self._nodes.pop(name).wait()
        self.query("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def bring_back(self, name: str) -> None:
        """Starts a node again that was lost; jobs that it belonged to do not get it back by that."""
        self._start_node(name)
        self._wait_for_nodes()

    def restore(self) -> None:
        """Brings back what was lost."""
        for name in NAMES:
            if name not in self._nodes:
                self.bring_back(name)

    def _wait_for_nodes(self) -> None:
        end_s = time.monotonic() + _START_S
        up = ("sinfo", "--noheader", "--Node", "--responding", "--states=idle,mixed,alloc", "--format=%N")
        while len(self.query(*up).split()) != len(NAMES):
            if time.monotonic() > end_s or any(daemon.poll() is not None for daemon in self._daemons):
                logs = "\n".join(f"-- {log.name}\n{log.read_text()[-2000:]}" for log in self._folder.glob("*.log"))
                raise RuntimeError(f"Slurm did not start within {_START_S:g} s\n{logs}")
            time.sleep(0.2)

    def _daemon(self, *argv: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        daemon = subprocess.Popen(
            argv,
            env={**os.environ, **self.environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
        )
        self._daemons.append(daemon)
        return daemon

    def query(self, *argv: str) -> str:
        """Runs one of Slurm's commands; returns what it writes."""
        result = subprocess.run(
            self.command(argv), env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60
        )
        return result.stdout.strip()

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs one of Slurm's, on the first host."""
        return self._hosts.on(NAMES[0], argv)

    def close(self) -> None:
        """Ends all jobs, then the daemons."""
        if len(self._daemons) > 1 and all(daemon.poll() is None for daemon in self._daemons):
            self.query("scancel", "--user=root", "--signal=KILL", "--full")
            end_s = time.monotonic() + _END_S
            while self.query("squeue", "--noheader") and time.monotonic() < end_s:
                time.sleep(0.2)
        # munged last: the others need it to say goodbye.
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(_END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class SlurmJob:
    """A job in the queue, with what it writes."""

    def __init__(self, slurm: SlurmSite, number: str, run: Path, output: Path) -> None:
        self._slurm = slurm
        self.number = number
        self.run = run
        self._output = output

    def ask(self, *argv: str) -> str:
        return self._slurm.query(*argv)

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    @property
    def state(self) -> str:
        """As `scontrol show job` has it, such as RUNNING."""
        return self.show().partition("JobState=")[2].partition(" ")[0]

    @property
    def has_ended(self) -> bool:
        """Whether it is over. Until then its state may be a signal's, too, and it has none where Slurm does not answer."""
        return self.state in _ENDED

    def show(self) -> str:
        return self.ask("scontrol", "show", "job", self.number)

    @property
    def num_rounds(self) -> int:
        rounds = self.run / "rounds.jsonl"
        return rounds.read_text().count("\n") if rounds.exists() else 0

    def has_rounds(self, number: int) -> bool:
        return self.num_rounds >= number

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from: rounds go on while the first checkpoint is being written."""
        return any((self.run / "checkpoints").glob("round-*"))

    def wait(self, condition: Callable[[], bool], limit_s: float = 300) -> None:
        """Until the condition holds; fails at the limit, or when the job has ended and what came last is there, too."""
        end_s = time.monotonic() + limit_s
        alive_s = time.monotonic()
        while not condition():
            state = self.state
            if state not in _ENDED:
                alive_s = time.monotonic()
            assert time.monotonic() < min(end_s, alive_s + _LAST_WORDS_S), f"{self.show()}\n{self.output[-6000:]}"
            time.sleep(0.2)

    def signal(self, name: str) -> None:
        """To the batch script, as Slurm sends it near the time limit."""
        self.ask("scancel", "--batch", f"--signal={name}", self.number)
