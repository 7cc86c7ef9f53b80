"""What a person who mistypes a command or an option is told."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from hvd_adaptive.cli.main import main
from hvd_adaptive.cli.parser import make_parser

# As good as a folder that may not be entered, which root always may.
NO_PATH = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean train?; hvd-adaptive --help shows what there is"),
        (["train", "--batchsize", "3"], "unknown arguments --batchsize 3: did you mean --batch-size"),
        (["train", "--epoch=3"], "unknown arguments --epoch=3: did you mean --epochs"),
        (["train", "-np", "x"], "argument -np/-n/--num-ranks: invalid int value: 'x'; hvd-adaptive train --help-all shows"),
        (["report"], "the following arguments are required: RUN_DIR; hvd-adaptive report --help shows"),
        (["submit", "--nodes", "x"], "argument --nodes: invalid int value: 'x'; hvd-adaptive submit --help shows"),
        (["submit", "--partitoin", "a", "--", "train"], "unknown arguments --partitoin a: did you mean --partition"),
        (["calibrate", "-np", "2", "own.py"], "takes no script. hvd-adaptive run own.py starts a Horovod script"),
        (["calibrate", "own.py", "--learn", "2"], "run --dry-run own.py says what unequal shares would gain"),
        (["evaluate", "--num-r", "4", "runs/a"], "unknown arguments --num-r"),
        (["submit", "--node", "2", "--", "train"], "unknown arguments --node 2: did you mean --nodes"),
        (["submit", "--", "train", "-n", "2"], "submit: leave -np out"),
        (["predict", "runs/a", "zzz"], "unknown arguments zzz; hvd-adaptive predict --help shows"),
    ],
)
def test_mistyped_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("hvd-adaptive: error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "-np", "2", "--compression", "maxmin:9"], "compression: codec 'maxmin:9': maxmin: bits must be in [1, 8]"),
        (["train", "--elastic", "--max-np", "2", "--compression", "topk:0"], "fraction must be in (0, 1], got 0.0"),
        (["calibrate", "-np", "2", "--compression", "powersgd:0"], "rank must be >= 1, got 0"),
        (["run", "-np", "2", "--compression", "maxmin:4;size<9=x", __file__], "compression: unknown codec 'x'"),
        (["run", "-np", "2", __file__], "(compression is from variable HVD_ADAPTIVE_COMPRESSION)"),
        (["train", "-np", "2", "--compression", "none", "--elastic-batch", "fixed-per-rank"], "needs reference_ranks"),
        (["calibrate", "-np", "2", "--compression", "none", "--elastic-batch", "fixed-per-rank"], "needs reference_ranks"),
        (["calibrate", "-np", "2", "--compression", "topk:0.01", "--data", "/nowhere/x"], "/nowhere/x"),
        (["run", "-np", "2", "--compression", "none", "--slowdown", "1", __file__], "one factor a rank: 2 ranks, got 1"),
        (["train", "-np", "2", "--compression", "none", "--slowdown", "1"], "one factor a rank: 2 ranks, got 1"),
        (["train", "-np", "2", "--compression", "none", "--resume", "/no/such"], "there is no checkpoint in /no/such"),
        (["train", "-np", "2", "--compression", "none", "--resume", NO_PATH], "it cannot be read: File name too long"),
        (["run", "-np", "2", "--compression", "none", NO_PATH], "cannot be read: File name too long (looked in"),
        (["train", "-np", "2", "--compression", "none", "--data", NO_PATH], "cannot be read: File name too long"),
        (["train", "-np", "2", "--compression", "none", "--out", "taken"], "run directory taken holds a run already"),
    ],
)
def test_what_ranks_would_find_is_found_before_they_start(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/rounds.jsonl").touch()
    monkeypatch.setattr("hvd_adaptive.cli.main.relaunch", None)
    monkeypatch.setattr("hvd_adaptive.cli.elastic.Supervisor", None)
    monkeypatch.setenv("HVD_ADAPTIVE_COMPRESSION", "foo")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("hvd-adaptive: error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize("number", ["-n 4", "-n4", "-np 4", "-np=4", "--num-ranks 4"])
@pytest.mark.parametrize("before", ["train", "calibrate", "run", "evaluate", "predict a", "bench comm"])
def test_the_ranks_do_not_get_the_number_of_ranks(before: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would start ranks themselves. -n is what mpirun and srun call it."""
    after = {"run": [__file__, "-n", "5"], "evaluate": ["a"]}.get(before, [])
    started: list[Any] = []
    monkeypatch.setattr("hvd_adaptive.cli.main.relaunch", lambda *given, **_: started.append(given) or 0)
    assert main([*before.split(), *number.split(), *after]) == 0
    ((num_ranks, argv),) = started
    assert num_ranks == 4 and make_parser().parse_args(argv).num_ranks is None
    expected = [*before.split(), *after]
    assert argv[: len(expected)] == expected


def test_one_of_many_ranks_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert main(["train", "--batchsize", "3"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [*make_parser().commands, "bench compress", "bench comm"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert f"\n  hvd-adaptive {command} " in shown.partition("examples:")[2], shown


@pytest.mark.parametrize("command", make_parser().commands.values(), ids=lambda command: command.prog.split()[-1])
def test_the_help_shows_what_most_people_decide_about(command: Any) -> None:
    short, whole = command.format_help(), command.format_help_all()
    options = [a.option_strings[0] for a in command._actions if a.option_strings and a.help != argparse.SUPPRESS]
    shown = {name for name in options if re.search(rf"^  {name}(?=[\s,])", short, re.M)}
    assert len(shown - {"-h", "--help-all"}) <= 22
    assert [name for name in options if not re.search(rf"^  {name}(?=[\s,])", whole, re.M)] == []
    left = len(options) - len(shown)
    last = short.splitlines()[-1]
    assert last == f"{left} more options: {command.prog} --help-all" if left else "--help-all" not in short
    texts = {a.option_strings[0]: a.help % {} for a in command._actions if a.option_strings}
    assert [name for name in shown if len(texts[name]) > 95] == []


@pytest.mark.parametrize("command", ["train", "calibrate", "run", "simulate"])
def test_help_all_shows_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help-all"])
    assert end.value.code == 0
    whole = capsys.readouterr().out
    assert "--merge-share" in whole
    assert "more options" not in whole and "examples:" in whole


def test_nothing_given_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "first steps:" in capsys.readouterr().err
