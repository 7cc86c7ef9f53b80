"""Where rank 0's store listens, and how the other ranks find an address of it that they can reach."""

from __future__ import annotations

import fcntl
import resource
import socket
import struct
import sys
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined,unused-ignore]

from hvd_adaptive.comm.seal import Seal, new_secret

PROBE_S = 3.0
_PATIENT_PROBES_S = 20.0
CONNECTIONS_PER_RANK = 4  # claims, rendezvous, heartbeats, and the heartbeats' lifeline
# What rank 0 opens besides: at least, and where it loads much data.
_OWN_FILES = 100
_MANY_FILES = 512
_SIOCGIFADDR = 0x8915
# Under it stands what only rank 0 of this job can have put there.
_SIGN = "sign"


class Offer(NamedTuple):
    """What rank 0 tells the others over MPI.

    Attributes:
        addresses: to try in turn.
        port: of the store.
        secret: of the job, for :class:`hvd_adaptive.comm.seal.Seal`.
    """

    addresses: list[str]
    port: int
    secret: str


def serve(*, same_host: bool, world_size: int) -> tuple[TCPStore, Offer]:
    """Starts the store on a port that the system picks.

    The store itself asks for no password, and lists its keys to whoever connects. So what it says is believed only with a
    code that needs the job's secret.

    Args:
        same_host: all ranks are on this host, so listen on the loopback interface only.
        world_size: number of ranks that will connect.

    Raises:
        RuntimeError: this process may not open enough files for that many connections.
    """
    _allow_open_files(world_size)
    backlog = CONNECTIONS_PER_RANK * world_size
    if same_host:
        addresses = ["127.0.0.1"]
        listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    else:
        addresses = own_addresses()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=dual)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    secret = new_secret()
    store.set(_SIGN, Seal(secret).close(_SIGN, b"").decode())
    return store, Offer(addresses, port, secret)


def find_server(offer: Offer, rank: int, *, server: str) -> str:
    """Returns the first of the offered addresses at which rank 0's store answers.

    An address may lead elsewhere: container bridges have the same address on every host.

    Args:
        offer: what rank 0 broadcast.
        rank: this rank, for the message.
        server: what is looked for, for the message.

    Raises:
        RuntimeError: none answers.
    """
    failures: list[str] = []
    sign = Seal(offer.secret).close(_SIGN, b"")
    # Soon on to the next one; where none answered, rank 0 may be held up.
    for limit_s in (PROBE_S, max(PROBE_S, _PATIENT_PROBES_S / len(offer.addresses))):
        failures.clear()
        for address in offer.addresses:
            try:
                # A plain connection first: torch's client retries and logs each refusal.
                socket.create_connection((address, offer.port), timeout=limit_s).close()
                limit = timedelta(seconds=limit_s)
                store = TCPStore(address, offer.port, is_master=False, wait_for_workers=False, timeout=limit)
                if store.check([_SIGN]) and store.get(_SIGN) == sign:
                    return address
                failures.append(f"{address}: another program answers")
            except (OSError, DistError) as error:
                failures.append(f"{address}: {error}")
    raise RuntimeError(
        f"rank {rank} on {socket.gethostname()} cannot reach {server} at port {offer.port} "
        f"({'; '.join(failures)}): the hosts must accept TCP connections from each other on all ports; ask "
        "for a firewall rule between the job's hosts, or fix rank 0's host name"
    )


def own_addresses() -> list[str]:
    """Returns this host's addresses but loopback: those of its name first, then the interfaces' IPv4 ones.

    Raises:
        RuntimeError: there is none.
    """
    found: list[str] = []
    try:
        for *_, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.append(str(place[0]))
    except socket.gaierror:
        # A host that does not know its own name still has interfaces.
        pass
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                try:
                    reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue  # an interface without an IPv4 address
                found.append(socket.inet_ntoa(reply[20:24]))
    usable = [address for address in dict.fromkeys(found) if not address.startswith(("127.", "::1", "fe80:"))]
    if not usable:
        raise RuntimeError(
            f"{socket.gethostname()} (rank 0) has no network address but loopback, and the ranks are on "
            "several hosts: bring up the network interface that connects them"
        )
    return usable


def _allow_open_files(world_size: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS_PER_RANK * world_size + _OWN_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        fewer = " or start fewer ranks" if hard > CONNECTIONS_PER_RANK + _OWN_FILES else ""
        raise RuntimeError(
            f"rank 0 needs {needed} open files, {CONNECTIONS_PER_RANK} for the connections of each of {world_size} ranks and "
            f"{_OWN_FILES} of its own, and the limit is {hard}: raise it (`ulimit -Hn`, LimitNOFILE of the scheduler's daemon)"
            f"{fewer}"
        )
    wanted = CONNECTIONS_PER_RANK * world_size + _MANY_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
