"""What else is wrong with options, found before ranks start: of what they find, their launcher has ten lines more to say."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.config import Config
from hvd_adaptive.xmc.train_config import TrainConfig

# The codecs know which texts they can read, but load torch, which would hold up each start for seconds. These they can read.
_READABLE = re.compile(r"auto|none|fp16|bf16|sign|maxmin:[1-8](,(nearest|stochastic))?|topk:0?\.\d*[1-9]\d*|powersgd:[1-9]\d*")


def check_compression_early(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError for a compression that cannot be read, unless this process is a rank, which finds out by itself."""
    if read_launcher(environment).rank is not None or _READABLE.fullmatch(config.compression.strip()):
        return
    from hvd_adaptive.exchange.compressed import check_compression

    check_compression(config)


def check_data_early(train: TrainConfig) -> None:
    """Raises ValueError where nothing on this host begins with the path of the data."""
    if train.data is None:
        return
    path = Path(train.data).expanduser()
    if path.exists() or any(path.parent.glob(f"{path.name}*")):
        return
    # Only now: it loads torch.
    from hvd_adaptive.xmc.data import resolve

    resolve(train.data, train.test_data)
