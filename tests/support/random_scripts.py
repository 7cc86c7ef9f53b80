"""Horovod scripts, put together at random from script_pieces.txt, under plain Horovod and under ``run`` with unequal shares.

    python tests/support/random_scripts.py --first 1 --count 200 [--np 3]
    python tests/support/random_scripts.py --scripts FOLDER       whole scripts instead: each trains `model`, alike each time
    python tests/support/random_scripts.py --show 17              prints a script

prints a line for each script whose weights differ from plain Horovod's or that ends otherwise, and last how many there were of
each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import runpy
import selectors
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOLERANCE = 1e-7  # of the weights' norm; other orders of summing make 1e-15
_CHUNK = 40  # scripts of one job
_START_S, _SILENCE_S, _END_S = 120.0, 60.0, 20.0
# How likely the usual piece comes, which is a kind's first. It comes among the others as well.
_USUAL = {
    "dataset": 0.3, "sampler": 0.5, "loader": 0.4, "collate": 0.5, "model": 0.2, "wrapper": 0.6, "loss": 0.15, "optimizer": 0.3,
    "distributed": 0.6, "step": 0.35, "loop": 0.5, "epoch": 0.4,
}  # fmt: skip

_SCRIPT = """
import collections, copy, itertools, math, random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Sampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.checkpoint import checkpoint
import horovod.torch as hvd

hvd.init()
torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
N, C, BATCH, EPOCHS, ACCUMULATE, WORKERS = {sizes}
g = torch.Generator().manual_seed(1)
device = torch.device("cpu")
{data}
{dataset}
{sampler}
def parts(samples):
    pairs = [(s["x"], s["y"]) if isinstance(s, dict) else s[:2] for s in samples]
    return torch.stack([torch.as_tensor(x) for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])
{collate}
{loader}
{model}
criterion = nn.CrossEntropyLoss()
noise = nn.Parameter(torch.zeros(()))
if {is_learned}:
    model.register_parameter("noise", noise)
centers = torch.randn(C, C, generator=g)
teacher, average = copy.deepcopy(model).eval(), copy.deepcopy(model)
{wrapper}
{optimizer}
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
{distributed}
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
step, total, seen = 0, 0.0, 0
for epoch in range(EPOCHS):
    {epoch}
"""

_BY_HAND = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler
import horovod.torch as hvd

hvd.init()
torch.manual_seed(11)
torch.set_default_dtype(torch.float64)
g = torch.Generator().manual_seed(3)
X = torch.randn(144, 10, generator=g)
Y = X[:, :4].argmax(1)
data, collate, passes, step = TensorDataset(X, Y), None, 1, 0
model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 4))
before = after = after_synchronize = lambda *batch: None
after_backward = lambda: None
def optimizer_synchronizes():
    optimizer.synchronize()
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
def loader_of():
    return loader
sampler = DistributedSampler(data, hvd.size(), hvd.rank())
loader = DataLoader(data, 6, sampler=sampler)
{changes}
if data is not loader.dataset or collate is not None:
    sampler = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, 6, sampler=sampler, collate_fn=collate)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes)
for epoch in range(2):
    for batch in loader:
        before(*batch)
        loss = loss_of(*batch)
        loss.backward()
        after_backward()
        after_synchronize(*batch)
        if after_backward is optimizer_synchronizes:
            with optimizer.skip_synchronize():
                optimizer.step()
        elif (step + 1) % passes == 0:
            optimizer.step()
        if (step + 1) % passes == 0:
            optimizer.zero_grad()
        after(*batch)
        step += 1
"""


def read_pieces(file: str = "script_pieces.txt") -> dict[str, dict[str, str]]:
    """Reads the pieces: by kind and name. A line ``=== kind: name`` begins one."""
    pieces: dict[str, dict[str, str]] = {}
    _, *parts = re.split(r"^=== (.+): (.*)\n", Path(__file__).with_name(file).read_text(), flags=re.M)
    for kind, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        pieces.setdefault(kind, {})[name] = text.strip("\n")
    return pieces


def _fill(text: str, pieces: dict[str, str]) -> str:
    """Puts pieces in the place of {name}, indented as it is where it stands alone."""

    def put(match: re.Match[str]) -> str:
        indent, name = match.group(1) or "", match.group(2)
        return textwrap.indent(_fill(pieces[name], pieces), indent) if name in pieces else match.group()

    return re.sub(r"(?m)^([ ]*)\{(\w+)\}$|\{(\w+)\}", lambda m: put(m) if m.group(2) else pieces.get(m.group(3), m.group()), text)


def draw(seed: int) -> tuple[dict[str, str], str]:
    """Returns the names of a seed's pieces, and its script."""
    rng, pieces = random.Random(seed), read_pieces()
    data = rng.choice(list(pieces["data"]))
    names = {"data": data}
    for kind, usual in _USUAL.items():
        choices = list(pieces[f"model of {data}" if kind == "model" else kind])
        names[kind] = choices[0] if rng.random() < usual else rng.choice(choices)
    text = {kind: pieces[f"model of {data}" if kind == "model" else kind][name] for kind, name in names.items()}
    form = {"dictionary": "dict", "named": "named", "none": "dict" if names["dataset"] == "dict" else "pair"}
    text["unpack"] = rng.choice(list(pieces[f"unpack {form.get(names['collate'], 'pair')}"].values()))
    accumulate = rng.choice([2, 3]) if names["step"].startswith("accumulate") else 1
    sizes = rng.choice([120, 144, 150, 199]), 5, rng.choice([4, 6, 8]), rng.choice([2, 3]), accumulate, rng.choice([0, 1, 2])
    text["sizes"], text["is_learned"] = str(sizes)[1:-1], str(names["loss"] == "learned")
    text["bool"], text["bag"] = str(rng.random() < 0.5), rng.choice(["mean", "sum", "max"])
    return names, _fill(_SCRIPT, text)


def _run(file: Path) -> Any:
    """Runs a script in this rank; returns its weights as one tensor, or what it raised."""
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader

    hvd.shutdown()
    sys.argv = [str(file)]
    torch.set_default_dtype(torch.float32)
    try:
        values = runpy.run_path(str(file), run_name="__main__")
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    for value in values.values():
        if isinstance(value, DataLoader) and (iterator := value._iterator) is not None:
            iterator._shutdown_workers()
    return torch.cat([value.detach().double().reshape(-1) for value in values["model"].state_dict().values()])


def _compare(got: Any, expected: Any) -> float:
    """Returns the relative difference of weights; both without a number is none."""
    if got.shape != expected.shape:
        return float("inf")
    if bool(got.isnan().any()) and bool(expected.isnan().any()):
        return 0.0
    return float((got - expected).norm() / expected.norm())


def _rank(files: list[Path], shares: str) -> None:
    """What each rank does: all scripts plain, as an interception is for good, then each under run. Rank 0 tells what came."""
    import horovod.torch as hvd
    import torch

    from hvd_adaptive.cli.run import make_engine
    from hvd_adaptive.wrap.run_options import RunConfig
    from hvd_adaptive.wrap.script import start_world

    torch.set_num_threads(1)
    start_world()
    hvd.init()
    rank = hvd.rank()

    def say(file: Path, at: str, **values: Any) -> None:
        if rank == 0:
            print("CASE " + json.dumps({"name": file.stem, "at": at, **values}), flush=True)

    plain = []
    for file in files:
        say(file, "plain")
        plain.append(_run(file))
    engine = make_engine(RunConfig(shares=shares, interval=5), None)
    for file, expected in zip(files, plain, strict=True):
        if isinstance(expected, str):
            say(file, "done", end="invalid", text=expected)
            continue
        say(file, "wrapped")
        before = len(engine.report.loaders)
        got = _run(file)
        loaders = [loader for loader in engine.report.loaders[before:] if loader.num_steps]
        found: dict[str, Any] = {
            "reasons": sorted({reason.name for loader in loaders for reason in loader.reasons}),
            "shared": sum(loader.num_shared for loader in loaders),
            "steps": sum(loader.num_steps for loader in loaders),
        }
        if isinstance(got, str):
            say(file, "done", end="raised", text=got, **found)
            continue
        difference = max(hvd.allgather_object(_compare(got, expected), name="difference"))
        end = "differs" if not difference <= TOLERANCE else "shared" if found["shared"] else "equal"
        say(file, "done", end=end, difference=difference, **found)


def _job(files: list[Path], num_ranks: int, shares: str) -> Iterator[dict[str, Any]]:
    """Starts ranks; yields what they tell, and last, if they do not come to their end, what was at fault."""
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    # The environment's own, also where it is not activated.
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    command = [shutil.which("mpirun", path=folders) or "mpirun"]
    command += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "^ofi"]
    command += ["-np", str(num_ranks), sys.executable, __file__, "--rank", "--np", str(num_ranks), "--shares", shares]
    with tempfile.TemporaryFile("w+") as errors, selectors.DefaultSelector() as selector:
        process = subprocess.Popen([*command, *map(str, files)], stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ)
        case, rest, limit_s = {"name": files[0].stem, "at": "start"}, b"", _START_S
        while selector.select(limit_s) and (piece := process.stdout.read()):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"CASE "):
                    case, limit_s = json.loads(line[5:]), _SILENCE_S
                    yield case
        is_over = case["at"] == "done" and case["name"] == files[-1].stem
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        if not is_over:
            errors.seek(0)
            yield {**case, "at": "done", "end": "ended the job", "text": f"at {case['at']}: {errors.read()[-1500:]}"}


def campaign(
    files: list[Path],
    num_ranks: int,
    shares: str = "",
    names: dict[str, dict[str, str]] | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda case: None,
) -> Counter[str]:
    """Runs scripts, and prints those that differ. A script that ends its job, or hangs in it, is one of them.

    Args:
        files: the scripts.
        num_ranks: number of ranks.
        shares: as of ``run``; "": each rank twice as much as the one before.
        names: of the pieces, by the script's name.
        tell: gets what came of each script.

    Returns:
        How many scripts there were of each end.
    """
    ends: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    shares = shares or ",".join(str(2**rank) for rank in range(num_ranks))
    todo = list(files)
    while todo:
        over = set()
        for case in _job(todo[:_CHUNK], num_ranks, shares):
            if case["at"] != "done" or case["name"] in over:
                continue
            over.add(case["name"])
            tell(case)
            # What BatchNorm sees is each rank's own batch, of any size.
            pieces = (names or {}).get(case["name"], {})
            if case["end"] == "differs" and case["shared"] and pieces.get("model") == "batchnorm":
                case["end"] = "own statistics"
            ends[case["end"]] += 1
            reasons.update(case.get("reasons", ()))
            if case["end"] not in ("shared", "equal", "own statistics") or os.environ.get("ALL"):
                print(json.dumps({**case, **pieces}), flush=True)
        todo = [file for file in todo if file.stem not in over]
    print("; ".join(f"{count} {end}" for end, count in ends.most_common()))
    print("reasons for equal shares:", "; ".join(f"{count} {name}" for name, count in reasons.most_common()), flush=True)
    return ends


def drawn_campaign(first: int, count: int, num_ranks: int, shares: str = "") -> Counter[str]:
    """The same of scripts that are drawn, with seeds from `first` on."""
    with tempfile.TemporaryDirectory() as folder:
        files, names = [], {}
        for seed in range(first, first + count):
            file = Path(folder) / f"seed{seed}.py"
            names[file.stem], text = draw(seed)
            file.write_text(text)
            files.append(file)
        return campaign(files, num_ranks, shares, names)


def by_hand_campaign(num_ranks: int) -> dict[str, str]:
    """Runs the scripts of whole_batch_scripts.txt; returns those that end otherwise than said there, and how."""
    with tempfile.TemporaryDirectory() as folder:
        expected, files, wrong = {}, [], {}
        for reason, scripts in read_pieces("whole_batch_scripts.txt").items():
            for name, text in scripts.items():
                files.append(Path(folder) / f"{name}.py")
                files[-1].write_text(_fill(_BY_HAND, {"changes": text}))
                expected[name] = reason

        def tell(case: dict[str, Any]) -> None:
            reason = expected[case["name"]]
            if case["end"] != ("shared" if reason == "SHARED" else "equal") or reason not in ("SHARED", *case["reasons"]):
                wrong[case["name"]] = json.dumps(case)

        campaign(files, num_ranks, tell=tell)
        return wrong


def main() -> int:
    """Runs a campaign; returns 1 if a script differed or ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--shares", default="")
    parser.add_argument("--show", type=int)
    parser.add_argument("--scripts", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.show is not None:
        print(draw(options.show)[1])
        return 0
    if options.rank:
        _rank(options.files, options.shares)
        return 0
    if options.scripts:
        files = [options.scripts] if options.scripts.is_file() else sorted(options.scripts.glob("*.py"))
        ends = campaign(files, options.np, options.shares)
    else:
        ends = drawn_campaign(options.first, options.count, options.np, options.shares)
    return 1 if ends["differs"] or ends["raised"] or ends["ended the job"] else 0


if __name__ == "__main__":
    sys.exit(main())
