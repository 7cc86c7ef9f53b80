"""Two "hosts" on this machine: network namespaces joined by a shaped link, each with a host name and a disk of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hvd_adaptive.launch.relaunch import find_launcher

NAMES = ("alpha", "beta")
NETWORK = "10.77.0"
# For root in containers, and for more ranks than cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    **{f"{p}_ALLOW_RUN_AS_ROOT{c}": "1" for p in ("OMPI", "PRTE") for c in ("", "_CONFIRM")},
}
_DEVICE = "eth0"


def run(*argv: str) -> None:
    """Runs a command; its output is the error's text if it fails."""
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {result.stderr or result.stdout}")


class TwoHosts:
    """Makes the hosts; `close` removes them. Names carry this process's id, so that two runs do not meet.

    As on many a cluster, a host's own name means 127.0.1.1, and both have a container bridge with one and the
    same address: neither may be taken for the way to the other host.

    Args:
        folder: an empty folder of the test's own.
        rate: of the link, as tc has it.

    Attributes:
        local: a path at which each host sees a disk of its own; all other files are shared.
    """

    def __init__(self, folder: Path, rate: str = "1gbit") -> None:
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
        first, second = self._spaces
        for space in self._spaces:
            run("ip", "netns", "add", space)
        # Made inside a namespace, so that the device names meet nobody's.
        run("ip", "-n", first, "link", "add", _DEVICE, "type", "veth", "peer", "name", _DEVICE, "netns", second)
        for index, (space, name) in enumerate(zip(self._spaces, NAMES, strict=True)):
            run("ip", "-n", space, "addr", "add", f"{NETWORK}.{index + 1}/24", "dev", _DEVICE)
            run("ip", "-n", space, "link", "add", "docker0", "type", "bridge")
            run("ip", "-n", space, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            for device in ("lo", _DEVICE, "docker0"):
                run("ip", "-n", space, "link", "set", device, "up")
            shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            run("tc", "-n", space, "qdisc", "add", "dev", _DEVICE, *shape)
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
        # As ssh does: no variable of the caller's but the one by which tests find a job's processes.
        clean = 'env -i PATH=/usr/bin:/bin HOME="$HOME" HVD_TEST_JOB="$HVD_TEST_JOB"'
        self._script("agent", f'host=$1; shift\nexec {folder}/enter "$host" {clean} bash -c "$*"')

    @staticmethod
    def _space(name: str) -> str:
        return f"hva-{os.getpid()}-{name}"

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

    def mpirun(self, ranks_per_host: int, argv: Sequence[str], *, forward: Sequence[str] = ()) -> list[str]:
        """The command that runs a program as ranks over both hosts, started on the first.

        Args:
            ranks_per_host: ranks on each.
            argv: the program and its arguments.
            forward: variables to pass on to the other host, too.
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
        flags += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        flags += ["--mca", "btl_tcp_if_include", f"{NETWORK}.0/24"]
        for name in ("PYTHONPATH", "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", *forward):
            flags += ["-x", name]
        return self.on(NAMES[0], [launcher.path, *flags, *argv])

    def ranks(self, name: str) -> list[int]:
        """The ids of the Python processes on a host."""
        found = subprocess.run(["ip", "netns", "pids", self._space(name)], capture_output=True, text=True, check=True)
        names = {int(pid): Path(f"/proc/{pid}/comm").read_text() for pid in found.stdout.split()}
        return [pid for pid, name in names.items() if name.startswith("python")]

    def cut(self) -> None:
        """Takes the link down."""
        run("ip", "-n", self._spaces[0], "link", "set", _DEVICE, "down")

    def close(self) -> None:
        """Removes the hosts; processes still inside keep their namespace until they end."""
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=60)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
