"""Text -> chunks: what is legal, what every illegal file is told, and that nothing else happens."""

import gzip
import random
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_adaptive.xmc.data import lines, reader

VALID = b"4 10 5\n0,3 1:0.5 4:2\n 2:1e-3\n4\n1 0:1 9:-7.25\n"


def read(path: Path, block_bytes: int = reader.BLOCK_BYTES) -> list[tuple[list[int], dict[int, float]]]:
    """Read a file as rows of plain Python objects, through the public functions."""
    rows = []
    for chunk in reader.read_chunks(path, block_bytes=block_bytes):
        x_ends, y_ends = np.cumsum(chunk.x_lengths), np.cumsum(chunk.y_lengths)
        for x_end, x_length, y_end, y_length in zip(
            x_ends, chunk.x_lengths, y_ends, chunk.y_lengths, strict=True
        ):
            features = slice(x_end - x_length, x_end)
            rows.append(
                (
                    chunk.y_indices[y_end - y_length : y_end].tolist(),
                    dict(
                        zip(
                            chunk.x_indices[features].tolist(), chunk.x_values[features].tolist(), strict=True
                        )
                    ),
                )
            )
    return rows


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "data_train.txt"
    path.write_bytes(content)
    return path


def test_valid_file(tmp_path: Path) -> None:
    path = write(tmp_path, VALID)
    assert reader.read_shape(path) == (4, 10, 5)
    assert read(path) == [
        ([0, 3], {1: 0.5, 4: 2.0}),
        ([], {2: np.float32(1e-3)}),
        ([4], {}),
        ([1], {0: 1.0, 9: -7.25}),
    ]


@pytest.mark.parametrize("block_bytes", [1, 7, 20, 1000])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text[:-1],
        lambda text: text + b"\n \n\r\n",
        lambda text: gzip.compress(text),
        lambda text: text.replace(b"0,3 1:0.5 4:2", b"3,0,3 4:2 1:0.5"),
        lambda text: text.replace(b" ", b"\t"),
        lambda text: text.replace(b"\n4\n", b"\n+4 \n"),
    ],
    ids=["as is", "CRLF", "no last LF", "blank tail", "gzip", "unordered, label twice", "tabs", "sign"],
)
def test_spellings_of_the_same_data(tmp_path: Path, change, block_bytes: int) -> None:
    expected = read(write(tmp_path, VALID))
    assert read(write(tmp_path, change(VALID)), block_bytes) == expected


@pytest.mark.parametrize("block_bytes", [1, 1000])
def test_blank_lines_are_samples(tmp_path: Path, block_bytes: int) -> None:
    path = write(tmp_path, b"5 3 3\n\n1 1:1\n \n\r\n2\n")
    assert read(path, block_bytes) == [([], {}), ([1], {1: 1.0}), ([], {}), ([], {}), ([2], {})]
    assert read(write(tmp_path, b"2 3 3\n\n\n"), block_bytes) == [([], {}), ([], {})]


def test_the_slower_reader_is_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(write(tmp_path, b"3 5 5\n1 2:1 0:1\n1 0:1\n1 2:1 1:1\n"), 1)
    assert caplog.records == []
    read(write(tmp_path, b"3 5 5\n+1 2:1\n1 0:1\n+1 2:1\n"), 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


ERRORS = {
    "empty file": (b"", 1, "the file is empty"),
    "header is a sample": (b"1 2:3\n", 1, "three whole numbers"),
    "header of two": (b"1 2\n", 1, "three whole numbers"),
    "header with fraction": (b"1.0 2 3\n1 1:1\n", 1, "three whole numbers"),
    "header negative": (b"-1 2 3\n", 1, "three whole numbers"),
    "header blank": (b"\n1 1:1\n", 1, "three whole numbers"),
    "header with BOM": (b"\xef\xbb\xbf1 2 3\n1 1:1\n", 1, "three whole numbers"),
    "no samples": (b"0 2 3\n", 1, r"num_samples in the header must be at least 1"),
    "no features": (b"1 0 3\n1\n", 1, "num_features in the header"),
    "too many labels": (b"1 2 9999999999\n1\n", 1, "num_labels in the header"),
    "binary": (bytes(range(256)) * 20, 1, "this is not text: an XMC file"),
    "too few rows": (VALID.replace(b"4 10 5", b"6 10 5"), 5, "ends after 4 samples .* num_samples = 6"),
    "header only": (b"2 2 2\n", 1, "ends after 0 samples"),
    "too many rows": (VALID.replace(b"4 10 5", b"3 10 5"), 5, "one line more than the num_samples = 3"),
    "too many rows after blanks": (VALID + b"\n\n1 1:1\n", 8, "one line more"),
    "no colon": (VALID.replace(b"4:2", b"42"), 2, "expected a feature as id:value, got '42'"),
    "label after space": (VALID.replace(b"\n4\n", b"\n 4\n"), 4, "a line that starts with a space"),
    "space in labels": (VALID.replace(b"0,3", b"0, 3"), 2, "label id must be a whole number, got ''"),
    "label trailing comma": (VALID.replace(b"0,3", b"0,3,"), 2, "label id must be a whole number"),
    "label word": (VALID.replace(b"0,3", b"0,a"), 2, "label id must be a whole number, got 'a'"),
    "label fraction": (VALID.replace(b"0,3", b"0,3.0"), 2, "label id must be a whole number, got '3.0'"),
    "label exponent": (VALID.replace(b"\n4\n", b"\n4e0\n"), 4, "label id must be a whole number"),
    "label underscore": (VALID.replace(b"\n4\n", b"\n0_4\n"), 4, "label id must be a whole number"),
    "label nan": (VALID.replace(b"\n4\n", b"\nnan\n"), 4, "label id must be a whole number"),
    "label negative": (VALID.replace(b"\n4\n", b"\n-4\n"), 4, r"label id '-4' is out of range.* 0 to 4"),
    "label too large": (VALID.replace(b"\n4\n", b"\n5\n"), 4, "label id '5' is out of range"),
    "label huge": (VALID.replace(b"\n4\n", b"\n" + b"9" * 5000 + b"\n"), 4, "out of range"),
    "feature negative": (VALID.replace(b"4:2", b"-4:2"), 2, r"feature id '-4' is out of range.* 0 to 9"),
    "feature too large": (VALID.replace(b"9:", b"10:"), 5, "feature id '10' is out of range"),
    "feature beyond int64": (VALID.replace(b"9:", b"99999999999999999999:"), 5, "out of range"),
    "feature fraction": (VALID.replace(b"4:2", b"4.0:2"), 2, "feature id must be a whole number"),
    "feature word": (VALID.replace(b"4:2", b"x:2"), 2, "feature id must be a whole number, got 'x'"),
    "feature missing id": (VALID.replace(b"4:2", b":2"), 2, "feature id must be a whole number, got ''"),
    "feature twice": (VALID.replace(b"4:2", b"1:2"), 2, "feature 1 occurs twice"),
    "value missing": (VALID.replace(b"4:2", b"4:"), 2, "feature 4 must have a decimal number"),
    "value word": (VALID.replace(b"4:2", b"4:abc"), 2, "feature 4 must have a decimal number"),
    "value twice": (VALID.replace(b"4:2", b"4:2:2"), 2, "feature 4 must have a decimal number"),
    "value hex": (VALID.replace(b"4:2", b"4:0x2"), 2, "feature 4 must have a decimal number"),
    "value underscore": (VALID.replace(b"4:2", b"4:2_0"), 2, "feature 4 must have a decimal number"),
    "value nan": (VALID.replace(b"4:2", b"4:nan"), 2, "feature 4 has the non-finite value 'nan'"),
    "value -inf": (VALID.replace(b"4:2", b"4:-Inf"), 2, "non-finite"),
    "value beyond float32": (VALID.replace(b"4:2", b"4:1e39"), 2, "which float32 cannot hold"),
    "comment": (VALID.replace(b"4:2", b"4:2 # x"), 2, "expected a feature as id:value, got '#'"),
    "qid": (VALID.replace(b"1:0.5", b"qid:7"), 2, "feature id must be a whole number, got 'qid'"),
    "CR inside": (VALID.replace(b"4:2", b"4:2\r5:1"), 2, "carriage return inside a line"),
    "binary later": (VALID.replace(b"4:2", b"\x00\xff"), 2, "expected a feature"),
    "not utf-8": (VALID.replace(b"4:2", b"4:\xe4"), 2, r"decimal number as value, got '\\\\xe4'"),
}


@pytest.mark.parametrize("block_bytes", [1, 1000])
@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_file_and_line(tmp_path: Path, case: str, block_bytes: int) -> None:
    content, line, message = ERRORS[case]
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:{line}: .*{message}"):
        read(path, block_bytes)


def gzip_text() -> tuple[bytes, bytes]:
    """Return 20000 lines that gzip cannot make tiny, plain and compressed."""
    rng = random.Random(3)
    rows = [b"%d %d:%.6f" % (rng.randrange(9), rng.randrange(99), rng.random()) for _ in range(20000)]
    text = b"20000 99 9\n" + b"\n".join(rows) + b"\n"
    return text, gzip.compress(text)


def test_truncated_gzip_names_the_line(tmp_path: Path) -> None:
    text, packed = gzip_text()
    path = write(tmp_path, packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="the gzip file is cut off within this line") as caught:
        read(path)
    line = int(str(caught.value).removeprefix(f"{path}:").partition(":")[0])
    assert 0.4 < line / text.count(b"\n") < 0.6


@pytest.mark.parametrize("keep", [2, 9, 12])
def test_gzip_cut_in_its_header(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, gzip.compress(VALID)[:keep])
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:1: the gzip file is cut off"):
        read(path)


def test_gzip_without_its_end(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(VALID)[:-3])
    with pytest.raises(ValueError, match=r":\d+: the gzip file is cut off"):
        read(path)


def test_damaged_gzip(tmp_path: Path) -> None:
    _, packed = gzip_text()
    middle = len(packed) // 2
    path = write(tmp_path, packed[:middle] + bytes(200) + packed[middle + 200 :])
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:\d+: "):
        read(path)
    path = write(tmp_path, gzip.compress(VALID) + b"garbage behind the end")
    with pytest.raises(ValueError, match=r":6: the gzip file is damaged here"):
        read(path)


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path, b"2 9 9\n1 1:1\n" + b"7" * 100_000)
    with pytest.raises(ValueError, match=r":3: no line end within 1000 bytes"):
        read(path, 100)


@st.composite
def odd_lines(draw: st.DrawFn) -> bytes:
    """A line from the alphabet where the two readers could disagree."""
    token = st.text("0123:,.+-e_ \tnaif#q\r", max_size=12).map(str.encode)
    return draw(token)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=odd_lines())
def test_both_readers_agree(line: bytes) -> None:
    """Whatever the fast reader takes, the defining one takes, with the same result."""
    shape = reader.SplitShape(1, 4, 4)
    if reader._is_suspicious(line + b"\n"):
        return
    block = lines.Block(line + b"\n", 2, 1)
    chunk = reader._parse_fast(block, shape) or reader._parse_fast(reader._with_sorted_features(block), shape)
    if chunk is None:
        return
    labels, features = reader._parse_line(line.removesuffix(b"\r"), shape)
    assert chunk.y_indices.tolist() == labels
    assert chunk.x_indices.tolist() == list(features)
    assert chunk.x_values.tolist() == list(features.values())
    assert (chunk.x_lengths.tolist(), chunk.y_lengths.tolist()) == ([len(features)], [len(labels)])


def test_mutated_files_are_read_or_refused_with_a_line(tmp_path: Path) -> None:
    rng = random.Random(20)
    body = [
        b",".join(b"%d" % label for label in sorted(rng.sample(range(9), rng.randrange(4))))
        + b"".join(b" %d:%.3f" % (index, rng.random()) for index in sorted(rng.sample(range(50), 8)))
        for _ in range(30)
    ]
    text = b"30 50 9\n" + b"\n".join(body) + b"\n"
    path = tmp_path / "mutated.txt"
    num_read, refusals = 0, []
    for case in range(600):
        content = bytearray(gzip.compress(text, mtime=0) if case % 3 == 2 else text)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            position = rng.randrange(len(content))
            kind = rng.randrange(5)
            if kind == 0:
                content[position] = rng.randrange(256)
            elif kind in (1, 2):
                content[position] = rng.choice(b"0123456789\n :,-\r")
            elif kind == 3:
                del content[position : position + rng.randrange(1, 30)]
            else:
                content[position:position] = content[: rng.randrange(1, 30)]
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                num_rows = len(read(path, rng.choice([50, 5000])))
            except ValueError as error:
                refusals.append(str(error))
            else:
                assert num_rows == reader.read_shape(path).num_samples
                num_read += 1
    assert num_read > 30
    assert len(refusals) > 100
    assert [text for text in refusals if not re.match(rf"{re.escape(str(path))}:\d+: ", text)] == []
