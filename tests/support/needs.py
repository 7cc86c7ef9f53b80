"""What a test needs of the machine: on a person's it is skipped with the reason, in CI nothing may be skipped."""

from __future__ import annotations

import os
import shutil
import socket

import pytest


def skip_or_fail(reason: str) -> None:
    """Skips the running test; in CI fails it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI skips nothing: {reason}")
    pytest.skip(reason)


def need_host_names() -> None:
    """Goes on only where localhost and this host have addresses: horovodrun asks for the one, and Gloo for the other."""
    for name in ("localhost", socket.gethostname()):
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            skip_or_fail(f"needs an address of {name} in /etc/hosts: {error}")


def lacks(**packages: str) -> str | None:
    """Says what this process lacks of root and of some programs, None if it has all.

    Args:
        packages: Debian's package of each program.
    """
    if os.geteuid() != 0:
        return "needs root"
    lacking = sorted({package for program, package in packages.items() if shutil.which(program) is None})
    return f"needs Debian's {', '.join(lacking)}" if lacking else None


def need_root_and(**packages: str) -> None:
    """Goes on only for root, and with all programs that are needed.

    Args:
        packages: Debian's package of each program.
    """
    if reason := lacks(**packages):
        skip_or_fail(reason)
