"""What a test needs of the machine: on a person's it is skipped with the reason, in CI nothing may be skipped."""

from __future__ import annotations

import os
import shutil

import pytest


def skip_or_fail(reason: str) -> None:
    """Skips the running test; in CI fails it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI skips nothing: {reason}")
    pytest.skip(reason)


def need_root_and(**packages: str) -> None:
    """Goes on only for root, and with all programs that are needed.

    Args:
        packages: Debian's package of each program.
    """
    if os.geteuid() != 0:
        skip_or_fail("needs root")
    lacking = sorted({package for program, package in packages.items() if shutil.which(program) is None})
    if lacking:
        skip_or_fail(f"needs Debian's {', '.join(lacking)}")
