"""Two hosts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import need_root_and
from two_hosts import TwoHosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    """Two hosts with a 1 Gbit/s link, removed again whatever became of the test."""
    need_root_and(ip="iproute2", tc="iproute2", unshare="util-linux", hostname="hostname")
    folder = tmp_path / "hosts"
    folder.mkdir()
    two = TwoHosts(folder)
    yield two
    two.close()
