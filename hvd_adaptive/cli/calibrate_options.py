"""The options of ``hvd-adaptive calibrate``, and what is wrong with them; loads no torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from hvd_adaptive.cli.fields import add_options, fields_of
from hvd_adaptive.cli.option_groups import CALIBRATE, TRAIN, TRAIN_MORE
from hvd_adaptive.combinations import check_reference
from hvd_adaptive.config import Config
from hvd_adaptive.xmc.train_config import TrainConfig

# What of TrainConfig decides how long steps and merges take.
CALIBRATED_OPTIONS = (
    "data", "test_data", "cache_dir", "hidden_size", "input_gradients", "optimizer", "lr", "momentum", "weight_decay", "device",
)  # fmt: skip


def add_calibrate(commands: Any, launch: argparse.ArgumentParser) -> None:
    """Adds the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "calibrate",
        parents=[launch],
        help="measure ranks, link and merges, and write the options that fit them",
        description="Trains for about a minute, writes what it measured to one file, and recommends a strategy, compression, "
        "fragments, batch-size bounds and a mega-batch.",
    )
    parser.add_argument("--config", metavar="FILE", help=".toml or .json of options to start from")
    parser.add_argument(
        "--out",
        dest="calibration_file",
        metavar="FILE",
        default="calibration.toml",
        help="file to write, .toml or .json, for train --config (default: calibration.toml)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        default=4.0,
        help="measure each kind of round for at least S seconds (default: 4)",
    )
    fields = {**dict.fromkeys(CALIBRATED_OPTIONS, TrainConfig), **fields_of(Config)}
    add_options(parser, fields, CALIBRATE, {**TRAIN, **TRAIN_MORE})


def check_calibrate(config: Config, out: str, seconds: float) -> None:
    """Raises ValueError for options with which nothing can be calibrated.

    Args:
        config: how ranks share and merge.
        out: the file to write.
        seconds: how long rounds of each kind are measured at least.
    """
    if config.strategy != "local":
        raise ValueError(
            f"calibrate starts from strategy local and compares it with others itself, got strategy {config.strategy!r}: leave "
            f"it out, and choose by hand later (hvd-adaptive train --config FILE --strategy {config.strategy})"
        )
    if config.logical_ranks is not None:
        raise ValueError(
            f"calibrate measures the ranks that there are, and logical_ranks {config.logical_ranks} follow no speeds: leave "
            "that out"
        )
    check_reference(config)
    if config.repeatable:
        raise ValueError("calibrate records and replays nothing: leave --record and --replay out")
    if config.island is not None:
        raise ValueError(f"calibrate measures every rank by itself: leave --island {config.island} out")
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds must be > 0 and finite, got {seconds:g}")
    if Path(out).suffix not in (".toml", ".json"):
        raise ValueError(f"--out must end in .toml or .json, got {out!r}")
