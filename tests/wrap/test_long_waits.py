"""A wait that lasts too long while shares are unequal is told of once, with its name and what helps."""

from __future__ import annotations

import time

from hvd_adaptive.wrap.long_waits import LongWaits, _of_forks


def test_a_long_wait_is_named_once() -> None:
    said: list[str] = []
    waits = LongWaits(0.3, said.append)
    waits.start(1, 3)
    waits.start(1, 3)
    for _ in range(3):
        with waits.of("a short one"):
            time.sleep(0.01)
    time.sleep(0.5)
    assert not said
    with waits.of("allreduce 'correct' (of the script's)"):
        time.sleep(1.2)
    assert len(said) == 1 and "rank 1 has waited" in said[0] and "allreduce 'correct'" in said[0], said
    assert "--shares 1,1,1" in said[0]


def test_a_python_whose_forks_may_wait_for_ever_is_named() -> None:
    for version in ("3.10.14", "3.11.0rc1", "3.11.7"):
        assert f"Python {version} has a fault there" in _of_forks(version)
    assert not any(map(_of_forks, ("3.10.15", "3.10.18", "3.11.10", "3.12.0", "3.13.1", "3.14.0a2")))
