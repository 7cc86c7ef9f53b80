"""Two "hosts" on this machine: network namespaces joined by a shaped link, each with a host name and a disk of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from zygote import ZYGOTE_SOCKET

from hvd_adaptive.cluster.relaunch import find_launcher

NAMES = ("alpha", "beta")
NETWORK = "10.77.0"
# For root in containers, and for more ranks than cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    **{f"{p}_ALLOW_RUN_AS_ROOT{c}": "1" for p in ("OMPI", "PRTE") for c in ("", "_CONFIRM")},
}
DEVICE = "eth0"


def run(*argv: str) -> str:
    """Runs a command and returns its output, which is the error's text if it fails."""
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {result.stderr or result.stdout}")
    return result.stdout


def _shape(rate: str, burst: str = "256kb") -> list[str]:
    return ["root", "tbf", "rate", rate, "burst", burst, "latency", "50ms"]


def _processes(space: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, timeout=60)
    return [int(pid) for pid in found.stdout.split()]


def _kill_all(space: str) -> None:
    for pid in _processes(space):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _remove(space: str) -> None:
    # It would live on with them, without a name.
    _kill_all(space)
    subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=60)
    shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


class TwoHosts:
    """Makes the hosts; `close` removes them. Names carry this process's id and a number, so that two pairs do not meet, and the
    next run can remove what is left of one that was killed.

    As on many a cluster, a host's own name means 127.0.1.1, and both have a container bridge with one and the
    same address: neither may be taken for the way to the other host.

    Args:
        folder: an empty folder of the test's own.
        rate: of the link, as tc has it.

    Attributes:
        local: a path at which each host sees a disk of its own; all other files are shared.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path, rate: str = "1gbit") -> None:
        self._number = next(self._numbers)
        self.local = folder / "local"
        self.local.mkdir()
        self._folder = folder
        self._spaces = [self._space(name) for name in NAMES]
        for name in NAMES:
            self.disk(name).mkdir()
        try:
            self._make(rate)
        except BaseException:
            self.close()
            raise

    def _make(self, rate: str) -> None:
        for space in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split():
            if (match := re.fullmatch(r"hva-(\d+)-[\w-]+", space)) and not Path("/proc", match[1]).exists():
                _remove(space)
        first, second = self._spaces
        for space in self._spaces:
            run("ip", "netns", "add", space)
        # Made inside a namespace, so that the device names meet nobody's.
        run("ip", "-n", first, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for index, (space, name) in enumerate(zip(self._spaces, NAMES, strict=True)):
            run("ip", "-n", space, "addr", "add", f"{NETWORK}.{index + 1}/24", "dev", DEVICE)
            run("ip", "-n", space, "link", "add", "docker0", "type", "bridge")
            run("ip", "-n", space, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            for device in ("lo", DEVICE, "docker0"):
                run("ip", "-n", space, "link", "set", device, "up")
            run("tc", "-n", space, "qdisc", "add", "dev", DEVICE, *_shape(rate))
            # `ip netns exec` shows a namespace its own files of these.
            files = Path("/etc/netns") / space
            files.mkdir(parents=True)
            other = 1 - index
            (files / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {name}\n{NETWORK}.{other + 1} {NAMES[other]}\n"
            )
        folder, local = shlex.quote(str(self._folder)), shlex.quote(str(self.local))
        inside = f'hostname "$0" && mount --bind {folder}/disk-"$0" {local} && exec "$@"'
        self._script("enter", f"exec ip netns exec {self._space('$1')} unshare -u bash -c {shlex.quote(inside)} \"$@\"")
        # As ssh does: no variable of the caller's but those by which tests find a job's processes, ranks are forks of the zygote
        # and wait asleep.
        kept = " ".join(f'${{{name}:+{name}="${name}"}}' for name in ("HOME", "HVD_TEST_JOB", ZYGOTE_SOCKET, "LD_PRELOAD"))
        clean = f"env -i PATH=/usr/bin:/bin {kept}"
        self._script("agent", f'host=$1; shift\nexec {folder}/enter "$host" {clean} bash -c "$*"')

    def _space(self, name: str) -> str:
        return f"hva-{os.getpid()}-{self._number}-{name}"

    def _script(self, name: str, text: str) -> None:
        file = self._folder / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)

    def disk(self, name: str) -> Path:
        """The folder that a host sees as `local`."""
        return self._folder / f"disk-{name}"

    def on(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command that runs a command on a host."""
        return [str(self._folder / "enter"), name, *argv]

    def mpirun(
        self, ranks_per_host: int, argv: Sequence[str], *, forward: Sequence[str] = (), shared_memory: bool = False
    ) -> list[str]:
        """The command that runs a program as ranks over both hosts, started on the first.

        Args:
            ranks_per_host: ranks on each.
            argv: the program and its arguments.
            forward: variables to pass on to the other host, too.
            shared_memory: between the ranks of a host, instead of TCP there, too.
        """
        launcher = find_launcher(os.environ)
        agent = str(self._folder / "agent")
        hosts = ",".join(f"{name}:{ranks_per_host}" for name in NAMES)
        flags = ["--host", hosts, "-np", str(2 * ranks_per_host), "--bind-to", "none"]
        if launcher.flavour == "openmpi4":
            flags += ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", agent]
            flags += ["--mca", "oob_tcp_if_include", f"{NETWORK}.0/24"]
        else:
            flags += ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", f"{NETWORK}.0/24"]
            flags += ["--prefix", str(Path(launcher.path).parents[1])]
        inside = {"openmpi4": "vader,"}.get(launcher.flavour, "sm,") if shared_memory else ""
        flags += ["--mca", "pml", "ob1", "--mca", "btl", f"tcp,{inside}self"]
        flags += ["--mca", "btl_tcp_if_include", f"{NETWORK}.0/24"]
        for name in ("PYTHONPATH", "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", *forward):
            flags += ["-x", name]
        return self.on(NAMES[0], [launcher.path, *flags, *argv])

    def ranks(self, name: str) -> list[int]:
        """The ids of the Python processes on a host."""
        found = []
        for pid in _processes(self._space(name)):
            # One that was there may have ended.
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("python"):
                    found.append(pid)
        return found

    def signal_ranks(self, name: str, number: signal.Signals, *, argument: str = "") -> None:
        """Sends a signal to the Python processes on a host, or to those of them that were started with an argument."""
        for pid in self.ranks(name):
            # As above: the launcher ends what is left when the first is killed.
            with contextlib.suppress(OSError):
                if not argument or argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    os.kill(pid, number)

    def kill_all(self, name: str) -> None:
        """Ends all processes on a host at once, as when its power fails."""
        _kill_all(self._space(name))

    def slow(self, rate: str = "1gbit", burst: str = "256kb") -> None:
        """Gives the link another rate, both ways."""
        for space in self._spaces:
            run("tc", "-n", space, "qdisc", "change", "dev", DEVICE, *_shape(rate, burst))

    def cut(self) -> None:
        """Takes the link down."""
        run("ip", "-n", self._spaces[0], "link", "set", DEVICE, "down")

    def mend(self) -> None:
        """Brings the link up again; it carries when this returns."""
        run("ip", "-n", self._spaces[0], "link", "set", DEVICE, "up")
        end = time.monotonic() + 60.0
        for space in self._spaces:
            while "state UP" not in run("ip", "-n", space, "link", "show", DEVICE):
                if time.monotonic() > end:
                    raise RuntimeError(f"{DEVICE} of {space} does not come up")
                time.sleep(0.02)
            # Who looked for the other host in vain would tell the next one as well: "No route to host".
            run("ip", "-n", space, "neigh", "flush", "dev", DEVICE)

    def close(self) -> None:
        """Removes the hosts, and ends what still runs there."""
        for space in self._spaces:
            _remove(space)
