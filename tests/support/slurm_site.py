"""A real Slurm over two hosts of this machine: munged, slurmctld, and a slurmd on each host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from two_hosts import ENVIRONMENT, NAMES, NETWORK, TwoHosts

CPUS_PER_NODE = 4
_START_S = 60.0
_END_S = 10.0

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={first}({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
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
SchedulerParameters=bf_interval=1,sched_interval=2
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
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self._folder
        for name in ("state", *(f"{kind}-{name}" for kind in ("spool", "tmp") for name in NAMES)):
            (folder / name).mkdir()
        lines = [_CONFIGURATION.format(first=NAMES[0], network=NETWORK, folder=folder)]
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
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={file}" for name, file in files.items()))
        self._daemon(*self._hosts.on(NAMES[0], ["slurmctld", "-D"]))
        for name in NAMES:
            self._daemon(*self._hosts.on(name, ["slurmd", "-D", "-N", name]))
        end_s = time.monotonic() + _START_S
        while self._query("sinfo", "--noheader", "--states=idle", "--format=%D") != str(len(NAMES)):
            if time.monotonic() > end_s or any(daemon.poll() is not None for daemon in self._daemons):
                logs = "\n".join(f"-- {log.name}\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
                raise RuntimeError(f"Slurm did not start within {_START_S:g} s\n{logs}")
            time.sleep(0.2)

    def _daemon(self, *argv: str) -> None:
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        self._daemons.append(
            subprocess.Popen(
                argv,
                env={**os.environ, **self.environment, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self._folder,
            )
        )

    def _query(self, *argv: str) -> str:
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
            self._query("scancel", "--user=root", "--signal=KILL", "--full")
            end_s = time.monotonic() + _END_S
            while self._query("squeue", "--noheader") and time.monotonic() < end_s:
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
