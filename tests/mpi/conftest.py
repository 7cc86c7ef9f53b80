"""Data that several files train on."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small learnable data set in the XMC format: a label's words are its own."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split, count in (("train", 2000), ("test", 700)):
        lines = [f"{count} 300 40"]
        for _ in range(count):
            labels = np.unique(generator.integers(0, 40, generator.integers(1, 4)))
            words = np.unique(
                np.concatenate([generator.integers(label * 7, label * 7 + 7, 3) for label in labels])
            )
            lines.append(
                ",".join(map(str, labels))
                + " "
                + " ".join(f"{w}:{generator.random() + 0.5:.3f}" for w in words)
            )
        with gzip.open(folder / f"toy_{split}.txt.gz", "wt") as file:
            file.write("\n".join(lines) + "\n")
    return folder
