"""What a script decides by the size of a batch: in its source for len(), by numbers that remember for all else."""

from __future__ import annotations

import copy
import importlib
import linecache
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd_adaptive.wrap import sizes
from hvd_adaptive.wrap.decisions import decides_by_length
from hvd_adaptive.wrap.rates import sets_rate_by_size

DECIDING = {
    "skip": "if len(x) != 8: pass",
    "first": "n = len(x)\nif n < 8: pass",
    "counted": "seen += len(x)\nif seen >= 100: pass",
    "every so many": "seen += 2 * len(x)\nif seen % 100 == 0: pass",
    "every so many, by truth": "seen += len(x)\nif not (seen % 100) == True or seen % 100: pass",
    "an epoch": "seen = seen + len(x)\nif seen >= len(data): pass",
    "the smaller": "n = min(len(x), 8)",
    "two names": "a, n = 1, len(x)\nwhile n > a * 4: break",
}
HARMLESS = {
    "a print": "print(i * len(x), len(data))",
    "another name's": "n = len(x)\nif i % 10 == 0: print(n)",
    "none": "n = len(x)\nif n > 0: pass",
    "a mean": "total += 3.0 * len(x)\nseen += len(x)\nbest = total / seen\nif best > 0.5: pass",
    "targets": "assert len(x) == len(y)",
    "another's length": "if len(data) > 100: print(len(x))",
}


def ask(source: str) -> bool:
    """Whether code decides by len(x), as the tensor's own __len__ would ask."""
    answers: list[bool] = []

    class Batch:
        def __len__(self) -> int:
            answers.append(decides_by_length(sys._getframe(1), self))
            return 8

    name = f"<deciding {hash(source)}>"
    code = "def loop(x, y, data, i=0, seen=0, total=0.0):\n" + "".join(f"    {line}\n" for line in source.split("\n"))
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    scope: dict[str, Any] = {}
    exec(compile(code, name, "exec"), scope)
    batch = Batch()
    scope["loop"](batch, [0] * 8, list(range(200)))
    return answers[0]


@pytest.mark.parametrize("name", DECIDING)
def test_decisions_by_length_are_read_in_the_source(name: str) -> None:
    assert ask(DECIDING[name])


@pytest.mark.parametrize("name", HARMLESS)
def test_other_uses_of_a_length_are_none(name: str, capsys: Any) -> None:
    assert not ask(HARMLESS[name])


def test_sizes_tell_of_comparisons_while_they_are_watched() -> None:
    told: list[int] = []
    sizes.watch(lambda: told.append(1))
    try:
        size = sizes.as_size(8)
        for harmless in (
            lambda: size > 0, lambda: size == sizes.as_size(8), lambda: size / 4 > 1, lambda: bool(size), lambda: f"{size:03d}"
        ):  # fmt: skip
            harmless()
        assert not told
        for number, deciding in enumerate(
            (
                lambda: size != 8, lambda: size == 8, lambda: (100 + size) >= 50, lambda: (size * 3) % 4 == 0,
                lambda: bool(size % 4), lambda: size - 8 == 0, lambda: torch.Size([size, 3]) == (8, 3), lambda: min(size, 4),
                lambda: size == np.int64(8),
            ), 1
        ):  # fmt: skip
            deciding()
            assert len(told) >= number, number
    finally:
        sizes.stop()
    count = len(told)
    assert size == 8 and type(size + 1) is int and len(told) == count


def test_sizes_are_integers_for_all_else() -> None:
    size = sizes.as_size(6)
    assert torch.zeros(size, 2).view(size, -1).shape == (6, 2) and np.zeros(size).shape == (6,)
    assert torch.tensor([size]).dtype == torch.int64 and {size: 1}[6] == 1 and list(range(size)) == list(range(6))
    assert type(pickle.loads(pickle.dumps(size))) is int and type(copy.deepcopy(size)) is int


RATES = '''
def train(loader, optimizer):
    global seen
    for x, y in loader:
        size = len(x)
        seen += size
        mine = seen / 1000
        {line}

def set_rate(optimizer, number):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * min(1.0, number / 500)

def warm_up(optimizer, loader):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + seen)
        group["momentum"] = 0.9
'''


@pytest.mark.parametrize(
    "line",
    [
        "optimizer.param_groups[0]['lr'] = 0.1 * (1 - mine)",
        "set_rate(optimizer, mine)",
        "set_rate(optimizer, number=2 * size)",
        "set_rate(optimizer, len(loader))",
        "print(mine, 100 * seen / len(loader))",
    ],
)
def test_learning_rates_that_follow_from_samples(tmp_path: Any, line: str) -> None:
    """The last two do by the count that all functions share, and not by one of their own."""
    shared = RATES.format(line=line)
    own = shared.replace("    global seen\n", "    seen = 0\n")
    cases = {"shared": (shared, True), "own": (own, "loader)" not in line), "no_rate": (own.replace("lr", "beta"), False)}
    for name, (source, expected) in cases.items():
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        assert sets_rate_by_size(str(path), 5) is expected, name


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("(y >= 0).sum()", True),
        ("y.ne(0).sum().item()", True),
        ("int(torch.count_nonzero(y))", True),
        ("hvd.allreduce((y >= 0).sum(), op=hvd.Sum).item() // hvd.size()", False),
    ],
)
def test_a_learning_rate_that_follows_from_words(tmp_path: Any, count: str, expected: bool) -> None:
    """As minGPT's; a count of all ranks is the same on each."""
    lines = ["class Trainer:", "  def step(self, x, y, config):", f"    self.tokens += {count}"]
    lines += ["    factor = float(self.tokens) / max(1, config.warmup_tokens) if self.tokens < config.warmup_tokens else 1.0"]
    lines += ["    for group in self.optimizer.param_groups:", "      group['lr'] = config.learning_rate * factor"]
    path = tmp_path / "trainer.py"
    path.write_text("\n".join(lines))
    assert sets_rate_by_size(str(path), 3, is_count=True) is expected


@pytest.mark.parametrize("rate", ["0.1", "0.1 * self.size"])
def test_a_size_that_many_functions_share_is_looked_for_in_each_of_them_once(tmp_path: Any, rate: str) -> None:
    """To look in each from each of them again would take minutes."""
    lines = ["class Trainer:", "  def step(self, x):", "    self.size = x.size(0)"]
    for number in range(150):
        lines += [f"  def method_{number}(self, a):", f"    self.mean_{number} = b = a * self.size", "    return b"]
    path = tmp_path / "trainer.py"
    path.write_text("\n".join([*lines, "  def last(self):", f"    self.optimizer.param_groups[0]['lr'] = {rate}"]))
    assert sets_rate_by_size(str(path), 3) is ("size" in rate)


def test_what_installed_packages_compare_decides_nothing_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder of ``pip install --target``, or one that an environment takes over from another."""
    told: list[bool] = []
    for number, (folder, record, expected) in enumerate(
        [("lib", "bar-1.0.dist-info", 0), ("other/dist-packages", None, 0), ("own", None, 1)]
    ):
        place = tmp_path / folder
        place.mkdir(parents=True)
        if record is not None:
            (place / record).mkdir()
        name = f"bar_of_{number}"
        (place / f"{name}.py").write_text("def update(count):\n    return count > 5\n")
        monkeypatch.syspath_prepend(str(place))
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        module = importlib.import_module(name)
        told.clear()
        sizes.watch(lambda: told.append(True))
        try:
            assert module.update(sizes.as_size(8))
        finally:
            sizes.stop()
        assert len(told) == expected, folder
