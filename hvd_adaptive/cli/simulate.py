"""``hvd-adaptive simulate``: what each strategy would make of a described cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_adaptive.calibrate.file import LOCAL_ONLY, TABLE, options_of, read_table
from hvd_adaptive.cli.arguments import Parser, check_writable
from hvd_adaptive.cli.fields import add_options, fields_of
from hvd_adaptive.cli.option_groups import SIMULATE, SIMULATE_MORE
from hvd_adaptive.cli.option_sources import read_config_file, told_sources, typed, unknown_name
from hvd_adaptive.config import Config
from hvd_adaptive.report.style import pictures
from hvd_adaptive.simulate.scenario_options import SHARED_OPTIONS, ClusterConfig, SweepConfig
from hvd_adaptive.xmc.train_config import TrainConfig

if TYPE_CHECKING:
    from hvd_adaptive.simulate.sweep import Outcome

_COLUMNS = (
    ("ranks", "ranks", "d"),
    ("strategy", "strategy", "s"),
    ("samples_per_s", "samples/s", ",.0f"),
    ("utilisation", "utilisation", ".2f"),
    ("wait_share", "waiting", ".1%"),
    ("communication_share", "communication", ".1%"),
    ("claim_share", "of it claims", ".1%"),
    ("rounds_per_s", "rounds/s", ".3g"),
    ("steps_per_s", "steps/s", ".3g"),
    ("sent_mb_per_s", "MB/s sent", ".3g"),
)


def run_simulation(options: argparse.Namespace) -> None:
    """Prints a table, or JSON, of strategies over numbers of ranks, and draws it.

    Raises:
        ValueError: for options that are wrong or do not go together.
        RuntimeError: if matplotlib is missing.
    """
    if options.png:
        # Before a minute of simulating.
        check_writable("--png", Path(options.png))
        with pictures():
            pass
    # Only now: codecs load torch.
    from hvd_adaptive.simulate.measured_cluster import without_effect
    from hvd_adaptive.simulate.sweep import sweep

    fields = simulated_fields()
    given = {name: value for name, value in vars(options).items() if name in fields}
    from_file = read_config_file(options.config) if options.config else {}
    unknown = sorted(from_file.keys() - fields.keys())
    if unknown:
        raise ValueError(f"--config {options.config}: {unknown_name(unknown[0], fields)}")
    chosen = {**from_file, **given}
    calibration = None
    measured: dict[str, Any] = {}
    of_local: dict[str, Any] = {}
    content: dict[str, Any] = {}
    if options.calibration:
        content = read_config_file(options.calibration, measurements=True, option="--calibration")
        # In a run's config.json an option has that name.
        if not isinstance(content.get(TABLE), dict):
            raise ValueError(
                f"--calibration {options.calibration}: has no table {TABLE!r}; write one with hvd-adaptive calibrate"
            )
        calibration = read_table(content[TABLE], f"--calibration {options.calibration}")
        # The options of the measured run; those of training itself mean nothing here. First what all of them mean: with
        # micro-batches, which are among those, memory sets no bound.
        measured = options_of(content, calibration, strategy="sync")
        measured = {name: value for name, value in measured.items() if name in SHARED_OPTIONS}
        of_local = {name: content.get(name) for name in LOCAL_ONLY if name not in chosen}
        measured["ranks"] = str(len(calibration.ranks))
    if "local_steps" in chosen:
        measured.pop("mega_batch", None)
    in_calibration = {*content, *measured}
    with (
        told_sources(given=given, path=options.config, in_file=from_file),
        told_sources(given=chosen, path=options.calibration, in_file=in_calibration, option="--calibration"),
    ):
        if "mega_batch" in chosen and "local_steps" in chosen:
            raise ValueError(f"local_steps {chosen['local_steps']} would have no effect with mega_batch: leave one out")
        values = typed({**measured, **chosen}, fields)
        sweep_config = SweepConfig(**{name: values[name] for name in values if name in SweepConfig.__dataclass_fields__})
        cluster_config = ClusterConfig(**{name: values[name] for name in values if name in ClusterConfig.__dataclass_fields__})
        if calibration is not None:
            for name, why in without_effect(calibration, cluster_config).items():
                if name in chosen:
                    what = f"{name} {values[name]} would have no effect"
                    raise ValueError(f"{what} with --calibration {options.calibration}, {why}: leave one out")
        shared = {name: value for name, value in values.items() if name in SHARED_OPTIONS}
        described = f"{cluster_config.model_mb:g} MB, {cluster_config.ranks_per_host} ranks a host, {cluster_config.link}"
        title = f"Simulated: speeds {cluster_config.speeds}, {described}"
        title = title if calibration is None else f"Simulated from {options.calibration}"
        if not options.json:
            print(title)
        outcomes = []
        # The measured one is for the measured ranks.
        mega_batch_ranks = len(calibration.ranks) if calibration is not None and "mega_batch" not in chosen else None
        for outcome in sweep(
            sweep_config, cluster_config, shared, calibration, of_local, mega_batch_ranks=mega_batch_ranks,
            repeats_slowdown=calibration is not None and "slowdown" not in chosen,
        ):  # fmt: skip
            outcomes.append(outcome)
            if not options.json:
                _print_row(outcome, header=len(outcomes) == 1, gap=len(outcomes) > 1 and outcome.ranks != outcomes[-2].ranks)
    if options.json:
        print(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))
    if options.png:
        _draw(outcomes, options.png, title)


def add_simulate_options(parser: Parser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("--config", metavar="FILE", help=".toml or .json of these options")
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="what hvd-adaptive calibrate wrote, in place of a description",
    )
    parser.add_argument("--png", metavar="FILE", help="draw utilisation, communication and rounds/s over ranks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    # A calibration has measured periods, which count where neither of the two is given.
    texts = {"mega_batch": "samples over all ranks between two merges (default: --local-steps batches of each rank)"}
    add_options(parser, simulated_fields(), SIMULATE, SIMULATE_MORE, texts)


def simulated_fields() -> dict[str, type]:
    """Returns the dataclass of each option."""
    known = {**dict.fromkeys(SHARED_OPTIONS, Config), **fields_of(SweepConfig, ClusterConfig)}
    assert not set(known) & set(TrainConfig.__dataclass_fields__)
    return known


def _print_row(outcome: Outcome, *, header: bool, gap: bool) -> None:
    if header:
        print("  ".join(f"{text:>{_width(text)}}" for _, text, _ in _COLUMNS))
    if gap:
        print()
    found = [(getattr(outcome, name), _width(text), form) for name, text, form in _COLUMNS]
    texts = (f"{v:>{width}{',.0f' if form == '.3g' and v >= 1000 else form}}" for v, width, form in found)
    print("  ".join(texts), flush=True)


def _width(text: str) -> int:
    return 18 if text == "strategy" else max(9, len(text))


def _draw(outcomes: list[Outcome], png: str, title: str) -> None:
    from hvd_adaptive.report.scaling import plot_scaling

    by_strategy: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        by_strategy.setdefault(outcome.strategy, []).append(dataclasses.asdict(outcome))
    try:
        plot_scaling(by_strategy, Path(png), title=title)
    except OSError as error:
        raise ValueError(f"--png {png}: cannot be written: {error}") from None
    # Beside the table or the JSON, which others may read.
    print(f"picture: {png}", file=sys.stderr)
