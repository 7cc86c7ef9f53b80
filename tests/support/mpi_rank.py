"""In a rank: runs the tests that it is told, one after the other, and says what became of them and what they left behind."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from mpi_world import REPORTS, SHARED, SOCKET, WORLD, node_name
from rank_state import RankState

from hvd_adaptive import comm
from hvd_adaptive.cluster.binding import read_launcher


class RankPlugin:
    """Takes the place of pytest's own loop over the tests.

    Args:
        config: pytest's.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._folder = Path(os.environ[REPORTS])
        rank = read_launcher(os.environ).rank
        assert rank is not None, "started as a rank, but no launcher's variables are set"
        self._rank = rank
        config.option.basetemp = str(self._folder / f"tmp{rank}")
        self._files: dict[str, pytest.Module] = {}
        self._wanted: set[str] = set()
        self._items: dict[str, pytest.Item] = {}
        self._outcomes: list[dict[str, str]] = []
        self._errors = ""
        self._stacks = (self._folder / f"rank{rank}.stacks").open("w")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        # These ranks start Horovod again for each test.
        comm._CYCLES.was_started = True
        state = RankState()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._folder / SOCKET))
            with connection.makefile("rw", encoding="utf-8") as stream:

                def say(**answer: Any) -> None:
                    stream.write(json.dumps(answer) + "\n")
                    stream.flush()

                say(rank=self._rank, pid=os.getpid())
                for line in stream:
                    message = json.loads(line)
                    if "run" in message:
                        os.environ[SHARED] = message["shared"]
                        self._run(self._find(session, message["run"]))
                        say(outcomes=self._outcomes, errors=self._errors)
                    else:
                        say(leaks=state.leaks())
                        state.restore()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        """Leaves files to be imported when one of their tests is to run: most ranks run those of few."""
        path = str(collector.path)
        if not isinstance(collector, pytest.Module) or path in self._wanted:
            return None
        self._files[path] = collector
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    def _find(self, session: pytest.Session, name: str) -> pytest.Item | None:
        path = name.partition("::")[0]
        if path in self._files:
            self._wanted.add(path)
            found = list(session.genitems(self._files.pop(path)))
            session.testscollected += len(found)
            self._items |= {node_name(item): item for item in found}
        return self._items.get(name)

    def _run(self, item: pytest.Item | None) -> None:
        self._outcomes = []
        # Again for each test: the one before may have had a handler of its own.
        faulthandler.unregister(signal.SIGTERM)
        faulthandler.register(signal.SIGTERM, file=self._stacks, all_threads=True, chain=True)
        if item is not None:
            # No next item: whatever its fixtures made ends with the test.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        from mpi4py import MPI

        size, expected = MPI.COMM_WORLD.Get_size(), int(os.environ[WORLD])
        assert size == expected, (
            f"MPI's world has {size} ranks, not {expected}: mpirun and libmpi do not match"
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext + "".join(f"\n-- {head}\n{body}" for head, body in report.sections)
        name = report.nodeid.rpartition("::")[2]
        self._outcomes.append(
            {"name": name, "when": report.when or "", "outcome": report.outcome, "text": text}
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors += f"\n{report.longreprtext}"
