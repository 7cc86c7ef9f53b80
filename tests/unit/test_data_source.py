"""From a --data argument to files."""

from pathlib import Path

import pytest

from hvd_adaptive.xmc.data import resolve


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("1 1 1\n0 0:1\n")


def test_embedded() -> None:
    for data in (None, "debian-depends"):
        source = resolve(data)
        assert source.is_embedded
        assert source.name == "debian-depends"
        assert [path.name for path in source.files] == ["debian-depends.npz.xz"]
    with pytest.raises(ValueError, match="test_data must not be given with the embedded set, got 'x'"):
        resolve(None, "x")


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("separator", ["_", ".", "-"])
def test_prefix(tmp_path: Path, separator: str, suffix: str) -> None:
    touch(tmp_path, *(f"Eurlex{separator}{split}{suffix}" for split in ("train", "test")), "Other_train.txt")
    touch(tmp_path, f"Eurlex{separator}labels.txt")
    source = resolve(str(tmp_path / "Eurlex"))
    assert source.name == "Eurlex"
    assert source.train == tmp_path / f"Eurlex{separator}train{suffix}"
    assert source.test == tmp_path / f"Eurlex{separator}test{suffix}"
    assert source.label_names == tmp_path / f"Eurlex{separator}labels.txt"
    assert source.feature_names is None


def test_directory(tmp_path: Path) -> None:
    touch(tmp_path / "mine", "train.txt", "test.txt.gz", "train.txt.gz", "README")
    source = resolve(str(tmp_path / "mine"))
    assert (source.name, source.train, source.test) == (
        "mine",
        tmp_path / "mine" / "train.txt",
        tmp_path / "mine" / "test.txt.gz",
    )


def test_file_and_test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a.svm", "b.svm", "c_train.txt", "c_test.txt")
    assert resolve(str(tmp_path / "a.svm"), str(tmp_path / "b.svm")).test == tmp_path / "b.svm"
    assert resolve(str(tmp_path / "c_train.txt")).test == tmp_path / "c_test.txt"
    monkeypatch.chdir(tmp_path)
    assert resolve("c").train == tmp_path / "c_train.txt"
    assert resolve("a.svm", "b.svm").train == tmp_path / "a.svm"


@pytest.mark.parametrize(
    ("data", "test_data", "message"),
    [
        ("", None, "data must be a path or a prefix, got ''"),
        ("Eurlx", None, "is no file, no directory, and no prefix .*did you mean 'Eurlex'"),
        ("qqqqqq", None, "holds Eurlex_test.txt, Eurlex_train.txt,"),
        ("none/Eurlex", None, "does not exist, nor does the directory .*none"),
        (".", None, r"holds 2 data sets; choose one of: .*Eurlex, .*Wiki"),
        ("empty", None, r"holds no file named \[PREFIX_\]train.txt\[.gz\], but nothing"),
        (
            "Wiki",
            None,
            "no test file for .*neither Wiki_test.txt nor Wiki_test.txt.gz is there; give --test-data",
        ),
        ("x.svm", None, "cannot tell the test file of"),
        ("Eurlex", "Eurlex_tst.txt", "test_data: .* is not a file; did you mean .*'Eurlex_test.txt'"),
    ],
)
def test_errors_say_what_is_there(tmp_path: Path, data: str, test_data: str | None, message: str) -> None:
    touch(tmp_path, "Eurlex_train.txt", "Eurlex_test.txt", "Wiki_train.txt", "x.svm")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        resolve(
            str(tmp_path / data) if data else data, None if test_data is None else str(tmp_path / test_data)
        )
