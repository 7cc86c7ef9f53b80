"""The command ``hvd-adaptive``: arguments and assembly only."""

from hvd_adaptive.cli.main import main

__all__ = ["main"]
