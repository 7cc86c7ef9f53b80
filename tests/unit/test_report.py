"""Tables and pictures from synthetic run directories."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.report.plots import plot_runs
from hvd_adaptive.report.runs import read_runs
from hvd_adaptive.report.table import summary_table


def write_run(
    path: Path,
    *,
    strategy: str,
    label: str | None = None,
    best: float = 0.67,
    rate: float = 0.05,
    num_rounds: int = 40,
    eval_every: int = 2,
    slowdown: Any = (4, 4, 2, 1),
    with_summary: bool = True,
) -> Path:
    path.mkdir()
    speeds = [1 / s for s in slowdown or (1, 1, 1, 1)]
    records = []
    for number in range(num_rounds):
        seconds = 1.5 * (number + 1)
        p1 = best * (1 - math.exp(-rate * seconds)) + 0.002 * math.sin(number)
        scores = {f"{name}{k}": p1 / k**0.4 for name in ("p", "psp") for k in (1, 3, 5)}
        target = [64 * 4 * speed / sum(speeds) for speed in speeds]
        progress = 1 - math.exp(-number / 6)
        sizes = [64 + (t - 64) * progress for t in target] if strategy == "local" else [64.0] * 4
        per_rank = {
            name: [1.0] * 4
            for name in ("num_updates", "samples", "lr", "weight", "busy_s", "wait_s", "claim_s", "merge_s")
        }
        records.append(
            {
                "round": number,
                "epoch": 0.1 * (number + 1),
                "train_s": seconds,
                "wall_s": 1.1 * seconds,
                "samples": 6400 * (number + 1),
                "loss": 3.0,
                "eval": scores if number % eval_every == eval_every - 1 else None,
                "ranks": {"batch_size": sizes, **per_rank},
            }
        )
    (path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "config.json").write_text(json.dumps({"strategy": strategy, "name": label}))
    summary = {
        "strategy": strategy,
        "label": label,
        "train_s": records[-1]["train_s"],
        "final": records[-1]["eval"],
        "utilisation": 0.913 if strategy == "local" else 0.497,
        "wait_share": 0.021 if strategy == "local" else 0.473,
        "world_size": 4,
        "slowdown": list(slowdown) if slowdown else None,
    }
    if with_summary:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


@pytest.fixture
def run_dirs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "a", strategy="horovod", label="plain Horovod"),
        write_run(tmp_path / "b", strategy="local", label="Adaptive SGD", best=0.69, rate=0.13),
    ]


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table_compares_to_the_first_baseline(run_dirs: list[Path]) -> None:
    table = summary_table(run_dirs)
    header, _, baseline, adaptive = cells(table)
    target = read_runs(run_dirs)[0].best("p1")
    assert header[:3] == ["run", "strategy", "best P@1"]
    assert baseline[:3] == ["plain Horovod", "horovod", f"{target:.4f}"]
    assert baseline[6:] == ["1.00x", "0.497", "47.3%"]
    assert adaptive[7:] == ["0.913", "2.1%"]
    assert float(adaptive[6][:-1]) == pytest.approx(float(baseline[5]) / float(adaptive[5]), abs=0.006)
    assert f"Target: P@1 {target:.4f}, the best of plain Horovod." in table
    assert "Emulated slowdowns of the ranks: 4x, 4x, 2x, 1x." in table
    assert len({len(line) for line in table.splitlines() if line.startswith("|")}) == 1


def test_table_with_a_given_target_and_one_that_nobody_reaches(run_dirs: list[Path]) -> None:
    table = summary_table(run_dirs, target_p1=0.5)
    assert "Target: P@1 0.5000. " in table
    assert float(cells(table)[3][6][:-1]) > 2
    assert [row[5:7] for row in cells(summary_table(run_dirs, target_p1=0.99))[2:]] == [["-", "-"]] * 2


def test_table_without_a_baseline_says_so(run_dirs: list[Path]) -> None:
    table = summary_table(run_dirs[1:])
    assert "No target" in table
    assert cells(table)[2][5:7] == ["-", "-"]


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", with_summary=False, num_rounds=6)
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 6, "train_s": 9.')
    (run,) = read_runs([path])
    assert len(run.rounds) == 6
    assert run.label == run.strategy == "local"
    assert cells(summary_table([path]))[2][7:] == ["-", "-"]
    plot_runs([path], tmp_path / "picture.png")


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3)
    lines = (path / "rounds.jsonl").read_text().splitlines()
    lines[1] = lines[1][:40]
    (path / "rounds.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"rounds\.jsonl, line 2: not valid JSON"):
        read_runs([path])


def test_missing_evaluations_and_files_are_errors(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3, eval_every=10, with_summary=False)
    with pytest.raises(ValueError, match=r"a: the run has no evaluation yet"):
        summary_table([path])
    with pytest.raises(ValueError, match=r"config\.json is missing: is .* a run directory"):
        plot_runs([tmp_path], tmp_path / "picture.png")
    with pytest.raises(ValueError, match="at least one run directory"):
        summary_table([])


def test_an_evaluation_at_the_end_alone_counts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3, eval_every=10)
    summary = json.loads((path / "summary.json").read_text())
    summary["final"] = {"p1": 0.4, "p3": 0.3, "p5": 0.2}
    (path / "summary.json").write_text(json.dumps(summary))
    assert cells(summary_table([path]))[2][2:5] == ["0.4000", "0.3000", "0.2000"]


def test_equal_labels_are_told_apart_and_schedules_are_shown(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, strategy="local", num_rounds=4) for name in ("a", "b")]
    summary = json.loads((paths[1] / "summary.json").read_text())
    (paths[1] / "summary.json").write_text(json.dumps({**summary, "slowdown": "0:1,2;30:2,1"}))
    table = summary_table(paths)
    assert [row[0] for row in cells(table)[2:]] == ["local (a)", "local (b)"]
    assert "Emulated slowdowns in local (b): schedule 0:1,2;30:2,1." in table


@pytest.mark.parametrize("count", [1, 2, 3])
def test_picture_is_a_png_of_readme_size(run_dirs: list[Path], tmp_path: Path, count: int) -> None:
    write_run(tmp_path / "c", strategy="local", slowdown=None, label="equal speeds")
    path = tmp_path / "picture.png"
    plot_runs([*run_dirs, tmp_path / "c"][:count], path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert 900 <= width <= 1700
    assert 500 <= height <= 900


def test_picture_of_a_run_whose_number_of_ranks_changed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", slowdown=None, label="resumed")
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        sizes = record["ranks"]["batch_size"]
        record["ranks"]["batch_size"] = sizes[:1] if number < 5 else sizes if number < 10 else sizes[:3]
    (path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plot_runs([path], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
