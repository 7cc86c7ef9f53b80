"""The command over two hosts: it trains and agrees; other data, a cut link and killed ranks end it by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import write_data
from two_hosts import ENVIRONMENT, NETWORK, TwoHosts

COMMAND = [sys.executable, "-m", "hvd_adaptive"]
SAMPLES = 46_071  # of the embedded training split
QUICK = ["--no-calibration", "--hidden-size", "16", "--batch-size", "256", "--eval-rounds", "0"]
LIMIT_S = 12
# The job ends by then, whatever has become of its ranks.
DEAD_S = 110.0
# The ranks on a host that is cut off end by their own clock, and their daemon 10 s later.
FAR_END_S = 60.0


@pytest.fixture
def train(run_job: Any, hosts: TwoHosts, tmp_path: Path) -> Callable[..., Any]:
    def run(*options: str, ranks_per_host: int, **job: Any) -> Any:
        arguments = ["train", "--cache-dir", str(hosts.local / "cache"), "--out", str(tmp_path / "run"), *QUICK]
        command = hosts.mpirun(ranks_per_host, [*COMMAND, *arguments, *options])
        return run_job(command, env=ENVIRONMENT, **{"timeout": 300.0, **job})

    return run


@pytest.mark.root
@pytest.mark.parametrize(("ranks_per_host", "strategy"), [(2, "local"), (1, "horovod")])
def test_two_hosts_train_and_agree(
    train: Any, hosts: TwoHosts, tmp_path: Path, ranks_per_host: int, strategy: str
) -> None:
    job = train("--epochs", "1", "--strategy", strategy, ranks_per_host=ranks_per_host)
    assert job.returncode == 0 and not job.leftover, job.describe()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["hosts"] == ["alpha"] * ranks_per_host + ["beta"] * ranks_per_host
    assert summary["ranks_agreed"] is True and summary["final"]["p1"] > 0.2
    assert summary["samples"] == SAMPLES
    if strategy == "local":  # plain Horovod gives all ranks equally many, so it pads
        assert sum(summary["ranks"]["num_samples"]) == SAMPLES
    assert all(count > 0 for count in summary["ranks"]["num_samples"])
    for name in ("alpha", "beta"):
        (cache,) = [path for path in (hosts.disk(name) / "cache").iterdir() if path.is_dir()]
        assert (cache / "meta.json").exists()


RANK = """
import json, os
from hvd_adaptive.comm import connect
transport = connect(stall_limit_s=30)
place = [transport.rank, transport.host, transport.local_rank, transport.local_size, transport.side._world.address[0]]
os.write(1, (json.dumps(place) + "\\n").encode())
transport.close()
"""


@pytest.mark.root
def test_ranks_know_their_hosts_and_reach_rank_0(run_job: Any, hosts: TwoHosts) -> None:
    job = run_job(hosts.mpirun(2, [sys.executable, "-c", RANK]), env=ENVIRONMENT, timeout=300)
    assert job.returncode == 0, job.describe()
    places = sorted(json.loads(line) for line in job.stdout.splitlines())
    assert [place[:4] for place in places] == [
        [0, "alpha", 0, 2], [1, "alpha", 1, 2], [2, "beta", 0, 2], [3, "beta", 1, 2]
    ]  # fmt: skip
    # Neither 127.0.1.1, which is each host's own name, nor the container bridge, which is on both.
    assert [place[4] for place in places[2:]] == [f"{NETWORK}.1"] * 2


TRAINED = """
import os, torch, hvd_adaptive
model = torch.nn.Linear(512, 512)
optimizer = getattr(torch.optim, "{optimizer}")(model.parameters(), lr=0.01)
session = hvd_adaptive.Session(model, optimizer, hvd_adaptive.Config(batch_size=4))
for batch in session.batches(torch.randn(800, 512), num_epochs=1):
    with session.step(batch):
        model(batch.x).square().mean().backward()
        optimizer.step()
merge = session._strategy.merge
os.write(1, f"{{merge.config.compression}} {{merge.outer.kind}} {{session.num_samples}}\\n".encode())
session.close()
"""


@pytest.mark.root
@pytest.mark.parametrize(("optimizer", "choice"), [("AdamW", "maxmin:4 cautious"), ("Adagrad", "none none")])
def test_merges_of_adam_are_encoded_on_a_slow_link_with_a_warning(
    run_job: Any, hosts: TwoHosts, optimizer: str, choice: str
) -> None:
    hosts.slow("10mbit")
    job = run_job(
        hosts.mpirun(1, [sys.executable, "-c", TRAINED.format(optimizer=optimizer)]), env=ENVIRONMENT, timeout=300
    )
    assert job.returncode == 0, job.describe()
    assert job.stdout.split("\n")[:2] == [f"{choice} 800"] * 2, job.describe()
    assert ("Set compression 'none'" in job.stderr) == (optimizer == "AdamW"), job.describe()
    # Steps are short here, so that 4 bits take long as well.
    assert ("encoded as normal:2 from here on" in job.stderr) == (optimizer == "AdamW"), job.describe()


WRAPPED = """
import torch, horovod.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(512, 512)
data = torch.utils.data.TensorDataset(torch.randn(1920, 512))
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), named_parameters=model.named_parameters())
for (x,) in {batches}:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "batches", "said"),
    [
        # Steps are short here, so that 4 bits take long as well.
        (["--strategy", "local"], "loader", ["Set compression 'none'", "normal:2 from here on", "; compression: normal:2"]),
        # Of no loader: nothing tells how long an epoch is.
        (["--strategy", "local"], "[[x] for x in data.tensors[0].split(4)[: len(loader)]]", ["normal:2 from here on"]),
        (["--dry-run"], "loader", ["ms a step. If the link between the hosts is slow: --compression maxmin:4"]),
    ],
)
def test_a_slow_link_has_a_wrapped_script_encoded_or_told_what_helps(
    run_job: Any, hosts: TwoHosts, tmp_path: Path, options: list[str], batches: str, said: list[str]
) -> None:
    hosts.slow("10mbit")
    script = tmp_path / "script.py"
    script.write_text(WRAPPED.replace("{batches}", batches))
    job = run_job(hosts.mpirun(1, [*COMMAND, "run", *options, str(script)]), env=ENVIRONMENT, timeout=300)
    assert job.returncode == 0, job.describe()
    assert all(text in job.stderr for text in said), job.describe()


@pytest.mark.root
@pytest.mark.parametrize("fault", ["other data", "no data"])
def test_hosts_with_unlike_data_are_refused(train: Any, hosts: TwoHosts, fault: str) -> None:
    for name, value in (("alpha", 1.0), ("beta", 2.0)):
        if fault == "no data" and name == "beta":
            continue
        for split in ("train", "test"):
            rows = "".join(f"{row % 4} {row % 5}:{value}\n" for row in range(40))
            (hosts.disk(name) / f"toy_{split}.txt").write_text(f"40 5 4\n{rows}")
    job = train("--data", str(hosts.local / "toy"), ranks_per_host=1)
    assert job.returncode != 0 and not job.timed_out and not job.leftover, job.describe()
    message = {
        "other data": "the ranks do not agree: fingerprint of the test data",
        "no data": "rank 1: data:",
    }[fault]
    assert job.stderr.count("hvd-adaptive: error:") == 1 and message in job.stderr, job.describe()
    assert "Traceback" not in job.stderr, job.describe()


@pytest.fixture
def disturb(train: Any, tmp_path: Path) -> Callable[..., Any]:
    """Trains for ever, does something in the midst of it, and checks that this ends the job in time."""
    write_data(tmp_path / "data")

    def run(disturbance: Callable[[], object]) -> Any:
        begin_s = float("nan")

        def during(child: subprocess.Popen[bytes]) -> None:
            nonlocal begin_s
            rounds = tmp_path / "run" / "rounds.jsonl"
            while child.poll() is None and not (rounds.exists() and rounds.read_text().count("\n") >= 2):
                time.sleep(0.1)
            disturbance()
            begin_s = time.monotonic()

        options = ["--epochs", "100000", "--mega-batch", "2000", "--stall-limit-s", str(LIMIT_S)]
        job = train("--data", str(tmp_path / "data"), *options, ranks_per_host=2, during=during, grace_s=FAR_END_S)
        took_s = time.monotonic() - job.outlived_s - begin_s
        assert not job.timed_out and job.returncode != 0 and not job.leftover, job.describe()
        assert took_s < DEAD_S, job.describe()
        return job

    return run


@pytest.mark.root
def test_a_cut_link_ends_the_job(disturb: Any, hosts: TwoHosts) -> None:
    job = disturb(hosts.cut)
    assert "on beta (pid " in job.stderr and "is dead, frozen or cut off" in job.stderr, job.describe()
    assert "Rank 0 on alpha found this and ends the job" in job.stderr, job.describe()


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_and_frozen_ranks_of_the_other_host_end_the_job(
    disturb: Any, hosts: TwoHosts, number: signal.Signals
) -> None:
    job = disturb(lambda: hosts.signal_ranks("beta", number))
    if number == signal.SIGKILL:
        # mpirun may be the first to notice.
        assert "on node beta exited on signal 9" in job.stderr or "on beta (pid " in job.stderr, job.describe()
    else:
        assert "on beta (pid " in job.stderr and "is dead, frozen or cut off" in job.stderr, job.describe()


@pytest.mark.root
def test_a_failed_fixture_leaves_nothing(hosts: TwoHosts, tmp_path: Path) -> None:
    def left() -> set[str]:
        """Of this process: another one may be making its own."""
        folders = (Path("/run/netns"), Path("/etc/netns"))
        return {str(path) for folder in folders for path in folder.glob(f"hva-{os.getpid()}-*")}

    with_hosts = left()
    hosts.close()
    before = left()
    assert len(with_hosts - before) == 4
    with pytest.raises(RuntimeError, match="tc"):
        TwoHosts(tmp_path, rate="fast")
    assert left() == before
