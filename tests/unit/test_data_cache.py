"""Text -> cache -> batches: equal to SciPy's matrices, safe under concurrency, damage and change."""

import errno
import gzip
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_adaptive.xmc.data import (
    DataSource,
    SparseDataset,
    SparseRows,
    build,
    default_cache_dir,
    open_splits,
    resolve,
)
from hvd_adaptive.xmc.data import cache as cache_module


def random_matrices(
    seed: int, num_rows: int, num_columns: int, num_labels: int
) -> tuple[sp.csr_array, sp.csr_array]:
    """Return features and labels with empty rows among them."""
    rng = np.random.default_rng(seed)
    x = sp.random_array((num_rows, num_columns), density=0.2, format="csr", dtype=np.float32, rng=rng)
    y = sp.random_array((num_rows, num_labels), density=0.2, format="csr", dtype=np.float32, rng=rng)
    x.sort_indices()
    y.sort_indices()
    return x, y


def to_text(x: sp.csr_array, y: sp.csr_array) -> bytes:
    """Write matrices in the XMC repository's format, exactly."""
    rows = [f"{x.shape[0]} {x.shape[1]} {y.shape[1]}"]
    for row in range(x.shape[0]):
        labels = y.indices[y.indptr[row] : y.indptr[row + 1]]
        part = slice(x.indptr[row], x.indptr[row + 1])
        features = [
            f"{i}:{v!r}" for i, v in zip(x.indices[part].tolist(), x.data[part].tolist(), strict=True)
        ]
        rows.append(" ".join([",".join(map(str, labels.tolist())), *features]))
    return "\n".join(rows).encode() + b"\n"


def write_source(folder: Path, seed: int = 0, num_rows: int = 20) -> DataSource:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toy_train.txt").write_bytes(to_text(*random_matrices(seed, num_rows, 30, 10)))
    (folder / "toy_test.txt.gz").write_bytes(gzip.compress(to_text(*random_matrices(seed + 1, 7, 30, 10))))
    return resolve(str(folder / "toy"))


def to_matrix(rows: SparseRows, num_columns: int) -> sp.csr_array:
    values = torch.ones(len(rows.indices)) if rows.values is None else rows.values
    return sp.csr_array(
        (values.numpy(), rows.indices.numpy(), rows.offsets.numpy()), (len(rows.offsets) - 1, num_columns)
    )


def only_cache(cache_dir: Path) -> Path:
    (found,) = (path for path in cache_dir.iterdir() if path.is_dir())
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 30)),
    is_gzip=st.booleans(),
    picks=st.lists(st.integers(0, 10**6), max_size=60),
)
def test_batches_equal_scipy_rows(tmp_path: Path, seed: int, sizes, is_gzip: bool, picks: list[int]) -> None:
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    x, y = random_matrices(seed, *sizes)
    for split in ("train", "test"):
        text = to_text(x, y)
        (tmp_path / f"{split}.txt").write_bytes(gzip.compress(text) if is_gzip else text)
    source = resolve(str(tmp_path))
    if not y.nnz:
        with pytest.raises(ValueError, match="no sample has a label"):
            build(source, tmp_path / "cache")
        return
    build(source, tmp_path / "cache")
    train, test = open_splits(source, tmp_path / "cache")
    assert train.fingerprint == test.fingerprint
    assert len(train) == x.shape[0]
    rows = np.array(picks, dtype=np.int64) % x.shape[0]
    features, labels = train.get_batch(rows)
    assert features.values is not None
    assert (features.indices.dtype, features.offsets.dtype, features.values.dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
    )
    assert (labels.indices.dtype, labels.offsets.dtype, labels.values) == (torch.int64, torch.int64, None)
    assert len(features.offsets) == len(labels.offsets) == len(rows) + 1
    if len(rows):
        assert (to_matrix(features, x.shape[1]) != x[rows]).nnz == 0
        assert (to_matrix(labels, y.shape[1]) != (y[rows] != 0).astype(np.float32)).nnz == 0
    assert train.num_nonzeros().tolist() == np.diff(x.indptr).tolist()
    assert train.label_counts().tolist() == (y != 0).sum(axis=0).tolist()
    assert train.label_counts().dtype == train.num_nonzeros().dtype == np.int64


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> SparseDataset:
    folder = tmp_path_factory.mktemp("toy")
    source = write_source(folder)
    build(source, folder / "cache")
    return open_splits(source, folder / "cache")[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([20], r"rows must lie in \[0, 20\) for toy/train, got 20..20"),
        ([3, -1], r"rows must lie in \[0, 20\) for toy/train, got -1..3"),
        ([[1, 2]], r"one-dimensional array of integers, got shape \(1, 2\)"),
        ([0.5], "got shape .* of float64"),
        ([True, False], "got shape .* of bool"),
    ],
)
def test_get_batch_refuses(toy: SparseDataset, rows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy.get_batch(np.array(rows))


def test_batches_are_new_memory_on_the_wanted_device(toy: SparseDataset) -> None:
    features, labels = toy.get_batch([1, 2])
    assert features.values is not None
    before = toy.x_values.copy()
    features.values.zero_()
    assert np.array_equal(toy.x_values, before)
    assert features.to("cpu").indices is features.indices
    moved = labels.to("meta")
    assert (moved.indices.device.type, moved.values) == ("meta", None)


def test_names(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    build(source, tmp_path / "cache")
    assert open_splits(source, tmp_path / "cache")[0].label_names is None
    (tmp_path / "toy_labels.txt").write_text(
        "".join(f"n\u00e4me {i}\u2028\r\n" for i in range(10)), encoding="utf-8"
    )
    named = resolve(str(tmp_path / "toy"))
    build(named, tmp_path / "cache")
    train, test = open_splits(named, tmp_path / "cache")
    assert train.label_names == test.label_names == [f"n\u00e4me {i}\u2028" for i in range(10)]
    assert train.feature_names is None
    (tmp_path / "toy_labels.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"toy_labels.txt:2: 2 names, but the data have num_labels = 10"):
        build(named, tmp_path / "cache")
    (tmp_path / "toy_labels.txt").write_bytes(b"\xff\n" * 10)
    with pytest.raises(ValueError, match=r"toy_labels.txt: names must be UTF-8"):
        build(named, tmp_path / "cache")


def test_errors_leave_no_cache(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"no usable cache of toy .*not built.*call hvd_adaptive.xmc.data.build"
    ):
        open_splits(source, tmp_path / "cache")
    (tmp_path / "toy_train.txt").write_text("1 30 10\n1 1:nan\n")
    with pytest.raises(ValueError, match=r"toy_train.txt:2: feature 1 has the non-finite value 'nan'"):
        build(source, tmp_path / "cache")
    (tmp_path / "toy_train.txt").write_text("2 30 10\n 1:1\n 2:1\n")
    with pytest.raises(ValueError, match=r"toy_train.txt: no sample has a label, so there is nothing to learn"):
        build(source, tmp_path / "cache")
    (tmp_path / "toy_train.txt").write_text("1 30 11\n1 1:1\n")
    with pytest.raises(ValueError, match=r"toy_test.txt.gz:1: num_labels must be .* 11, got 10"):
        build(source, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_second_build_does_nothing(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    build(source, tmp_path / "cache")
    before = only_cache(tmp_path / "cache").stat().st_ino
    build(source, tmp_path / "cache")
    assert only_cache(tmp_path / "cache").stat().st_ino == before


def test_a_changed_source_is_refused_then_rebuilt(tmp_path: Path) -> None:
    source = write_source(tmp_path, seed=0)
    build(source, tmp_path / "cache")
    old, _ = open_splits(source, tmp_path / "cache")
    old_values = old.x_values.copy()
    write_source(tmp_path, seed=5)
    with pytest.raises(RuntimeError, match="the source changed since"):
        open_splits(source, tmp_path / "cache")
    os.utime(only_cache(tmp_path / "cache"), (0, 0))
    build(source, tmp_path / "cache")
    new, _ = open_splits(source, tmp_path / "cache")
    assert new.fingerprint != old.fingerprint
    assert only_cache(tmp_path / "cache"), "one that has long been out of use goes"
    assert np.array_equal(old.x_values, old_values), "a mapped cache must survive its removal"


def test_hosts_with_files_of_their_own_at_the_same_path_share_a_cache_folder(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    ages = (1_000_000, 2_000_000)
    for age in ages:
        os.utime(tmp_path / "toy_train.txt", (age, age))
        build(source, tmp_path / "cache")
        for cache in (tmp_path / "cache").glob("*/"):
            os.utime(cache, (0, 0))  # nobody has used it for long, but for who opens it now
        open_splits(source, tmp_path / "cache")
    for age in ages:
        os.utime(tmp_path / "toy_train.txt", (age, age))
        assert len(open_splits(source, tmp_path / "cache")[0]) == 20


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def break_meta(change) -> None:
    def damage(cache: Path) -> None:
        meta = json.loads((cache / "meta.json").read_text())
        change(meta)
        (cache / "meta.json").write_text(json.dumps(meta))

    return damage


DAMAGES = {
    "array missing": lambda cache: (cache / "train.x_values.npy").unlink(),
    "array cut": lambda cache: truncate(cache / "test.y_indices.npy"),
    "meta missing": lambda cache: (cache / "meta.json").unlink(),
    "meta cut": lambda cache: truncate(cache / "meta.json") or truncate(cache / "meta.json"),
    "meta empty": lambda cache: (cache / "meta.json").write_text(""),
    "meta no object": lambda cache: (cache / "meta.json").write_text("[1]"),
    "meta without files": break_meta(lambda meta: meta.pop("files")),
    "meta names no array": break_meta(lambda meta: meta["files"].pop("test.x_indptr.npy")),
    "another version": break_meta(lambda meta: meta.update(format_version=99)),
    "not a directory": lambda cache: (shutil.rmtree(cache), cache.write_text("x")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_refused_then_rebuilt(tmp_path: Path, damage: str) -> None:
    source = write_source(tmp_path)
    build(source, tmp_path / "cache")
    expected = open_splits(source, tmp_path / "cache")[0].fingerprint
    DAMAGES[damage](only_cache(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="no usable cache of toy"):
        open_splits(source, tmp_path / "cache")
    build(source, tmp_path / "cache")
    assert open_splits(source, tmp_path / "cache")[0].fingerprint == expected


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    build(source, tmp_path / "cache")
    path = only_cache(tmp_path / "cache") / "train.x_values.npy"
    path.write_bytes(path.read_bytes().replace(b"<f4", b"<i4"))
    with pytest.raises(RuntimeError, match=r"train.x_values.npy holds .* of int32, expected"):
        open_splits(source, tmp_path / "cache")


def test_leftovers_of_a_killed_build_go(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    build(source, tmp_path / "cache")
    cache = only_cache(tmp_path / "cache")
    prefix = cache.name.rpartition("-")[0]
    shutil.rmtree(cache)
    (tmp_path / "cache" / f"{prefix}-partial-abc").mkdir()
    (tmp_path / "cache" / "other-0123-partial-abc").mkdir()
    build(source, tmp_path / "cache")
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {
        cache.name,
        "other-0123-partial-abc",
    }


def build_and_report(source: DataSource, cache_dir: Path, barrier, results) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvd_adaptive.xmc.data").addHandler(handler)
    logging.getLogger("hvd_adaptive.xmc.data").setLevel(logging.INFO)
    barrier.wait(120)
    build(source, cache_dir)
    train, _ = open_splits(source, cache_dir)
    num_builds = sum(text.startswith("built the cache") for text in records)
    results.put((train.fingerprint, num_builds))


@pytest.mark.slow
def test_of_three_processes_one_builds(tmp_path: Path) -> None:
    source = write_source(tmp_path, num_rows=3000)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hvd_adaptive.xmc.data"])
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (source, tmp_path / "cache", barrier, results)
    processes = [context.Process(target=build_and_report, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    reports = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len({fingerprint for fingerprint, _ in reports}) == 1
    assert sum(num_builds for _, num_builds in reports) == 1


def test_a_build_waits_for_the_lock(tmp_path: Path) -> None:
    """A process that was killed while building gives its lock back, and the waiting one goes on."""
    source = write_source(tmp_path)
    build(source, tmp_path / "cache")
    shutil.rmtree(only_cache(tmp_path / "cache"))
    (lock,) = (tmp_path / "cache").glob("*.lock")
    program = (
        "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        is_killed = threading.Event()
        # In this order: the lock is free before the process is seen to be gone.
        killer = threading.Timer(0.5, lambda: (is_killed.set(), holder.kill()))
        killer.start()
        build(source, tmp_path / "cache")
        assert is_killed.is_set(), "the build did not wait"
    assert len(open_splits(source, tmp_path / "cache")[0]) == 20


@pytest.mark.parametrize("is_damaged", [False, True])
def test_two_build_where_nothing_keeps_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    """As two nodes do on a file system without locks: whoever comes second takes the first one's cache."""
    source, write, barrier = write_source(tmp_path), cache_module.write_content, threading.Barrier(2)
    if is_damaged:
        build(source, tmp_path / "cache")
        (only_cache(tmp_path / "cache") / "meta.json").unlink()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def write_together(source: DataSource, folder: Path) -> None:
        write(source, folder)
        barrier.wait(60)

    monkeypatch.setattr(cache_module.fcntl, "flock", refuse)
    monkeypatch.setattr(cache_module, "write_content", write_together)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(build, source, tmp_path / "cache") for _ in range(2)]:
            future.result(60)
    assert len(open_splits(source, only_cache(tmp_path / "cache").parent)[0]) == 20
    assert caplog.text.count("without locks (No locks available)") == 2


def test_unusable_places_are_named(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RuntimeError, match=r"cannot build the cache of toy in cache_dir .*file/sub: .*writable"
    ):
        build(source, tmp_path / "file" / "sub")
    (tmp_path / "toy_train.txt").unlink()
    with pytest.raises(RuntimeError, match=r"cannot read the data of toy: .*toy_train.txt"):
        build(source, tmp_path / "cache")


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "hvd_adaptive" / "data"
    source = write_source(tmp_path / "source")
    build(source)
    assert len(open_splits(source)[1]) == 7
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "hvd_adaptive" / "data"
