"""The record of peers.py: tables of losses, times and ratios."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from peers_methods import package_of, tuned_as
from peers_task import TASKS, Case
from recording import header

PLAIN = "Horovod fp32"
Result = dict[str, Any]


def record(results: list[Result], methods: list[str]) -> list[str]:
    """Returns the record's lines.

    Args:
        results: of all runs.
        methods: in the order of the tables' rows; others come after them.
    """
    methods = list(dict.fromkeys([*methods, *(result["case"]["method"] for result in results)]))
    done = [result for result in results if "curve" in result]
    falls = any(result["case"].get("decay") and result["case"]["stage"] == "run" for result in done)
    then = "falls to 0" if falls else "stays"
    packages = sorted({package for name in methods if (package := package_of(name))})
    lines = [
        *header("Small models beside today's peers", peers_versions(packages)),
        "GPTs over bytes (`examples/gpt.py`) on the standard library's sources, or a ResNet on scikit-learn's digits; AdamW",
        f"(0.9, 0.95), weight decay 0.1, clipping at 1; the rate rises at first (`--warmup`), then {then}. A rank's batch is 8",
        "windows of 64 bytes or 8 images. Links are between two network namespaces of this machine, half of the ranks on each;",
        "loopback: no namespaces. The ranks share its cores. A slower rank sleeps before each pass for a multiple of the CPU",
        "time a sample of the pass before: at 1:2 the slow one takes twice as long as its pass, at 1:1:2:4 the four take 8, 8,",
        "4 and 2 times as long, so that two cores carry all four. Loss: nats a byte over 256 held-out windows (an image, over",
        "450), looked at about every 400 samples of all ranks, after the samples of the section's title (interpolated). Time: of",
        "training without looks, to the loss that plain Horovod has then with the same seed (interpolated). Median (range)",
        "over seeds. Ours in bold.",
    ]
    stages: dict[str, dict[Any, list[Result]]] = {"tune": {}, "run": {}, "equal": {}}
    for result in done:
        case = Case(**result["case"])
        place = (case.model, case.samples, *(() if case.stage == "tune" else (case.link, case.speeds)))
        stages[case.stage].setdefault(place, []).append(result)
    for (model, samples), tuning in stages["tune"].items():
        lines += ["", f"## Learning rates: {TASKS[model].text}, {samples:,} samples", "", *tuning_table(tuning, methods)]
    for (model, samples, link, speeds), runs in stages["run"].items():
        # A curve for other runs, no comparison.
        if {result["case"]["method"] for result in runs} != {PLAIN}:
            title = f"{link}, ranks of speeds {speeds}: {TASKS[model].text}, {samples:,} samples"
            lines += ["", f"## {title}", "", *table(runs, methods)]
    for (model, samples, *_), runs in stages["equal"].items():
        lines += ["", f"## Loss at equal samples: {TASKS[model].text}, {samples:,} samples", "", *equal_table(runs, methods)]
    failed = [result for result in results if "error" in result]
    if failed:
        lines += ["", "## Runs that failed", ""]
        for result in failed:
            case = result["case"]
            model = Case(**case).model
            where = f"{model}, {case['link']}, {case['speeds']}, rate {case['lr']:g}, seed {case['seed']}"
            lines.append(f"* {case['method']}, {where}: {result['error']}")
    return lines


def peers_versions(packages: list[str]) -> str:
    """Returns which peers were to be installed."""
    lines = (Path(__file__).parent / "peers.txt").read_text().splitlines()
    pinned = ", ".join(line for line in lines if line.startswith(tuple(packages)))
    return f"Peers: {pinned}; DDP, PowerSGD and PostLocalSGD are torch's."


def tuning_table(tuning: list[Result], methods: list[str]) -> list[str]:
    """Losses of one seed by method and rate."""
    rates = sorted({result["case"]["lr"] for result in tuning})
    lines = [
        "One host, equal ranks, seed 1: loss at equal samples. The best counts below, at all speeds and over all links. Horovod",
        "fp16 and DDP take that of Horovod fp32, whose updates they make.",
        "",
        f"| method | {' | '.join(f'{rate:g}' for rate in rates)} |",
        f"| --- |{' --- |' * len(rates)}",
    ]
    for name in dict.fromkeys(tuned_as(name) for name in methods):
        found = {result["case"]["lr"]: loss_at_end(result) for result in tuning if result["case"]["method"] == name}
        if found:
            best = min(found, key=lambda rate: found[rate])
            cells = [("" if rate not in found else f"{found[rate]:.4f}") for rate in rates]
            cells[rates.index(best)] = f"**{cells[rates.index(best)]}**"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def table(runs: list[Result], methods: list[str]) -> list[str]:
    """The rows of one link and one set of speeds."""
    plain = {result["case"]["seed"]: result for result in runs if result["case"]["method"] == PLAIN}
    lines = [
        "| method | lr | seeds | samples/s | MB sent a rank | loss | behind Horovod fp32 | s to its loss | sooner than it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in methods:
        found = [result for result in runs if result["case"]["method"] == name]
        if not found:
            continue
        losses, behind, seconds, sooner = [], [], [], []
        for result in found:
            loss = loss_at(result, result["case"]["samples"])
            if loss is not None:
                losses.append(loss)
            base = plain.get(result["case"]["seed"])
            if base is None:
                continue
            # Its looks may be a few samples later than where losses are compared.
            target = loss_at(base, base["case"]["samples"]) or loss_at_end(base)
            if loss is not None:
                behind.append(loss - target)
            reached, plain_s = seconds_to(result, target), seconds_to(base, target)
            if reached is not None and plain_s is not None:
                seconds.append(reached)
                sooner.append(plain_s / reached)
        num_plain = sum(result["case"]["seed"] in plain for result in found)
        never = f"never in {max(result['curve'][-1][0] for result in found):,} samples: {num_plain - len(sooner)} of {num_plain}"
        reach = middle(sooner, ".2f", "x") if len(sooner) == num_plain else never
        sent = max(max(result["sent_mb"]) for result in found)
        cells = [
            f"**{name}**" if name.startswith("ours") else name,
            "/".join(f"{lr:g}" for lr in sorted({result["case"]["lr"] for result in found})),
            f"{len(found)}",
            middle([result["curve"][-1][0] / result["curve"][-1][1] for result in found], ".0f"),
            f"{sent:.0f}" if sent else "",
            middle(losses, ".4f"),
            middle(behind, "+.4f"),
            middle(seconds, ".1f"),
            reach if num_plain else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    measured = {result["measured_samples"] for result in plain.values() if "measured_samples" in result}
    if measured:
        lines += ["", f"{PLAIN} ran for {min(measured):,} samples here: its speed. Its losses are those of one host, same seed."]
    return lines


def equal_table(runs: list[Result], methods: list[str]) -> list[str]:
    """Losses of one model at the end, and the mean of their distances to plain Horovod's of the same seed."""
    lines = [
        "One host, equal ranks; the learning rate falls to 0 in a straight line, as a training's does, which takes away much",
        "of a run's noise. Loss: of the last model, over 2,048 held-out windows (450 images). Of each method the rate whose",
        "mean is best. Behind: mean of the distances to Horovod fp32 with the same seed, and its standard error.",
        "",
        "| method | lr | seeds | loss | behind Horovod fp32 | by seed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    best = {name: best_by_seed(runs, name) for name in methods}
    plain = best.get(PLAIN, (0.0, {}))[1]
    for name, (rate, losses) in best.items():
        if not losses:
            continue
        behind = [loss - plain[seed] for seed, loss in sorted(losses.items()) if seed in plain and name != PLAIN]
        cells = [
            f"**{name}**" if name.startswith("ours") else name,
            f"{rate:g}",
            f"{len(losses)}",
            f"{statistics.mean(losses.values()):.4f}",
            with_error(behind),
            ", ".join(f"{value:+.4f}" for value in behind),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def best_by_seed(runs: list[Result], method: str) -> tuple[float, dict[int, float]]:
    """Returns the learning rate with the lowest mean loss, of those with most seeds, and the last losses by seed."""
    found: dict[float, dict[int, float]] = {}
    for result in runs:
        case = Case(**result["case"])
        if case.method == method:
            found.setdefault(case.lr, {})[case.seed] = float(result.get("final_loss", loss_at_end(result)))
    if not found:
        return 0.0, {}
    return min(found.items(), key=lambda item: (-len(item[1]), statistics.mean(item[1].values())))


def with_error(values: list[float]) -> str:
    """Mean, and its standard error."""
    if not values:
        return ""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.4f}{error}"


def middle(values: list[float], form: str, unit: str = "") -> str:
    """Median and range."""
    if not values:
        return ""
    text = f"{statistics.median(values):{form}}{unit}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def loss_at_end(result: Result) -> float:
    return float(result["curve"][-1][2])


def loss_at(result: Result, samples: int) -> float | None:
    """Returns the loss after so many samples, between the looks before and after; None: the run was shorter."""
    # Two looks at the same number of samples: the later one has what was on the way.
    points = {n: loss for n, _, loss in result["curve"]}
    before = max((n for n in points if n <= samples), default=None)
    after = min((n for n in points if n >= samples), default=None)
    if before is None or after is None:
        return None
    part = 0.0 if after == before else (samples - before) / (after - before)
    return float((1 - part) * points[before] + part * points[after])


def seconds_to(result: Result, loss: float) -> float | None:
    """Returns the training seconds to a loss, between the looks before and after; None: never."""
    earlier: tuple[float, float] | None = None
    for _, seconds, seen in result["curve"]:
        if seen <= loss:
            if earlier is None or earlier[1] <= seen:
                return float(seconds)
            part = (earlier[1] - loss) / (earlier[1] - seen)
            return float(earlier[0] + part * (seconds - earlier[0]))
        earlier = (seconds, seen)
    return None
