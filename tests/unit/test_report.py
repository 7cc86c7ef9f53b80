"""Tables, pictures and pages from synthetic run directories."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from run_files import write_run
from small_disk import small_disk

from hvd_adaptive.cli.arguments import write_output
from hvd_adaptive.cli.main import main
from hvd_adaptive.report import analysis
from hvd_adaptive.report.charts import comparison_charts, run_charts
from hvd_adaptive.report.figures import draw_overview, write_pngs
from hvd_adaptive.report.page import render_page
from hvd_adaptive.report.runs import read_runs
from hvd_adaptive.report.style import new_figure
from hvd_adaptive.report.table import summary_table


def write_two_runs(folder: Path) -> list[Path]:
    return [
        write_run(folder / "a", strategy="horovod", label="plain Horovod"),
        write_run(folder / "b", strategy="local", label="Adaptive SGD", best=0.69, rate=0.13),
    ]


@pytest.fixture
def run_dirs(tmp_path: Path) -> list[Path]:
    return write_two_runs(tmp_path)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and the page and the pictures that the command makes of them."""
    folder = tmp_path_factory.mktemp("reported")
    names = [str(path) for path in write_two_runs(folder)]
    assert main(["report", *names, "--out", str(folder / "r.html"), "--png", str(folder / "new" / "png")]) == 0
    return folder


def table_of(paths: list[Path], **options: float) -> str:
    return summary_table(read_runs(paths), **options)


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table_compares_to_the_first_baseline(run_dirs: list[Path]) -> None:
    table = table_of(run_dirs)
    header, _, baseline, adaptive = cells(table)
    target = read_runs(run_dirs)[0].best("p1")
    assert header[:4] == ["run", "strategy", "best P@1", "at epoch"]
    assert float(baseline[3]) == pytest.approx(max(e.epoch for e in read_runs(run_dirs)[0].evaluations), abs=0.06)
    assert baseline[:3] == ["plain Horovod", "horovod", f"{target:.4f}"]
    assert baseline[7:] == ["1.00x", "0.497", "47.3%"]
    assert adaptive[8:] == ["0.913", "2.1%"]
    assert float(adaptive[7][:-1]) == pytest.approx(float(baseline[6]) / float(adaptive[6]), abs=0.006)
    assert f"Target: P@1 {target:.4f}, the best of plain Horovod." in table
    assert "Emulated slowdowns of the ranks: 4x, 4x, 2x, 1x." in table
    assert len({len(line) for line in table.splitlines() if line.startswith("|")}) == 1


def test_table_with_a_given_target_and_one_that_nobody_reaches(run_dirs: list[Path]) -> None:
    table = table_of(run_dirs, target_p1=0.5)
    assert "Target: P@1 0.5000. " in table
    assert float(cells(table)[3][7][:-1]) > 2
    assert [row[6:8] for row in cells(table_of(run_dirs, target_p1=0.99))[2:]] == [["-", "-"]] * 2


def test_runs_that_were_scored_on_other_samples_are_not_compared(run_dirs: list[Path]) -> None:
    for path, scored in zip(run_dirs, ("10 samples of test set a", "9 samples of test set b"), strict=False):
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps(summary | {"scored": scored}))
    table = table_of(run_dirs)
    assert [row[7] for row in cells(table)[2:]] == ["1.00x", "-"] and cells(table)[3][6] == "-"
    assert "Adaptive SGD was scored on 9 samples of test set b, plain Horovod on 10 samples of test set a" in table
    given = cells(table_of(run_dirs, target_p1=0.4))[3]
    assert given[6] != "-" and given[7] == "-"
    assert "sooner" not in render_page(read_runs(run_dirs))


def test_table_without_a_baseline_says_so(run_dirs: list[Path]) -> None:
    table = table_of(run_dirs[1:])
    assert "No target" in table
    assert cells(table)[2][6:8] == ["-", "-"]


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", with_summary=False, num_rounds=6)
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 6, "train_s": 9.')
    (run,) = read_runs([path])
    assert len(run.rounds) == 6
    assert run.label == run.strategy == "local"
    assert cells(table_of([path]))[2][8:] == ["-", "-"]
    draw_overview(read_runs([path]), tmp_path / "picture.png")


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3)
    lines = (path / "rounds.jsonl").read_text().splitlines()
    lines[1] = lines[1][:40]
    (path / "rounds.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"rounds\.jsonl, line 2: not valid JSON"):
        read_runs([path])


def test_missing_evaluations_and_files_are_errors(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3, eval_every=10, with_summary=False)
    scored = write_run(tmp_path / "b", strategy="local", num_rounds=3)
    assert cells(table_of([path, scored]))[2][2:6] == ["-", "-", "-", "-"]
    assert cells(table_of([path]))[0][2:6] == ["epochs", "last loss", "seconds", "samples/s"]
    (path / "rounds.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"a: no round of the run is finished yet; let it run longer"):
        table_of([path])
    with pytest.raises(ValueError, match=r"xxx cannot be read: .*File name too long"):
        read_runs([tmp_path / ("x" * 300)])
    with pytest.raises(ValueError, match=r"absent is not there: name a run directory"):
        read_runs([tmp_path / "absent"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is missing: is .* a run directory"):
        read_runs([tmp_path / "empty"])
    with pytest.raises(ValueError, match="at least one run directory"):
        table_of([])


def test_a_folder_stands_for_the_runs_in_it_and_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    """As of ``report runs/*`` after a demo, whose two runs are in a folder of their own."""
    (tmp_path / "demo").mkdir()
    for name in ("b", "demo/x", "demo/y"):
        write_run(tmp_path / name, strategy="local", num_rounds=3)
    (tmp_path / "empty").mkdir()
    told: list[str] = []
    runs = read_runs([tmp_path / "empty", tmp_path / "b", tmp_path / "demo"], leave_out=told.append)
    assert [run.path.name for run in runs] == ["b", "x", "y"]
    assert len(told) == 1 and "empty/config.json is missing" in told[0]
    with pytest.raises(ValueError, match="is missing"):
        read_runs([tmp_path / "empty"], leave_out=told.append)


def test_an_evaluation_at_the_end_alone_counts(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3, eval_every=10)
    summary = json.loads((path / "summary.json").read_text())
    summary["final"] = {"p1": 0.4, "p3": 0.3, "p5": 0.2}
    (path / "summary.json").write_text(json.dumps(summary))
    assert cells(table_of([path]))[2][2:6:2] == ["0.4000", "0.3000"]


def test_a_last_evaluation_of_its_own_counts_beside_the_last_round_s(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=4)
    rounds = [evaluation.scores["p1"] for evaluation in read_runs([path])[0].evaluations]
    assert len(rounds) == 2
    # Merges beside steps have moved the model since the last round's.
    summary = json.loads((path / "summary.json").read_text())
    summary["final"] = {"p1": 0.8, "p3": 0.7, "p5": 0.6}
    (path / "summary.json").write_text(json.dumps(summary))
    (run,) = read_runs([path])
    assert [evaluation.scores["p1"] for evaluation in run.evaluations] == [*rounds, 0.8]
    assert run.best("p3") == 0.7 and run.seconds_to(0.75) == run.train_s
    # The best model was chosen by scores of fewer samples, with which this one's is not compared.
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eval_samples": 50}))
    (run,) = read_runs([path])
    assert [evaluation.scores["p1"] for evaluation in run.evaluations] == [*rounds, 0.8]
    assert run.best("p1") == max(rounds) and run.seconds_to(0.75) is None
    note = f"{run.label} was scored on 50 test samples, and its last model on all: P@1 0.8000."
    assert note in table_of([path])


def test_equal_labels_are_told_apart_and_schedules_are_shown(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, strategy="local", num_rounds=4) for name in ("a", "b")]
    summary = json.loads((paths[1] / "summary.json").read_text())
    (paths[1] / "summary.json").write_text(json.dumps({**summary, "slowdown": "0:1,2;30:2,1"}))
    table = table_of(paths)
    assert [row[0] for row in cells(table)[2:]] == ["local (a)", "local (b)"]
    assert "Emulated slowdowns in local (b): schedule 0:1,2;30:2,1." in table


@pytest.mark.parametrize("count", [1, 2, 3])
def test_picture_is_a_png_of_readme_size(run_dirs: list[Path], tmp_path: Path, count: int) -> None:
    write_run(tmp_path / "c", strategy="local", slowdown=None, label="equal speeds")
    path = tmp_path / "picture.png"
    draw_overview(read_runs([*run_dirs, tmp_path / "c"][:count]), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert 900 <= width <= 1700
    assert 500 <= height <= 900


def test_picture_of_a_run_whose_number_of_ranks_changed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", slowdown=None, label="resumed")
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        count = 1 if number < 5 else 4 if number < 10 else 3
        record["ranks"] = {name: values[:count] for name, values in record["ranks"].items()}
    (path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    draw_overview(read_runs([path]), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    page = render_page(read_runs([path]))
    assert "From round 5 on there were 4 ranks instead of 1." in page
    assert "From round 10 on there were 3 ranks instead of 4." in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_s": None}, "line 2: train_s must be a finite number, got None"),
        ({"ranks": {"lr": 1.0}}, "line 2: ranks must hold one list of numbers a statistic"),
        ({"ranks": {"lr": [1.0], "busy_s": [1.0, 2.0]}}, "line 2: the lists of ranks must be equally long"),
        ({"eval": {"p3": 0.1}}, "line 2: eval must hold numbers by metric, p1 among them"),
        ([], "line 2: must hold a JSON object, got list"),
    ],
)
def test_a_record_of_another_shape_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3)
    lines = (path / "rounds.jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change} if change else change)
    (path / "rounds.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read_runs([path])


HOSTILE = "<script>alert(1)</script>\"'&$x_{y}$\x00\ud800#0072b2 url(#a)"


def test_text_of_users_is_escaped_wherever_it_stands(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a<b>&", strategy="local", label=HOSTILE, slowdown=None)
    summary = json.loads((path / "summary.json").read_text())
    hostile = {"hosts": [HOSTILE] * 4, "inexact": [HOSTILE], "utilisation_error": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    (path / "summary.json").write_text(json.dumps({**summary, **hostile, "strategy": HOSTILE, "slowdown": HOSTILE}))
    (path / "config.json").write_text(json.dumps({HOSTILE: HOSTILE, "nested": {"a": HOSTILE}}))
    page = render_page(read_runs([path]))
    page.encode("utf-8")
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 9
    parser = Elements()
    parser.feed(page)
    assert parser.names <= ELEMENTS
    assert not {name for name in parser.attributes if name.startswith("on")}
    assert not re.findall(r'(?:src|href|action)="(?!#)[^"]*"', page)
    assert not re.findall(r"url\((?!#)|@import", page.replace(HOSTILE, ""))
    files = write_pngs(read_runs([path]), tmp_path / "png")
    assert all(file.parent == tmp_path / "png" and file.stat().st_size > 5000 for file in files)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "nav", "section", "h1", "h2", "h3", "p", "a"),
    *("span", "ul", "li", "strong", "div", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "details"),
    *("summary", "dl", "dt", "dd", "svg", "defs", "g", "path", "use", "text", "clippath", "rect"),
}


def test_page_holds_every_chart_with_its_words(reported: Path) -> None:
    runs = read_runs([reported / "a", reported / "b"])
    charts = [*comparison_charts(runs), *(chart for run in runs for chart in run_charts(run))]
    page = (reported / "r.html").read_text()
    assert len(charts) >= 10
    for chart in charts:
        assert escape(chart.title) in page
        assert f'aria-label="{chart.alt[:40]}' in page
    assert page.count('role="img"') == len(charts)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', page)) <= set(ids)
    for text in ("sooner: Adaptive SGD reached P@1", "Stragglers", "0.913", "batch size 64"):
        assert text in page


def test_samples_a_second_and_bytes_are_these(reported: Path) -> None:
    page = (reported / "r.html").read_text()
    # 256,000 samples in 60 s; 40 rounds of 10 and of 2.5 MB.
    assert "<td>47.3%</td><td>4,267</td><td>400 MB</td></tr>" in page
    assert "<td>2.1%</td><td>4,267</td><td>100 MB</td></tr>" in page
    (chart,) = [one for one in comparison_charts(read_runs([reported / "a", reported / "b"])) if one.name == "bytes"]
    assert "plain Horovod 400 MB; Adaptive SGD 100 MB." in chart.alt
    axes = new_figure(6, 3).add_subplot()
    chart.draw(axes)
    assert [list(line.get_ydata())[::39] for line in axes.lines[:2]] == [[10.0, 400.0], [2.5, 100.0]]


def test_runs_that_name_no_bytes_have_no_chart_of_them(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3)
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    (path / "rounds.jsonl").write_text(
        "".join(json.dumps({name: one[name] for name in one if name != "payload_bytes"}) + "\n" for one in rounds)
    )
    assert "bytes" not in [chart.name for chart in comparison_charts(read_runs([path]))]


def test_a_run_that_still_goes_on_and_one_without_evaluation_have_a_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=1, eval_every=5, with_summary=False)
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 1, "tra')
    page = render_page(read_runs([path]))
    assert "Still going, or interrupted: 1 round, 6,400 samples" in page
    assert "Accuracy over" not in page
    assert "Where each rank&#39;s time went" in page


def test_the_predicted_speed_stands_beside_the_real_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", label="mine", num_rounds=3)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**summary, "samples_per_s": 8000.0, "predicted_samples_per_s": 10000.0}))
    runs = read_runs([path])
    assert "mine made 8,000 samples/s; calibrate predicted 10,000." in summary_table(runs)
    page = render_page(runs)
    assert "0.80" in page and "of the speed that calibrate predicted for the run: 8,000 samples/s, predicted 10,000" in page
    (path / "summary.json").write_text(json.dumps({**summary, "predicted_samples_per_s": "fast"}))
    with pytest.raises(ValueError, match="predicted_samples_per_s must be a number, got 'fast'"):
        read_runs([path])


@pytest.mark.slow
def test_many_ranks_and_long_runs_keep_the_page_small(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", slowdown=None, num_rounds=1200)
    lines = []
    for line in (path / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["ranks"] = {name: values * 16 for name, values in record["ranks"].items()}
        lines.append(json.dumps(record))
    (path / "rounds.jsonl").write_text("\n".join(lines))
    page = render_page(read_runs([path]))
    assert "ranks 62-63" in page
    assert "The slowest of 64 ranks. Came last" in page
    assert page.count('<tr><th scope="row">') < 150
    assert len(page) < 1_500_000


def test_idle_time_at_equal_shares(tmp_path: Path) -> None:
    """Ranks at 10, 30 and 20 samples/s compute 60 a second; equal shares take them 2, 2/3 and 1 s: 4/3 + 1 s of waiting."""
    path = write_run(tmp_path / "a", strategy="local", num_rounds=5, slowdown=None)
    lines = []
    for number in range(5):
        record = json.loads((path / "rounds.jsonl").read_text().splitlines()[number])
        waits = {"wait_s": [0.1, 0.0, 0.05], "claim_s": [0.0, 0.1, 0.05], "merge_s": [0.2, 0.2, 0.2]}
        stats = {"samples": [10.0, 30.0, 20.0], "busy_s": [1.0, 1.0, 1.0], **waits}
        lines.append(json.dumps({**record, "train_s": 1.5 * (number + 1), "ranks": stats}))
    (path / "rounds.jsonl").write_text("\n".join(lines))
    (run,) = read_runs([path])
    idle = analysis.idle(run)
    assert idle is not None
    assert idle.equal_s == pytest.approx(5 * 7 / 3)
    assert (idle.actual_s, idle.reclaimed_s) == pytest.approx((1.5, 5 * 7 / 3 - 1.5))
    assert analysis.equal_shares_ceiling(run) == pytest.approx(0.5)
    parts = analysis.rank_seconds(run)
    assert sum(values for values in parts.values()) == pytest.approx([7.5, 7.5, 7.5])
    assert parts["other"] == pytest.approx([1.0, 1.0, 1.0])
    slow, fast, _ = analysis.rank_reports(run)
    assert (slow.relative_speed, slow.last_share, fast.last_share) == (pytest.approx(1 / 3), 0.0, 1.0)
    # Of few seconds the tenths are shown; where none were gained, nothing is said.
    (path / "rounds.jsonl").write_text(lines[0])
    page = render_page(read_runs([path]))
    assert "<strong>2.0 s</strong>" in page and "cost 2.3 rank-seconds at the speeds that the ranks showed; 0.3 were idle" in page
    assert "a): 2.3 rank-seconds at equal shares, 0.3 as it was" in comparison_charts(read_runs([path, path]))[-2].alt
    (path / "rounds.jsonl").write_text(lines[0].replace("0.1, 0.0, 0.05]", "1.1, 1.0, 0.06]"))
    assert "rank-seconds at" not in render_page(read_runs([path]))


def test_ticks_over_rounds_are_whole_numbers_and_a_single_rank_sends_nothing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=1, slowdown=None)
    record = json.loads((path / "rounds.jsonl").read_text())
    (path / "rounds.jsonl").write_text(json.dumps({**record, "round": 3, "utilisation": 0.9}))
    runs = read_runs([path])
    over_rounds = [chart for chart in run_charts(runs[0]) if chart.name in ("speed", "utilisation")]
    assert len(over_rounds) == 2
    for chart in over_rounds:
        axes = new_figure(6, 3).add_subplot()
        chart.draw(axes)
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [3]
    assert "<td>2 MB</td>" in render_page(runs) and "bytes" in [chart.name for chart in comparison_charts(runs)]
    alone = {name: values[:1] for name, values in record["ranks"].items()}
    (path / "rounds.jsonl").write_text(json.dumps({**record, "ranks": alone}))
    runs = read_runs([path])
    assert " MB</td>" not in render_page(runs) and "bytes" not in [chart.name for chart in comparison_charts(runs)]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "island": "node"}))
    rest = [0] * (len(next(iter(record["ranks"].values()))) - 2)
    for payload, sends in (([9, 0, *rest], False), ([9, 9, *rest], True)):
        (path / "rounds.jsonl").write_text(json.dumps({**record, "ranks": {**record["ranks"], "payload_bytes": payload}}))
        assert (" MB</td>" in render_page(read_runs([path]))) == sends


def test_a_rank_without_samples_in_the_last_round_leaves_the_others_their_numbers(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=3, slowdown=None)
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record["ranks"] = {"samples": [100.0, 200.0, 300.0], "busy_s": [1.0] * 3}
    records[-1]["ranks"] = {"samples": [100.0, 0.0, 300.0], "busy_s": [1.0, 0.0, 1.0]}
    (path / "rounds.jsonl").write_text("\n".join(map(json.dumps, records)))
    (chart,) = [one for one in run_charts(read_runs([path])[0]) if one.name == "speed"]
    assert chart.alt.endswith("In the last round: rank 0 100, rank 2 300.")


def test_rounds_without_a_record_are_not_the_next_ones_time(tmp_path: Path) -> None:
    # Resumed where the earlier rounds.jsonl was gone; later three lines were lost.
    path = write_run(tmp_path / "a", strategy="local", num_rounds=40, slowdown=None)
    lines = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (path / "rounds.jsonl").write_text("".join(lines[20:30] + lines[33:]))
    (run,) = read_runs([path])
    records = [{**record, "ranks": {**record["ranks"], "busy_s": [0.5, 1.0], "wait_s": [0.7, 0.2]}} for record in run.rounds]
    for record in records:
        record["ranks"] = {name: record["ranks"][name][:2] for name in ("busy_s", "wait_s")}
    seconds = analysis.round_seconds(dataclasses.replace(run, rounds=records))
    assert seconds == pytest.approx([1.2, *[1.5] * 9, 1.2, *[1.5] * 6])
    assert analysis.round_seconds(dataclasses.replace(run, rounds=run.rounds[:1]))[0] == 4.0


def test_a_slow_round_is_found(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", strategy="local", num_rounds=30, slowdown=None)
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record["ranks"]["samples"] = [100.0] * 4
    records[17]["ranks"]["busy_s"][2] = 3.0
    noticed = {"rank": 2, "host": "<alpha>", "device": "cuda:0", "against": "the other ranks"}
    for number, factor in ((17, 3.1), (18, 4.2)):
        records[number]["stragglers"] = [{**noticed, "factor": factor}]
    records[29]["preempted"] = True
    (path / "rounds.jsonl").write_text("\n".join(map(json.dumps, records)))
    page = render_page(read_runs([path]))
    assert "Rank 2 on &lt;alpha&gt; (cuda:0) was up to 4.2 times slower than the other ranks: round 17-18." in page
    assert "The job&#39;s end was announced to the ranks in round 29." in page
    reports = analysis.rank_reports(read_runs([path])[0])
    assert [report.slow_rounds for report in reports] == [(), (), (17,), ()]
    assert reports[2].worst == pytest.approx(3.0)


def test_the_command_writes_page_and_pictures(reported: Path) -> None:
    assert (reported / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert (reported / "new" / "png" / "overview.png").exists()
    assert (reported / "new" / "png" / "2-adaptive-sgd-batch-size.png").exists()


def test_the_command_refuses_places_that_it_cannot_write_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", strategy="local", num_rounds=3)
    for arguments, message in (
        (["--png", str(tmp_path / "a.png")], "--png names a folder, which gets one picture a chart, got the file"),
        (["--out", str(tmp_path)], "--out names the page's file, such as"),
        (["--out", str(tmp_path / "absent" / "r.html")], "absent/r.html: cannot be written"),
        (["--target-p1", "7"], "--target-p1 must be in (0, 1], got 7.0"),
    ):
        assert main(["report", str(run), *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.root
def test_a_full_disk_keeps_the_page_that_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        page = disk / "r.html"
        write_output("--out", str(page), "a" * 30_000)
        with pytest.raises(ValueError, match=r"--out .*r.html: cannot be written: No space left on device"):
            write_output("--out", str(page), "b" * 60_000)
        assert page.read_text() == "a" * 30_000 and os.listdir(disk) == ["r.html"]


@pytest.mark.parametrize("name", ["a" * 250, "a" * 300])
def test_a_file_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    refused = pytest.raises(ValueError, match=r"--json .*a: cannot be written: File name too long")
    with refused if len(name) > 255 else nullcontext():
        write_output("--json", str(tmp_path / name), "text")
    (tmp_path / "old").write_text("old")
    (tmp_path / "old").chmod(0o600)
    write_output("--json", str(tmp_path / "old"), "new")
    assert (tmp_path / "old").read_text() == "new" and (tmp_path / "old").stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    write_output("--json", str(tmp_path / "link"), "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    done = subprocess.run(
        [sys.executable, "-c", "from hvd_adaptive.cli.arguments import write_output as w; w('--json', '/dev/stdout', 'text')"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "text"
