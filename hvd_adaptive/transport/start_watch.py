"""Ends a start at which the ranks do not meet; heartbeats watch only once they have met."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import subprocess
from collections.abc import Iterator

# Ranks of a large job may load Python from a slow disk at very different speeds.
START_LIMITS = 5
_TURN_S = 5.0
# The pipe ends without a line when all is well, or when the process has ended.
_SCRIPT = 'read -r line || exit 0; printf "%s\\n" "$1" >&2; kill -KILL "$2"'


@contextlib.contextmanager
def start_watch(rank: int | None, *, stall_limit_s: float) -> Iterator[None]:
    """Ends this process, with the reason, if the block takes longer than five stall limits. Rank 0 speaks first.

    MPI_Init holds Python's lock, so no thread of Python could do it: faulthandler's thread, which is in C, writes into a
    pipe, and a small process at its other end speaks and acts.

    Args:
        rank: what the launcher said, None where it said nothing.
        stall_limit_s: the stall limit in seconds.
    """
    limit_s = START_LIMITS * stall_limit_s
    who = "a rank" if rank is None else f"rank {rank}"
    text = (
        f"\nhvd_adaptive: {who} on {socket.gethostname()} has waited {limit_s:g} s for all ranks to meet, and ends. Some rank "
        "has not started, or MPI cannot connect the hosts: it may try an interface that leads nowhere, such as a container "
        "bridge. Look for ranks that say something else; name the network between the hosts (Open MPI: "
        "OMPI_MCA_btl_tcp_if_include=10.0.0.0/8, MPICH: MPIR_CVAR_NETWORK_IFACE=eth0); if starting takes that long, raise "
        f"stall_limit_s (now {stall_limit_s:g} s)."
    )
    helper = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "start-watch", text, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert helper.stdin is not None
    faulthandler.dump_traceback_later(limit_s + (_TURN_S if rank else 0.0), file=helper.stdin)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        helper.stdin.close()
        helper.wait()
