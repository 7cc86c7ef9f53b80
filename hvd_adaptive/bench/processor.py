"""What the numbers were measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
