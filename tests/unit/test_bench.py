"""``hvd-adaptive bench compress``, the arithmetic behind it, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive.cli.bench import uses_groups
from hvd_adaptive.cli.main import main
from hvd_adaptive.cli.parser import make_parser
from hvd_adaptive.compress import parse_codec
from hvd_adaptive.doctor import codec_speed
from hvd_adaptive.doctor.codec_speed import Speed, break_even_mbit, errors


@pytest.mark.slow
def test_codecs_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "codecs.json"
    codecs = "maxmin:8;maxmin:4; normal:2;topk:0.01;bf16"
    options = ["--device", "cpu", "--mib", "0.5", "--repeat", "2", "--ranks", "3", "--codecs", codecs, "--json", str(file)]
    assert main(["bench", "compress", *options]) == 0
    content = json.loads(file.read_text())
    rows = content["rows"]
    assert content["ranks"] == 3 and content["processor"]
    assert [row["bits"] for row in rows] == pytest.approx([8.125, 4.125, 2.125, 0.64, 16], abs=1e-3)
    assert all(row["encode_gb_s"] > 0.001 and row["decode_add_gb_s"] > 0.001 for row in rows)
    eight, four, two, topk, bf16 = rows
    assert 0.003 < eight["error_one_round"] < eight["error_two_rounds"] < 0.02
    assert 0.09 < four["error_one_round"] < four["error_two_rounds"] < 0.3
    assert 0.3 < two["error_one_round"] < two["error_two_rounds"] < 0.6
    assert 0.5 < topk["error_one_round"] < 1
    assert 0 < bf16["error_two_rounds"] < 0.01
    # Each value's bytes as they are, for a quarter and an eighth of which there must be a faster link.
    assert all(row["break_even_mbit"] > 1 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert "break-even Mbit/s" in lines[0] and len(lines) == 6 and lines[1].startswith("maxmin:8,bucket=512,stochastic")


def test_speeds_are_medians_of_the_turns_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of encoding, of decoding and of a copy: the first turn's beginnings, then beginnings and ends. In microseconds.
    turns = [(2.0, 4.0, 0.5), (1.0, 90.0, 0.1), (7.0, 3.0, 9.0)]
    readings = [0.0] * 3 + [edge for turn in turns for taken in turn for edge in (0.0, 1e-6 * taken)]
    monkeypatch.setattr(codec_speed, "time", SimpleNamespace(perf_counter=iter(readings).__next__))
    speed = codec_speed.measure_speed(parse_codec("maxmin:8"), torch.ones(1000), repeat=3)
    # 4 kB of values.
    assert astuple(speed) == pytest.approx((2.0, 1.0, 8.0))


def test_the_break_even_link_takes_as_long_for_the_bytes_saved_as_coding() -> None:
    # 1 GB. Two ranks send as many bytes as they have: 1 GB encoded at 3, 2 GB decoded at 8. Four send 1.5 times as many,
    # and encode their part of the sum as well.
    codec, num_values = parse_codec("maxmin:8,bucket=65536"), 2**28
    speed = Speed(encode_gb_s=3.0, decode_add_gb_s=8.0, copy_gb_s=10.0)
    saved_gbit = 8e-9 * (4 * num_values - codec.payload_bytes(num_values))
    for num_ranks, sent, encoded in ((2, 1.0, 1.0), (4, 1.5, 1.25)):
        seconds = 4e-9 * num_values * (encoded / 3 + 2 / 8)
        limit = break_even_mbit(codec, speed, num_values=num_values, num_ranks=num_ranks)
        assert limit == pytest.approx(1e3 * sent * saved_gbit / seconds)


def test_more_ranks_make_more_error_in_the_second_round_only_by_their_sum() -> None:
    two, four, eight = (errors(parse_codec("maxmin:4"), 1 << 16, num_ranks) for num_ranks in (2, 4, 8))
    assert four[0] == pytest.approx(eight[0], rel=0.1) and four[1] == pytest.approx(eight[1], rel=0.1)
    # Two ranks have no second round.
    assert two[0] == pytest.approx(four[0], rel=0.1) and two[1] == pytest.approx(two[0], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codecs", "maxmin:9"], "bits must be in [1, 8], got 9"),
        (["--codecs", "powersgd:4"], "measure it with bench comm"),
        (["--mib", "0"], "--mib must be > 0, got 0.0"),
        (["--ranks", "1"], "--ranks must be >= 2, got 1"),
        (["--device", "gpu"], "--device gpu"),
        (["--mib", "0.01", "--codecs", "bf16", "--json", "/proc/nowhere"], "--json /proc/nowhere: cannot be written"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compress", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_one_rank_has_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm", "--mb", "1"]) == 2
    assert "bench comm needs 2 ranks or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ([], False),
        (["--codecs", "maxmin:4", "--reducer", "hierarchical"], True),
        (["--reducer", "by-host"], None),
    ],
)
def test_groups_are_made_where_a_reducer_needs_them(options: list[str], groups: bool | None) -> None:
    assert uses_groups(make_parser().parse_args(["bench", "comm", *options])) is groups
