"""Data that commands in pages train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small learnable data set in the XMC format."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all pages' commands keep what they make of the data that come with the package."""
    return tmp_path_factory.mktemp("cache")
