"""Whom the output of a job that has ended blames for it, and whether two names are one host's."""

from __future__ import annotations

import ipaddress
import re
import socket

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

# Whom the launcher or the heartbeats blame, and for how long the rank had been silent by then.
_BLAME = tuple(
    re.compile(pattern)
    for pattern in (
        r"on node (?P<host>\S+) exited on signal",
        r"hvd_adaptive: rank \d+ on (?P<host>\S+) \(pid \d+\) .*?(?:no heartbeat for (?P<silent>[\d.]+) s|no progress for|;)",
        r"Remote daemon:.* on node (?P<host>\S+)",
        r"ssh: (?:connect to host|Could not resolve hostname) (?P<host>[^\s:]+)",
    )
)


# Open MPI says this at once, and whose fault it is when it has ended all others.
_FIRST_SIGN = re.compile(r"Primary job +terminated normally, but")


# Of the launcher, not of ranks that it has started.
_CANNOT_REACH = re.compile(r"(?:ORTE|PRTE) was unable to reliably start|ssh: (?:connect to host|Could not resolve hostname)")


def is_first_sign(line: str) -> bool:
    """Whether a line of the job's output says that a rank has ended as it should not, without saying which."""
    return _FIRST_SIGN.search(line) is not None


def cannot_reach(line: str) -> bool:
    """Whether a line of the job's output says that the launcher does not reach a host."""
    return _CANNOT_REACH.search(line) is not None


def blame(line: str) -> tuple[str, float] | None:
    """Reads whom a line of the job's output blames for its end.

    Returns:
        The host, and for how many seconds its rank had been silent; None if it is about something else.
    """
    for match in filter(None, (pattern.search(line) for pattern in _BLAME)):
        return match["host"], float(match.groupdict().get("silent") or 0.0)
    return None


def is_local(host: str) -> bool:
    """Whether a name is this machine's."""
    return host in _LOCAL_NAMES or _same_name(host, socket.gethostname())


def same_host(one: str, other: str) -> bool:
    """Whether two names are one host's: with and without its domain, this machine's, or with an address in common.

    A discovery script may print addresses or full names where ranks and launchers say what the host calls itself.
    """
    return has_same_name(one, other) or bool(_addresses(one) & _addresses(other))


def has_same_name(one: str, other: str) -> bool:
    """Whether two names are one host's without asking for addresses: with and without its domain, or both this machine's."""
    return _same_name(one, other) or (is_local(one) and is_local(other))


def _same_name(one: str, other: str) -> bool:
    if one.lower() == other.lower():
        return True
    if _is_address(one) or _is_address(other):
        return False
    short, full = sorted((one.lower(), other.lower()), key=len)
    # Two full names that differ are two hosts': node1.east and node1.west.
    return full.startswith(f"{short}.") and "." not in short


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _addresses(host: str) -> set[str]:
    """The host's addresses, but for those that every host has of its own."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)}
    except (OSError, UnicodeError):
        return set()
    return {address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback}
