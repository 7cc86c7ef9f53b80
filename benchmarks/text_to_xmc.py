"""Converts labelled texts to files that `hvd-adaptive train --data PREFIX` reads: tf-idf, rows of unit length.

    python benchmarks/text_to_xmc.py TRAIN.tsv TEST.tsv PREFIX [--min-df 3]

A line of TRAIN.tsv and TEST.tsv is `label1,label2<TAB>text`. Words and their weights come from TRAIN.tsv alone. Labels that it
lacks are dropped from TEST.tsv. PREFIX_labels.txt and PREFIX_features.txt name the ids. Needs scikit-learn, which the set-up
installs with the package; elsewhere `pip install scikit-learn`.

Sets of records/2026-11-23-merge-rules.md came from these public repositories, whose terms hold for their data: clinc/oos-eval
(data/data_full.json, without out-of-scope), PolyAI-LDN/task-specific-datasets (banking_data), jacoxu/StackOverflow (rawText;
shuffled, the first 16,000 train), yao8839836/text_gcn (data/20ng by date, data/ohsumed_single_23), and tsoumakas/mulan
(delicious and Bibtex, which hold word vectors already and do not go through this script).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Samples = tuple[list[list[str]], list[str]]
"""Each sample's labels, and its text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("prefix", help="of the files to write")
    parser.add_argument("--min-df", type=int, default=3, help="training texts that a word must occur in")
    options = parser.parse_args()
    convert(read(options.train), read(options.test), options.prefix, min_df=options.min_df)


def read(path: Path) -> Samples:
    """Returns the samples of a TSV file; bytes that are not UTF-8 are replaced.

    Raises:
        ValueError: a line has no tab; the message starts with ``path:line:``.
    """
    labels, texts = [], []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            left, tab, text = line.rstrip("\r\n").partition("\t")
            if not tab:
                raise ValueError(f"{path}:{number}: a line must be labels, a tab, and a text, got {line[:60]!r}")
            labels.append([label for label in left.split(",") if label])
            texts.append(text)
    return labels, texts


def convert(train: Samples, test: Samples, prefix: str, *, min_df: int) -> None:
    """Writes both splits and the names of labels and features."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    # 1 + log of a word's count in a text; rows have unit length by default.
    vectorizer = TfidfVectorizer(min_df=min_df, sublinear_tf=True)
    features = vectorizer.fit_transform(train[1]), vectorizer.transform(test[1])
    names = sorted({label for labels in train[0] for label in labels})
    ids = {name: number for number, name in enumerate(names)}
    for split, matrix, (labels, _) in zip(("train", "test"), features, (train, test), strict=True):
        known = [sorted({ids[label] for label in some if label in ids}) for some in labels]
        write(Path(f"{prefix}_{split}.txt"), matrix.tocsr(), known, num_labels=len(ids))
    Path(f"{prefix}_labels.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    words = vectorizer.get_feature_names_out()
    Path(f"{prefix}_features.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")


def write(path: Path, matrix: Any, labels: Sequence[Sequence[int]], *, num_labels: int) -> None:
    """Writes one split as an XMC file: `num_samples num_features num_labels`, then `l1,l2 f:v f:v ...` a sample.

    Args:
        path: of the file.
        matrix: features, SciPy CSR, shape (num_samples, num_features).
        labels: each sample's ids, ascending.
        num_labels: of the set.
    """
    matrix.sort_indices()
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{matrix.shape[0]} {matrix.shape[1]} {num_labels}\n")
        for row, own in enumerate(labels):
            part = slice(matrix.indptr[row], matrix.indptr[row + 1])
            entries = zip(matrix.indices[part], matrix.data[part], strict=True)
            words = " ".join(f"{index}:{value:.5g}" for index, value in entries)
            file.write(f"{','.join(map(str, own))} {words}\n")


if __name__ == "__main__":
    main()
