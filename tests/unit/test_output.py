"""Warnings of this package in a program that has set up no logging."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
import hvd_adaptive
log = logging.getLogger("hvd_adaptive.engine.x")
log.info("quiet")
log.warning("%d steps", 3)
logging.basicConfig(format="mine: %(message)s")
log.warning("once")
"""


def test_a_warning_says_whose_it_is_unless_the_program_has_logging_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines() == ["hvd-adaptive: warning: 3 steps", "mine: once"]
