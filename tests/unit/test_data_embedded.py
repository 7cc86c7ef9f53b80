"""The embedded data set: its packing, its checksum, its values."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive.xmc.data import SparseDataset, build, embedded, open_splits, resolve

id_lists = st.lists(
    st.lists(st.integers(0, 65535), unique=True, max_size=20).map(sorted), min_size=1, max_size=20
)


def to_rows(lists: list[list[int]]) -> embedded.IdRows:
    return embedded.IdRows(
        np.array([len(row) for row in lists], dtype=np.int64),
        np.array([index for row in lists for index in row], dtype=np.int64),
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(rows=st.tuples(id_lists, id_lists, id_lists, id_lists))
def test_unpack_inverts_pack(rows) -> None:
    train_x, test_x, train_y, test_y = map(to_rows, rows)
    data = embedded.EmbeddedData(
        {"train": train_x, "test": test_x}, {"train": train_y, "test": test_y}, ["w\u00f6rd", "x"], ["a", "b"]
    )
    packed = embedded.pack(data)
    assert packed == embedded.pack(data)
    again = embedded.unpack(packed)
    assert again[2:] == data[2:]
    for before, after in ((data.words, again.words), (data.labels, again.labels)):
        for split in ("train", "test"):
            assert before[split].lengths.tolist() == after[split].lengths.tolist()
            assert before[split].ids.tolist() == after[split].ids.tolist()


def test_pack_refuses_large_ids() -> None:
    rows = {"train": to_rows([[65536]]), "test": to_rows([[1]])}
    with pytest.raises(ValueError, match=r"must lie in \[0, 65535\], got 65536..65536"):
        embedded.pack(embedded.EmbeddedData(rows, rows, ["a"], ["b"]))


def test_damage_is_an_error() -> None:
    content = embedded.EMBEDDED_PATH.read_bytes()
    for damaged in (b"", content[:1000], content[:-5], content[:5000] + b"\0" + content[5001:], b"x" * 50):
        with pytest.raises(RuntimeError, match="is damaged"):
            embedded.unpack(damaged)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> tuple[SparseDataset, SparseDataset]:
    cache_dir: Path = tmp_path_factory.mktemp("embedded")
    build(resolve(None), cache_dir)
    return open_splits(resolve(None), cache_dir)


def test_file_is_the_one_that_its_readme_describes(splits) -> None:
    content = embedded.EMBEDDED_PATH.read_bytes()
    readme = embedded.EMBEDDED_PATH.with_name("README.md").read_text(encoding="utf-8")
    assert len(content) <= 5_000_000
    assert re.findall(r"\| sha256 \| (\w+) \|", readme) == [hashlib.sha256(content).hexdigest()]
    train, test = splits
    assert f"| {len(train)} / {len(test)} |" in readme
    assert f"| {train.num_features} |" in readme
    assert f"| {train.num_labels} |" in readme


def test_content(splits) -> None:
    train, test = splits
    for dataset in splits:
        assert dataset.x_indices.max() < dataset.num_features
        assert dataset.y_indices.max() < dataset.num_labels
        assert np.diff(dataset.y_indptr).min() >= 1
        features, labels = dataset.get_batch(np.arange(200))
        assert features.values is not None
        for rows in (features, labels):
            for row in range(200):
                ids = rows.indices[rows.offsets[row] : rows.offsets[row + 1]]
                assert (ids.diff() > 0).all()
    assert train.label_counts().min() >= 5
    assert train.label_names is not None
    assert train.feature_names is not None
    assert train.label_names == sorted(set(train.label_names))
    assert len(set(train.feature_names)) == train.num_features
    assert train.label_names[int(train.label_counts().argmax())] == "libc6"
    assert len(test) / (len(train) + len(test)) == pytest.approx(0.1, abs=0.02)


def test_values_are_normalized_tf_idf(splits) -> None:
    train, test = splits
    frequencies = np.bincount(train.x_indices, minlength=train.num_features)
    idf = np.log((1 + len(train)) / (1 + frequencies)) + 1
    for row in (0, 17, len(test) - 1):
        features, _ = test.get_batch([row])
        expected = idf[features.indices.numpy()]
        np.testing.assert_allclose(features.values, expected / np.linalg.norm(expected), rtol=2e-4)
        assert float((features.values.double() ** 2).sum()) == pytest.approx(1, abs=1e-6)
