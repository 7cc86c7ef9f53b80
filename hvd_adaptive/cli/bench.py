"""``hvd-adaptive bench``: measurements as a table, and as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_adaptive import __version__
from hvd_adaptive.cli.arguments import write_output
from hvd_adaptive.cli.option_sources import world_config
from hvd_adaptive.config import Config

if TYPE_CHECKING:
    from hvd_adaptive.comm.protocols import Transport

_UNITS = {
    "bits": "bits/value", "encode_gb_s": "encode GB/s", "decode_add_gb_s": "decode-add GB/s", "encode_ratio": "encode/copy",
    "decode_add_ratio": "decode-add/copy", "error_one_round": "error, 1 round", "error_two_rounds": "error, 2 rounds",
    "break_even_mbit": "break-even Mbit/s", "wire_seconds": "wire s", "link_mbit": "Mbit/s",
}  # fmt: skip

_NOT_RECORDED = ("command", "bench", "json", "terminal", "num_ranks")


def bench_compress(options: argparse.Namespace) -> None:
    """Measures codecs on one core, and on the GPU where there is one.

    Raises:
        ValueError: for bad options.
        RuntimeError: if the file cannot be written.
    """
    import torch

    from hvd_adaptive.doctor.codec_speed import SPECS, measure_codecs

    _check_positive(options, "mib", "repeat")
    if options.ranks < 2:
        raise ValueError(f"--ranks must be >= 2, got {options.ranks}")
    specs = _split(options.codecs) if options.codecs else list(SPECS)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])] if options.device == "auto" else [options.device]
    if any(device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()) for device in devices):
        raise ValueError(f"--device {options.device}: there is no such device here; give auto, cpu, cuda or cuda:K")
    rows = []
    for device in devices:
        rows += measure_codecs(
            specs,
            num_values=int(options.mib * 2**18),
            repeat=options.repeat,
            num_ranks=options.ranks,
            device=torch.device(device),
        )
    _show(rows, options, {"ranks": options.ranks})


def bench_comm(options: argparse.Namespace, transport: Transport) -> None:
    """Measures exchanges over the ranks' link. COLLECTIVE.

    Raises:
        AgreedError: on all ranks, for bad options, or if the file cannot be written.
    """
    import torch

    from hvd_adaptive.comm.protocols import AgreedError, agree
    from hvd_adaptive.doctor.link_speed import METHODS, measure_link

    try:
        _check_positive(options, "mb", "repeat", "chunk_elements", "rate_mbit")
        if transport.backend == "torch":
            raise ValueError(
                "bench comm measures Horovod's link: start it by -np, mpirun, horovodrun or srun, without backend 'torch'"
            )
        if (threads := world_config(options).compute_threads) is not None:
            torch.set_num_threads(threads)
        if transport.world_size < 2:
            raise ValueError("bench comm needs 2 ranks or more: use -np 2, or start it with mpirun, horovodrun or srun")
        rows = measure_link(
            transport,
            _split(options.codecs) if options.codecs else list(METHODS),
            num_values=int(options.mb * 1e6 / 4),
            repeat=options.repeat,
            reducer=options.reducer,
            error_feedback=options.error_feedback,
            chunk_elements=options.chunk_elements,
            rate_mbit=options.rate_mbit,
        )
    except ValueError as error:
        # Every rank has the same options.
        raise AgreedError(str(error)) from None
    failure = None
    if transport.rank == 0:
        try:
            _show(rows, options, {"ranks": transport.world_size, "ranks_per_host": transport.local_size})
        except ValueError as error:
            failure = str(error)
    agree(transport, failure)


def uses_groups(options: argparse.Namespace) -> bool | None:
    """Returns what `connect` has to know of groups."""
    return None if options.reducer == "by-host" else options.reducer == "hierarchical"


def add_bench(commands: Any, launch: argparse.ArgumentParser) -> None:
    """Adds the command and its options to a parser."""
    reducers = Config.__dataclass_fields__["reducer"].metadata["choices"]
    bench = commands.add_parser("bench", help="measure codecs on this machine, or exchanges over the present link")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", metavar="FILE", help="write the numbers to this file as well")
    compress = kinds.add_parser(
        "compress", parents=[common], help="speed and error of codecs on one core, and on a GPU where there is one",
        epilog="""examples:
  hvd-adaptive bench compress
  hvd-adaptive bench compress --codecs "maxmin:4; maxmin:4,bucket=1024,nearest; topk:0.01" --json found.json""",
    )  # fmt: skip
    compress.add_argument("--codecs", metavar="A;B", help="separated by semicolons (default: a choice of all kinds)")
    compress.add_argument("--mib", type=float, default=64, help="MiB of fp32 values (default: 64)")
    compress.add_argument("--repeat", type=int, default=9, help="turns, of which medians count (default: 9)")
    compress.add_argument(
        "--ranks", type=int, default=2, help="ranks whose values meet, for errors and break-even; 2 encode once (default: 2)"
    )
    compress.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:K")
    comm = kinds.add_parser(
        "comm", parents=[launch, common], help="seconds of one exchange: Horovod in fp32 and fp16 against codecs",
        epilog="""examples:
  hvd-adaptive bench comm -np 2 --codecs "horovod-fp32; maxmin:4"
  horovodrun -np 2 -H alpha:1,beta:1 hvd-adaptive bench comm --rate-mbit 1000""",
    )  # fmt: skip
    comm.add_argument(
        "--codecs",
        metavar="A;B",
        help="horovod-fp32, horovod-fp16, or any codec, separated by semicolons; the first is the baseline",
    )
    comm.add_argument("--mb", type=float, default=100, help="MB (1e6 bytes) of fp32 values on each rank (default: 100)")
    comm.add_argument("--repeat", type=int, default=5, help="turns, of which medians count (default: 5)")
    comm.add_argument("--reducer", default="sra", choices=reducers, help="how encoded values meet (default: sra)")
    comm.add_argument("--error-feedback", action="store_true", help="with residuals")
    comm.add_argument("--chunk-elements", type=int, default=1 << 20, help="values in a chunk of the pipeline (default: 1048576)")
    comm.add_argument("--rate-mbit", type=float, help="of the link between hosts, to compare with its limit")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be > 0, got {value}")


def _show(rows: Sequence[Any], options: argparse.Namespace, where: dict[str, Any]) -> None:
    table = [dataclasses.asdict(row) for row in rows]
    columns = [name for name in table[0] if any(row[name] is not None for row in table)]
    lines = [[_UNITS.get(name, name) for name in columns]]
    lines += [[_text(row[name]) for name in columns] for row in table]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    if options.json:
        import torch

        from hvd_adaptive.doctor.machine import cpu_model

        content = {
            "command": options.bench,
            "options": {name: value for name, value in vars(options).items() if name not in _NOT_RECORDED},
            "versions": {"hvd_adaptive": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "processor": cpu_model(),
            **where,
            "rows": table,
        }
        write_output("--json", options.json, json.dumps(content, indent=1) + "\n")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
