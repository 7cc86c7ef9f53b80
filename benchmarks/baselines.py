"""Every method at its best: the same number of learning rates for each optimizer, then the winners in turns, and the record.

    python benchmarks/baselines.py --data embedded --out DIR --record FILE
    python benchmarks/baselines.py --data embedded --out DIR --quotas       speeds by real CPU quotas (root)
    python benchmarks/baselines.py --data embedded --out DIR --equal        ranks of one speed

Four ranks at speeds 1:1:2:4. Plain Horovod and `sync` make the update of one rank with the global batch, so one rank tunes
them, two runs at a time. `local` is tuned with four ranks of one speed. Then these take turns: plain Horovod with its best
optimizer (sparse and dense gradients), plain Horovod with the optimizer of `local`, `sync`, `local` at its best, and `local` with
nothing set.
Runs that are in DIR already are not repeated.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recording import header, publish
from unequal_ranks import QUOTAS, SLOWDOWN, best_until, make_cgroups, middle, one_line, run, seconds_to

RANKS = 4
RATES = {
    "sgd": (1.0, 3.0, 10.0, 30.0, 100.0),
    "momentum": (0.1, 0.3, 1.0, 3.0, 10.0),
    "adagrad": (0.02, 0.035, 0.06, 0.1, 0.2),
    "rowwise-adagrad": (0.02, 0.035, 0.06, 0.1, 0.2),
    "adam": (0.0005, 0.001, 0.0025, 0.006, 0.015),
}
# What is tuned once serves all methods with the same update.
TUNED = {
    "synchronous": f"-np 1 --strategy horovod --batch-size {64 * RANKS}",
    "local": f"-np {RANKS} --strategy local",
}

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="embedded", help="embedded, or a prefix of XMC files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--optimizers", default=",".join(RATES), help="of these, separated by commas")
    parser.add_argument("--tune-epochs", type=float, default=3.0)
    parser.add_argument("--synchronous", help="options of plain Horovod and sync, tuned before: '--optimizer adagrad --lr 0.05'")
    parser.add_argument("--local", help="options of local, tuned before")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training of each run in turns")
    parser.add_argument("--seeds", type=int, default=3, help="of the runs in turns; 0: only tune")
    parser.add_argument("--common", default="", help="options of all runs, such as '--eval-samples 5000'")
    parser.add_argument("--methods", help="of the table's rows, separated by commas")
    parser.add_argument("--quotas", action="store_true")
    parser.add_argument("--period-ms", type=int, default=5, help="of CPU quotas (default: 5; containers have 100)")
    parser.add_argument("--equal", action="store_true", help="ranks of one speed")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    given = {"synchronous": options.synchronous, "local": options.local}
    tuned = {kind: tune(options, kind, arguments) for kind, arguments in TUNED.items() if given[kind] is None}
    plain, local = (given[kind] or winner(tuned[kind]) for kind in TUNED)
    rows = methods(plain, local, tuned)
    wanted = options.methods.split(",") if options.methods else list(rows)
    groups = make_cgroups(1000 * options.period_ms) if options.quotas else None
    speeds = "quotas" if options.quotas else "equal" if options.equal else "emulated"
    results: dict[str, list[Result]] = {name: [] for name in wanted}
    for seed in range(options.seeds):
        for name in wanted:
            arguments = [*base(options), *shlex.split(rows[name]), "--time-limit", str(options.seconds), "--eval-rounds", "1"]
            arguments += ["--mega-batch", "3200"] if "--strategy" in rows[name] else []
            arguments += ["-np", str(RANKS)] if options.equal else []
            folder = options.out / f"{Path(options.data).name}-{speeds}-{name.replace(' ', '_')}-{seed}"
            results[name].append(run(folder, [*arguments, "--seed", str(seed), "--name", name], groups))
            print(one_line(name, results[name][-1]), file=sys.stderr, flush=True)
    publish(record(options, speeds, tuned, rows, results), options.record)


def base(options: argparse.Namespace) -> list[str]:
    """Options of every run."""
    data = [] if options.data == "embedded" else ["--data", options.data]
    return ["--checkpoint-interval", "0", *shlex.split(options.common), *data]


def tune(options: argparse.Namespace, kind: str, arguments: str) -> dict[str, dict[float, float]]:
    """Returns the best P@1 of each optimizer and learning rate."""
    cases = [(name, rate) for name in options.optimizers.split(",") for rate in RATES[name]]

    def one(case: tuple[str, float]) -> float:
        name, rate = case
        folder = options.out / f"{Path(options.data).name}-tune-{kind}-{name}-{rate:g}"
        limits = ["--epochs", str(options.tune_epochs), "--no-calibration"]
        result = run(folder, [*base(options), *shlex.split(arguments), "--optimizer", name, "--lr", f"{rate:g}", *limits], None)
        best: float = result["summary"]["best"]["p1"]
        print(f"{kind} {name} {rate:g}: {best:.4f}", file=sys.stderr, flush=True)
        return best

    found: dict[str, dict[float, float]] = {}
    with ThreadPoolExecutor(2 if kind == "synchronous" else 1) as pool:
        for (name, rate), best in zip(cases, pool.map(one, cases), strict=True):
            found.setdefault(name, {})[rate] = best
    return found


def winner(found: dict[str, dict[float, float]], optimizer: str | None = None) -> str:
    """Returns the options of the best optimizer and rate, or of the best rate of one optimizer."""
    cases = [(best, name, rate) for name, rates in found.items() for rate, best in rates.items() if optimizer in (None, name)]
    _, name, rate = max(cases)
    return f"--optimizer {name} --lr {rate:g}"


def methods(plain: str, local: str, tuned: dict[str, dict[str, dict[float, float]]]) -> dict[str, str]:
    """Returns the rows of the table with their options, from the best ones of both updates."""
    rows = {
        "plain Horovod": f"--strategy horovod {plain}",
        "plain Horovod dense": f"--strategy horovod {plain} --input-gradients dense",
    }
    if "rowwise-adagrad" not in plain:
        found = tuned.get("synchronous", {})
        best = winner(found, "rowwise-adagrad") if "rowwise-adagrad" in found else "--optimizer rowwise-adagrad --lr 0.05"
        rows["plain Horovod row-wise"] = f"--strategy horovod {best}"
    return {
        **rows,
        "sync": f"--strategy sync {plain}",
        "local tuned": local,
        "local default": "",
    }


def record(
    options: argparse.Namespace,
    speeds: str,
    tuned: dict[str, dict[str, dict[float, float]]],
    rows: dict[str, str],
    results: dict[str, list[Result]],
) -> list[str]:
    how = {
        "emulated": f"1:1:2:4, emulated, --slowdown {SLOWDOWN}",
        "equal": "equal",
        "quotas": f"by CPU quotas of {', '.join(f'{q:.0%}' for q in QUOTAS)} of a core, period {options.period_ms} ms",
    }[speeds]
    lines = header(f"Baselines: {Path(options.data).name}, 4 ranks, speeds {how}")
    if tuned:
        lines += [
            f"Tuning: best P@1 within {options.tune_epochs:g} epochs, five learning rates an optimizer.",
            "",
            "| update | optimizer | " + " | ".join(f"rate {i + 1}" for i in range(5)) + " |",
            "| --- | --- | " + "--- | " * 5,
        ]
    else:
        lines.append("Nothing was tuned in this run: the options are those of the table.")
    for kind, found in tuned.items():
        for name, rates in found.items():
            lines.append(f"| {kind} | {name} | " + " | ".join(f"{rate:g}: {best:.4f}" for rate, best in rates.items()) + " |")
    lines += [
        "",
        f"In turns, {options.seeds} seeds, {options.seconds:g} s of training each, evaluation excluded. Sooner: plain Horovod's",
        "seconds to its best P@1 of the seed, over the row's. Equal epochs: the row's best P@1 minus plain Horovod's, as far as",
        "both went.",
        "",
        "| method | options | best P@1 | at epoch | sooner | at equal epochs | samples/s | U | waiting | merging |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    plain = results.get("plain Horovod")
    clock = "utilisation_wall" if speeds == "quotas" else "utilisation"
    for name, runs in results.items():
        if not runs:
            continue
        sooner, equal = "", ""
        if plain is not None:
            ratios = []
            for mine, theirs in zip(runs, plain, strict=True):
                reached = seconds_to(mine, theirs["summary"]["best"]["p1"])
                ratios.append(theirs["summary"]["best_train_s"] / reached if reached else 0.0)
            sooner = middle(ratios, ".2f") if all(ratios) else ", ".join(f"{r:.2f}" if r else "never" for r in ratios)
            gains = []
            for mine, theirs in zip(runs, plain, strict=True):
                epochs = min(mine["rounds"][-1]["epoch"], theirs["rounds"][-1]["epoch"])
                gains.append(best_until(mine, epochs) - best_until(theirs, epochs))
            equal = middle(gains, "+.4f")
        s = [r["summary"] for r in runs]
        cells = [
            name,
            f"`{rows[name]}`" if rows[name] else "none",
            middle([x["best"]["p1"] for x in s]),
            middle([x["best_epoch"] for x in s], ".1f"),
            sooner,
            equal,
            f"{statistics.median([x['samples_per_s'] for x in s]):,.0f}",
            middle([x[clock] or 0.0 for x in s], ".2f"),
            middle([x["wait_share"] for x in s], ".1%"),
            middle([x["merge_share"] for x in s], ".1%"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
