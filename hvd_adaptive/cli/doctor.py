"""``hvd-adaptive doctor``: one page that says whether this machine or allocation will work, and what to do if not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_adaptive.cli.arguments import check_writable, write_output
from hvd_adaptive.cli.fields import add_backend
from hvd_adaptive.cli.option_sources import world_config
from hvd_adaptive.cluster.binding import read_launcher
from hvd_adaptive.doctor.examine import (
    examine_by_launching,
    examine_rank,
    tell_launching_process,
    wait_for_rank_0,
)
from hvd_adaptive.doctor.gpu import examine_gpu
from hvd_adaptive.doctor.supervise import Ended
from hvd_adaptive.doctor.text_page import page
from hvd_adaptive.exit_codes import EXIT_PROBLEMS

# Options that --gpu does not know, with their defaults.
_WITHOUT_GPU = {"json": None, "device": "auto", "probe_seconds": 2.0, "limit": 60.0}


def add_doctor(commands: Any, launch: argparse.ArgumentParser) -> None:
    """Adds the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "doctor",
        parents=[launch],
        help="say whether this machine or allocation will work, and what to do if not",
        description="Tries on all ranks what training needs, and prints one page. Exit codes: 0 training will work here, perhaps "
        "with warnings; 1 there is a problem; 2 bad options.",
    )
    parser.add_argument(
        "--json", metavar="FILE|-", help="also write what was found as JSON; - prints it in place of the page"
    )
    add_backend(parser)
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:K, as for train (default: auto)")
    parser.add_argument(
        "--probe-seconds",
        type=float,
        metavar="S",
        help="length of the speed test; 30 shows GPUs that get slow when hot (default: 2)",
    )
    parser.add_argument(
        "--limit", type=float, metavar="S", help="seconds that each check may take (default: 60)"
    )
    parser.add_argument(
        "--gpu",
        nargs="?",
        const="hvd-adaptive-gpu.json",
        metavar="FILE",
        help="check a first GPU node instead, in 3 minutes; writes FILE (default: hvd-adaptive-gpu.json)",
    )
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(**_WITHOUT_GPU)


def doctor(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Examines and says what was found; returns the exit code: 0, or 1 if there is a problem.

    Args:
        options: the parsed command line.
        arguments: the command line without -np, for the ranks that -np starts.

    Raises:
        ValueError: for bad options.
    """
    if not options.probe_seconds > 0:
        raise ValueError(f"--probe-seconds must be > 0, got {options.probe_seconds}")
    if not options.limit > options.probe_seconds:
        raise ValueError(f"--limit must be longer than --probe-seconds, got {options.limit} and {options.probe_seconds}")
    rank, backend = read_launcher(os.environ).rank or 0, world_config(options).backend
    if options.gpu is not None:
        for name, default in _WITHOUT_GPU.items():
            if getattr(options, name) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(options, name)} would have no effect with --gpu, whose checks have "
                    "devices, limits and a file of their own: leave one out"
                )
        return _doctor_gpu(options.gpu, options.num_ranks, backend)
    progress = _Progress(options.as_rank and not rank)
    if options.num_ranks is not None:
        try:
            found: dict[str, Any] | None = examine_by_launching(
                options.num_ranks, [*arguments, "--as-rank"], backend=backend, device=options.device, limit_s=options.limit,
                on_stage=progress.show,
            )  # fmt: skip
        except Ended as ended:
            progress.end()
            name = signal.Signals(ended.args[0]).name
            print(f"hvd-adaptive doctor: ended by {name} before all checks were made", file=sys.stderr)
            return 128 + int(ended.args[0])
    else:
        found = examine_rank(
            backend=backend, device=options.device, probe_seconds=options.probe_seconds, limit_s=options.limit,
            on_stage=progress.show,
        )  # fmt: skip
    progress.end()
    if found is None:
        return 0
    if rank:
        for finding in found["findings"]:
            if finding["status"] == "problem":
                print(
                    f"rank {rank} on {found['ranks'][0]['machine']['host']}: {finding['subject']}: {finding['text']}",
                    file=sys.stderr,
                    flush=True,
                )
        wait_for_rank_0()
        return EXIT_PROBLEMS
    if options.as_rank:
        tell_launching_process(document=found)
        return 0
    _show(found, options.json)
    return EXIT_PROBLEMS if found["problems"] else 0


def _doctor_gpu(file: str, num_ranks: int | None, backend: str) -> int:
    """Checks this node's GPUs, prints the verdict and writes the file.

    Raises:
        ValueError: for options that do not go together, and a file that cannot be written.
    """
    if num_ranks is not None or read_launcher(os.environ).name != "none":
        raise ValueError("--gpu starts its ranks itself: run it once, on one node, without a launcher and without -np")
    if backend == "auto":
        # What is missing is for the checks to say, where MPI and Horovod are not there at all.
        backend = "horovod" if all(importlib.util.find_spec(name) for name in ("horovod", "mpi4py")) else "torch"
    check_writable("--gpu", Path(file))
    progress = _Progress(as_rank=False)
    try:
        found = examine_gpu(backend=backend, on_check=progress.show)
    except Ended:
        progress.end()
        raise RuntimeError("ended by a signal before all checks were made; nothing was written") from None
    progress.end()
    write_output("--gpu", file, json.dumps(found, indent=1) + "\n")
    print(page(found, symbols=_has_symbols()), flush=True)
    print(f"\nAll that was found: {file}. It names no host, person or environment; attach it to a report.", flush=True)
    return EXIT_PROBLEMS if found["problems"] else 0


def _has_symbols() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _show(found: dict[str, Any], json_file: str | None) -> None:
    text = json.dumps(found, indent=1)
    if json_file == "-":
        print(text, flush=True)
        return
    print(page(found, symbols=_has_symbols()), flush=True)
    if json_file is not None:
        write_output("--json", json_file, text + "\n")


class _Progress:
    """Says which check is under way: to the process that started the ranks, or on a terminal."""

    def __init__(self, as_rank: bool) -> None:
        self._as_rank = as_rank
        self._terminal = sys.stderr.isatty()

    def show(self, stage: str) -> None:
        if self._as_rank:
            tell_launching_process(stage=stage)
        elif self._terminal:
            print(f"\r\033[Kchecking {stage} ...", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal and not self._as_rank:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
