"""Adaptive SGD against plain Horovod on ranks of speeds 1:1:2:4, and the record of it.

    python benchmarks/unequal_ranks.py tune    --data embedded --out DIR      one seed, every setting of benchmarks/settings.toml
    python benchmarks/unequal_ranks.py confirm --data embedded --out DIR      the winners, three seeds, alternating
    python benchmarks/unequal_ranks.py quotas  --data embedded --out DIR      the same, speeds by real CPU quotas (root)
    python benchmarks/unequal_ranks.py strategies --data embedded --out DIR   every strategy and baseline, three seeds
    python benchmarks/unequal_ranks.py ablate  --data embedded --out DIR      one option changed at a time, to a target accuracy

Prints a Markdown record; ``--record FILE`` writes it too. Runs that are in DIR already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recording import header, publish

from hvd_adaptive.cluster.relaunch import ranks_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
SLOWDOWN = "8,8,4,2"
# Shares of a core that stand to each other as the speeds; less than two cores together, so that they are what limits.
QUOTAS = (0.2, 0.2, 0.4, 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("tune", "confirm", "quotas", "strategies", "ablate"))
    parser.add_argument("--data", default="embedded", help="embedded, or a prefix of XMC files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 1 to tune, else 3)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", help="only these settings, separated by commas")
    # Short against a step, so that a part of a core is like a slower one and not like one that stops now and then.
    parser.add_argument("--period-ms", type=int, default=5, help="of CPU quotas (default: 5; containers have 100)")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    name = Path(options.data).name
    settings = tomllib.loads((HERE / "settings.toml").read_text())
    table = settings[name]
    table["ablate"] = {
        key: f"{table['ablation']} {change}".strip() for key, change in settings["ablate"].items()
    }
    wanted = options.methods.split(",") if options.methods else list(table[options.stage])
    num_seeds = options.seeds or (1 if options.stage == "tune" else 3)
    groups = make_cgroups(1000 * options.period_ms) if options.stage == "quotas" else None
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.first_seed, options.first_seed + num_seeds):
        for method in wanted:
            folder = options.out / f"{name}-{options.stage}-{method}-{seed}"
            arguments = [
                *shlex.split(table["common"]),
                *shlex.split(table[options.stage][method]),
                "--seed",
                str(seed),
                "--name",
                method,
            ]
            if options.data != "embedded":
                arguments += ["--data", options.data]
            runs.setdefault(method, []).append(run(folder, arguments, groups))
            print(one_line(method, runs[method][-1]), file=sys.stderr, flush=True)
    publish(record(options, table, runs), options.record)


def run(folder: Path, arguments: list[str], groups: list[Path] | None) -> dict[str, Any]:
    """Runs a training of four ranks, unless it is there, and reads what it left."""
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "hvd_adaptive", "train", *arguments, "--out", str(folder)]
        environment = dict(os.environ)
        if "-np" in arguments:
            pass
        elif groups is None:
            command += ["-np", "4", "--slowdown", SLOWDOWN]
        else:
            in_groups = ["bash", str(HERE / "in_cgroup.sh"), *map(str, groups), "--", *command]
            command, environment = ranks_command(4, in_groups)
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            sys.exit(f"{shlex.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}")
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return {"summary": json.loads((folder / "summary.json").read_text()), "rounds": rounds}


def make_cgroups(period_us: int) -> list[Path]:
    """Makes one CPU control group a rank; version 1 or 2."""
    root = Path("/sys/fs/cgroup")
    groups = []
    for rank, quota in enumerate(QUOTAS):
        quota_us = int(quota * period_us)
        if (root / "cpu").is_dir():
            group = root / "cpu" / f"hvd_adaptive_{rank}"
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            group = root / f"hvd_adaptive_{rank}"
            group.mkdir(exist_ok=True)
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        groups.append(group)
    return groups


def seconds_to(result: dict[str, Any], target: float) -> float | None:
    """Training seconds at the first evaluation with at least this P@1."""
    return next((r["train_s"] for r in result["rounds"] if r["eval"] and r["eval"]["p1"] >= target), None)


def best_until(result: dict[str, Any], epochs: float) -> float:
    """The best P@1 among the evaluations within so many epochs."""
    return max(r["eval"]["p1"] for r in result["rounds"] if r["eval"] and r["epoch"] <= epochs + 1e-9)


def one_line(method: str, result: dict[str, Any]) -> str:
    s = result["summary"]
    return (
        f"{method}: best P@1 {s['best']['p1']:.4f} at {s['best_train_s'] or s['train_s']:.1f} s, {s['samples']:,} samples in "
        f"{s['train_s']:.1f} s, U {s['utilisation'] or 0:.2f} (wall {s['utilisation_wall'] or 0:.2f}), "
        f"wait {s['wait_share']:.1%}, merge {s['merge_share']:.1%}, control {s['control_share']:.2%}"
    )


def middle(values: list[float], form: str = ".4f") -> str:
    text = f"{statistics.median(values):{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def record(options: argparse.Namespace, table: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    speeds = (
        f"emulated, --slowdown {SLOWDOWN}"
        if options.stage != "quotas"
        else f"CPU quotas of {', '.join(f'{q:.1%}' for q in QUOTAS)} of a core, period {options.period_ms} ms"
    )
    lines = [
        *header(
            f"{options.stage}: {Path(options.data).name}, 4 ranks at speeds 1:1:2:4",
            f"Speeds: {speeds}. Common options: `{table['common']}`. Seconds are training time, evaluation excluded.",
        ),
        "| method | options | best P@1 | P@3 | P@5 | epochs | train s | s to best | samples/s | U | waiting | merge | control |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method, results in runs.items():
        s = [r["summary"] for r in results]
        cells = [
            method,
            f"`{table[options.stage][method]}`",
            middle([x["best"]["p1"] for x in s]),
            middle([x["best"]["p3"] for x in s]),
            middle([x["best"]["p5"] for x in s]),
            f"{statistics.median([r['rounds'][-1]['epoch'] for r in results]):.1f}",
            middle([x["train_s"] for x in s], ".1f"),
            middle([x["best_train_s"] for x in s], ".1f"),
            f"{statistics.median([x['samples_per_s'] for x in s]):,.0f}",
            middle(
                [x["utilisation_wall" if options.stage == "quotas" else "utilisation"] for x in s], ".2f"
            ),
            middle([x["wait_share"] for x in s], ".3f"),
            f"{statistics.median([x['merge_share'] for x in s]):.3f}",
            f"{statistics.median([x['control_share'] for x in s]):.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if options.stage in ("confirm", "quotas", "strategies"):
        lines += ["", *comparison(runs)]
    if options.stage == "ablate":
        lines += ["", *ablation(runs)]
    return lines


def comparison(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Time to each plain variant's best P@1, seed by seed."""
    lines = [
        "Time to plain Horovod's best P@1, by seed: its seconds / the row's seconds. And best P@1, the row's / its, up to the",
        "epochs that both have consumed.",
        "",
        "| | against | ratios by seed | median | best P@1 at equal epochs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for ours in runs:
        for plain in (name for name in runs if name.startswith("horovod") and name != ours):
            ratios, equal = [], []
            for mine, theirs in zip(runs[ours], runs[plain], strict=True):
                reached = seconds_to(mine, theirs["summary"]["best"]["p1"])
                ratios.append(theirs["summary"]["best_train_s"] / reached if reached else 0.0)
                epochs = min(mine["rounds"][-1]["epoch"], theirs["rounds"][-1]["epoch"])
                equal.append(f"{best_until(mine, epochs):.4f} / {best_until(theirs, epochs):.4f} ({epochs:.2f})")
            shown = ", ".join(f"{r:.2f}x" if r else "not reached" for r in ratios)
            median = f"{statistics.median(ratios):.2f}x" if any(ratios) else ""
            lines.append(f"| {ours} | {plain} | {shown} | {median} | {', '.join(equal)} |")
    return lines


def ablation(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Each change against the base of the same seed: time, epochs and speed to the target."""
    target = next(iter(runs.values()))[0]["summary"]["target_p1"]
    lines = [
        f"To P@1 {target}, each change against `base`, seed by seed. Time is what counts; epochs (how much a sample teaches)",
        "have less of the machine's noise. Below 1: better for time and epochs, worse for samples/s.",
        "",
        "| change | time | epochs | samples/s | reached |",
        "| --- | --- | --- | --- | --- |",
    ]

    def reach(result: dict[str, Any]) -> tuple[float, float] | None:
        row = next((r for r in result["rounds"] if r["eval"] and r["eval"]["p1"] >= target), None)
        return (row["train_s"], row["epoch"]) if row else None

    for name, results in runs.items():
        pairs = [(reach(mine), reach(base)) for mine, base in zip(results, runs["base"], strict=True)]
        both = [(mine, base) for mine, base in pairs if mine and base]
        cells = [name]
        for part in (0, 1):
            ratios = [mine[part] / base[part] for mine, base in both]
            cells.append(f"{middle(ratios, '.2f')}" if ratios else "")
        speeds = [
            mine["summary"]["samples_per_s"] / base["summary"]["samples_per_s"]
            for mine, base in zip(results, runs["base"], strict=True)
        ]
        cells += [middle(speeds, ".2f"), f"{sum(mine is not None for mine, _ in pairs)} of {len(pairs)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
