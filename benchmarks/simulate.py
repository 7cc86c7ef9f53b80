"""Predicts runs from `hvd-adaptive calibrate` alone, then makes them, and prints predicted over measured.

python benchmarks/simulate.py --out DIR [--ranks 2] [--data PREFIX] [--record FILE]

The calibrations are made first, one with sparse and one with dense input gradients, at one slowdown and mega-batch; no run that
is predicted has both. Every prediction is made by the command. Methods take turns over `--repeats`, each of which begins with new
calibrations, as a machine's speed changes within minutes. Runs and calibrations that are in DIR already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recording import header, publish

# Slowdowns and mega-batch of the calibrations, by the number of ranks. Four ranks on two cores: slow enough that they rarely
# want the cores at once.
CALIBRATED = {2: ("3,1", 6400), 4: ("8,8,4,2", 6400)}
# Slowdowns of the runs: as calibrated, and others.
SLOWDOWNS = {2: ("3,1", "1,2"), 4: ("8,8,4,2", "4,8,16,8")}
# Name in `simulate`, options of `train`, whether the slowdown is another, mega-batch.
Case = tuple[str, str, bool, int]
CASES: tuple[Case, ...] = (
    ("local", "", False, 12800),
    ("local", "", False, 3200),
    ("local", "", True, 6400),
    ("local-sizes", "--batch-size-rule proportional", False, 12800),
    ("local-sgd", "--dispatch equal --merge-weights uniform", False, 12800),
    ("local-sgd", "--dispatch equal --merge-weights uniform", True, 6400),
    ("sync", "--strategy sync --input-gradients dense", False, 12800),
    ("static", "--strategy sync --batch-size-rule static --input-gradients dense", True, 6400),
    ("horovod", "--strategy horovod --input-gradients dense", False, 12800),
    ("horovod", "--strategy horovod --input-gradients dense", True, 6400),
)
COMMON = "--eval-rounds 0 --eval-samples 100 --checkpoint-interval 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", help="a prefix of XMC files (default: the embedded set)")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, choices=list(CALIBRATED), default=2)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies all slowdowns: on a busy machine, ranks that mostly sleep"
    )
    parser.add_argument("--record", type=Path)
    parser.add_argument("--cases", help="only these rows of the table, as in 0,3,6 (default: all)")
    options = parser.parse_args()
    chosen = [CASES[int(n)] for n in options.cases.split(",")] if options.cases else list(CASES)
    options.out.mkdir(parents=True, exist_ok=True)
    data = ["--data", options.data] if options.data else []
    results: list[list[dict[str, Any]]] = [[] for _ in chosen]
    for repeat in range(options.repeats):
        folder = options.out / str(repeat)
        folder.mkdir(exist_ok=True)
        for number, case in enumerate(chosen):
            name, arguments, _, mega_batch = case
            calibration = calibrate(folder, data, options, dense="dense" in arguments)
            own = ["--slowdown", slowdown_of(case, options), "--mega-batch", str(mega_batch), "--seed", str(repeat)]
            train_options = ["-np", str(options.ranks), *shlex.split(arguments), *own, *data, "--epochs", str(options.epochs)]
            measured = train(folder / f"{CASES.index(case)}-{name}", train_options)
            simulate_options = ["--ranks", str(options.ranks), *own, "--strategies", name, "--rounds", str(measured["rounds"])]
            results[number].append({"measured": measured, "predicted": predict(calibration, simulate_options)})
            print(line(case, results[number][-1:], options), file=sys.stderr, flush=True)
    publish(record(chosen, results, options), options.record)


def call(arguments: list[str]) -> str:
    command = [sys.executable, "-m", "hvd_adaptive", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def scaled(slowdown: str, scale: float) -> str:
    return ",".join(f"{scale * float(factor):g}" for factor in slowdown.split(","))


def slowdown_of(case: Case, options: argparse.Namespace) -> str:
    return scaled(SLOWDOWNS[options.ranks][case[2]], options.scale)


def calibrate(folder: Path, data: list[str], options: argparse.Namespace, *, dense: bool) -> Path:
    """Calibrates, unless it was done, and returns the file."""
    file = folder / ("dense.toml" if dense else "sparse.toml")
    if not file.exists():
        slowdown, mega_batch = CALIBRATED[options.ranks]
        own = ["--slowdown", scaled(slowdown, options.scale), "--mega-batch", str(mega_batch), *data]
        own += ["--input-gradients", "dense"] if dense else []
        call(["calibrate", "-np", str(options.ranks), *own, "--out", str(file)])
    return file


def train(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Trains, unless it is there, and returns what the run adds up to."""
    if not (folder / "summary.json").exists():
        call(["train", *shlex.split(COMMON), *arguments, "--out", str(folder)])
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    waiting = summary["wait_share"]
    return {
        "samples_per_s": summary["samples_per_s"],
        "rounds_per_s": summary["rounds"] / summary["train_s"],
        "waiting": waiting,
        "communication": summary["merge_share"] + summary["control_share"] + summary["claim_share"],
        "rounds": summary["rounds"],
        "strategy": summary["strategy"],
    }


def predict(file: Path, arguments: list[str]) -> dict[str, Any]:
    command = ["simulate", "--json", "--calibration", str(file), "--settle", "0", "--overlap", "0", *arguments]
    (found,) = json.loads(call(command))
    waiting, communication = found["wait_share"], found["communication_share"]
    if not found["strategy"].startswith("local"):
        # A real synchronous step waits and exchanges in one call.
        waiting, communication = waiting + communication, 0.0
    return {
        "samples_per_s": found["samples_per_s"],
        "rounds_per_s": found["rounds_per_s"],
        "waiting": waiting,
        "communication": communication,
    }


def middle(pairs: list[dict[str, Any]], side: str, name: str) -> float:
    return statistics.median(pair[side][name] for pair in pairs)


def line(case: Case, pairs: list[dict[str, Any]], options: argparse.Namespace) -> str:
    cells = [case[0], slowdown_of(case, options), f"{case[3]:,}"]
    for quantity in ("samples_per_s", "rounds_per_s"):
        predicted, measured = (middle(pairs, side, quantity) for side in ("predicted", "measured"))
        ratios = [pair["predicted"][quantity] / pair["measured"][quantity] for pair in pairs]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        cells.append(f"{predicted:,.5g} / {measured:,.5g} = {statistics.median(ratios):.2f} {spread}")
    for quantity in ("waiting", "communication"):
        predicted, measured = (middle(pairs, side, quantity) for side in ("predicted", "measured"))
        cells.append(f"{predicted:.3f} / {measured:.3f}")
    return f"| {' | '.join(cells)} |"


def record(chosen: list[Case], results: list[list[dict[str, Any]]], options: argparse.Namespace) -> list[str]:
    slowdown, mega_batch = CALIBRATED[options.ranks]
    data = Path(options.data).name if options.data else "embedded"
    lines = [
        *header(f"Predicted from a calibration, and measured: {data}, {options.ranks} ranks"),
        f"Calibrated at --slowdown {scaled(slowdown, options.scale)}, --mega-batch {mega_batch}; {options.repeats} runs of "
        f"{options.epochs:g} epochs each, medians and the range of the ratios. Waiting and communication are parts of the time; "
        "for sync, static and horovod waiting contains the exchange.",
        "",
        "| strategy | slowdown | mega-batch | samples/s, predicted / measured | rounds/s | waiting | communication |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(line(case, pairs, options) for case, pairs in zip(chosen, results, strict=True)),
        "",
    ]
    ratios = [
        statistics.median(pair["predicted"]["samples_per_s"] / pair["measured"]["samples_per_s"] for pair in pairs)
        for pairs in results
    ]
    within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
    lines.append(f"{within} of {len(ratios)} within 10% in samples/s.")
    return lines


if __name__ == "__main__":
    main()
