"""Runs a command as ranks over two "hosts" of this machine: network namespaces, joined by a link of a given rate. For root.

    python benchmarks/over_link.py [--rate 1gbit] [--ranks-per-host 1] -- python benchmarks/accuracy.py run ...

The namespaces are those of tests/net. Both hosts share this machine's cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from jobs import exit_on_signals
from two_hosts import DEVICE, ENVIRONMENT, TwoHosts

PROGRAMS = {"python": [sys.executable], "hvd-adaptive": [sys.executable, "-m", "hvd_adaptive"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="as tc writes it, e.g. 100mbit (default: 1gbit)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="(default: 1)")
    parser.add_argument("command", nargs="+", help="python FILE ..., hvd-adaptive ..., or a program's path")
    options = parser.parse_args()
    command = options.command
    if command[0] in ("python", "hvd-adaptive"):
        command = [*PROGRAMS[command[0]], *command[1:]]
    # gloo would take the address of the host's own name, which is 127.0.1.1.
    env = {**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": DEVICE, "HVD_TEST_JOB": "", "PYTHONUNBUFFERED": "1"}
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder:
        hosts = TwoHosts(Path(folder), options.rate)
        try:
            forward = ["GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED", *(n for n in os.environ if n.startswith("HOROVOD_"))]
            job = hosts.mpirun(options.ranks_per_host, command, forward=forward, shared_memory=True)
            return subprocess.run(job, env=env).returncode
        finally:
            hosts.close()


if __name__ == "__main__":
    sys.exit(main())
