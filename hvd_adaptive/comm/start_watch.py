"""Ends a start at which the ranks do not meet; heartbeats watch only once they have met."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence

from hvd_adaptive.comm.launcher_end import end_command, find_launcher_process

# Ranks of a large job may load Python from a slow disk at very different speeds.
START_LIMITS = 5
_TURN_S = 5.0
# The pipe ends when all is well, or when the process has ended. A marked line is what to say; any other is the alarm.
_SCRIPT = """
text=$1
while read -r line; do
    case $line in
    "say "*) text=${line#say } ;;
    *) printf '\\n%s\\n' "$text" >&2; kill -KILL "$2"; shift 2; exec "$@" >/dev/null 2>&1 ;;
    esac
done
"""
_MOST_HOSTS = 8
# By backend: what connects the ranks, and how to tell it the network.
_NETWORKS = {
    "horovod": ("MPI", "Open MPI: OMPI_MCA_btl_tcp_if_include=10.0.0.0/8, MPICH: MPIR_CVAR_NETWORK_IFACE=eth0"),
    "torch": ("torch.distributed", "MASTER_ADDR: rank 0's host, GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=eth0"),
}


@contextlib.contextmanager
def start_watch(
    rank: int | None, *, stall_limit_s: float, limit_s: float | None = None, backend: str = "horovod"
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Ends this process, with the reason, if the block takes longer than its limit. Rank 0 speaks first.

    A launcher that still runs a while later is ended as well: it waits for ever for a daemon that it no longer reaches.

    MPI_Init holds Python's lock, so no thread of Python could do it: faulthandler's thread, which is in C, writes into a
    pipe, and a small process at its other end speaks and acts.

    Args:
        rank: what the launcher said, None where it said nothing.
        stall_limit_s: the stall limit in seconds, which the reason says to raise.
        limit_s: of the block; None: five stall limits.
        backend: what connects the ranks, "horovod" or "torch".

    Yields:
        What to call with the hosts by rank as soon as they are known: whoever is missing is then named.
    """
    limit_s = START_LIMITS * stall_limit_s if limit_s is None else limit_s
    who = "a rank" if rank is None else f"rank {rank}"
    waited = f"hvd_adaptive: {who} on {socket.gethostname()} has waited {limit_s:g} s for all ranks to meet, and ends."
    longer = f"if starting takes that long, raise stall_limit_s (now {stall_limit_s:g} s)."
    carrier, network = _NETWORKS[backend]
    text = (
        f"{waited} Some rank has not started, or {carrier} cannot connect the hosts: it may try an interface that leads nowhere, "
        f"such as a container bridge. Look for ranks that say something else; name the network between the hosts ({network}); "
        f"{longer}"
    )
    launcher = find_launcher_process(os.getpid())
    afterwards = end_command(launcher) if launcher else ["true"]
    helper = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "start-watch", text, str(os.getpid()), *afterwards],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert helper.stdin is not None

    def met(hosts: Sequence[str]) -> None:
        assert helper.stdin is not None
        text = (
            f"{waited} {carrier} had connected them, and at least one no longer answers: {_others(rank, hosts)}. It has ended or "
            f"hangs, or the network between the hosts is down. Look for ranks that say something else; {longer}"
        )
        with contextlib.suppress(BrokenPipeError):
            helper.stdin.write(f"say {text}\n".encode())
            helper.stdin.flush()

    faulthandler.dump_traceback_later(limit_s + (_TURN_S if rank else 0.0), file=helper.stdin)
    try:
        yield met
    finally:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(BrokenPipeError):
            helper.stdin.close()
        helper.wait()


def _others(rank: int | None, hosts: Sequence[str]) -> str:
    """Names all other ranks by host."""
    by_host: dict[str, list[str]] = {}
    for other, host in enumerate(hosts):
        if other != rank:
            by_host.setdefault(host, []).append(str(other))
    names = [f"rank {', '.join(ranks)} on {host}" for host, ranks in by_host.items()]
    more = len(names) - _MOST_HOSTS
    return "; ".join([*names[:_MOST_HOSTS], *([f"{more} more hosts"] if more > 0 else [])])
