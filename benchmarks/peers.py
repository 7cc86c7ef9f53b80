"""Today's peers and ours on a small language model: time to plain Horovod's loss and loss at equal samples. One command (root):

    python benchmarks/peers.py --record FILE              all of it: installs the peers, tunes, measures, writes the record
    python benchmarks/peers.py install                    torchft and hivemind, into .venv-peers
    python benchmarks/peers.py tune                       three learning rates a method, one host, equal ranks
    python benchmarks/peers.py run --links 100mbit --speeds 1:1 1:2 --seeds 1 --minutes 25
    python benchmarks/peers.py record --record FILE

Every run adds a line of JSON to --out, and what is there is not repeated, so that it can be measured in pieces. A run that fails
or takes longer than --limit-s leaves a line, too; --retry runs those again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from peers_methods import METHODS, find, package_of, tuned_as
from peers_record import PLAIN, record
from peers_task import Case
from recording import publish

from hvd_adaptive.cluster.relaunch import ranks_command

HERE = Path(__file__).resolve().parent
RATES = (0.0015, 0.003, 0.006)
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
METHOD_HELP = f"of {'; '.join(METHODS)}; or ours with fields of Config: 'ours {{\"mega_batch\": 160}}' (default: those named)"
STAGES = ("install", "tune", "run", "record")

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=STAGES, help="(default: one after the other)")
    parser.add_argument("--out", type=Path, default=Path("out/peers.jsonl"), help="(default: out/peers.jsonl)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help=METHOD_HELP)
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit", "100mbit"], help="loopback, or as tc writes a rate")
    parser.add_argument("--speeds", nargs="+", default=["1:1", "1:2"], help="a rank each, such as 1:1:2:4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to tune with")
    parser.add_argument("--samples", type=int, default=4800, help="of all ranks, at which losses are compared")
    parser.add_argument("--most", type=float, default=1.5, help="times so many, to reach the target with")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of a run")
    parser.add_argument("--minutes", type=float, help="start no run after so many")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    try:
        for name in options.methods:
            find(name)
    except ValueError as error:
        parser.error(str(error))
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for stage in [options.stage] if options.stage else STAGES:
        if stage == "install":
            install()
        elif stage == "record":
            publish(record(read(options.out), list(METHODS)), options.record)
        else:
            bench = Bench(options, end)
            (bench.tune if stage == "tune" else bench.run)()


def install() -> None:
    """Makes an environment of the peers, which takes PyTorch and this project from the present one."""
    if all(missing(package) is None for package in ("torchft", "hivemind")):
        return
    folder = PEERS_PYTHON.parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(__import__("sysconfig").get_paths()["purelib"])
    own = folder / site.relative_to(sys.prefix)
    (own / "zz_reused.pth").write_text(f"{site}\n")
    pip = [str(PEERS_PYTHON), "-m", "pip", "install", "--prefix", str(folder), "-r", str(HERE / "peers.txt")]
    subprocess.run(pip, check=True)


@functools.cache
def missing(package: str) -> str | None:
    """Returns why a peer cannot be used; None: it can."""
    python = str(PEERS_PYTHON if PEERS_PYTHON.exists() else sys.executable)
    done = subprocess.run([python, "-c", f"import {package}"], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def read(path: Path) -> list[Result]:
    """Returns the results; of several of one case the last."""
    found: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        result = json.loads(line)
        found[key(result["case"])] = result
    return list(found.values())


def key(case: dict[str, Any]) -> str:
    """Names a case, whatever its target."""
    return json.dumps({name: value for name, value in case.items() if name != "target"})


class Bench:
    """Runs cases that are not there yet.

    Args:
        options: of the command line.
        end: when no more run is to be started, by time.monotonic().
    """

    def __init__(self, options: argparse.Namespace, end: float) -> None:
        self._options, self._end = options, end
        self._methods = [name for name in options.methods if self._is_there(name)]
        options.out.parent.mkdir(parents=True, exist_ok=True)

    def _is_there(self, method: str) -> bool:
        package = package_of(method)
        if package is None:
            return True
        reason = missing(package)
        if reason is not None:
            say(f"{method}: left out, as {package} is not installed ({reason}). Remedy: python benchmarks/peers.py install")
        return reason is None

    def tune(self) -> None:
        """Tries every learning rate with one seed, on one host with equal ranks: a loss at equal samples needs no clock."""
        groups = dict.fromkeys(tuned_as(name) for name in self._methods)
        # The middle one first: a session that ends early leaves one rate for all.
        middle = self._options.rates[len(self._options.rates) // 2]
        for rate in sorted(self._options.rates, key=lambda rate: rate != middle):
            for name in groups:
                self._once("tune", name, link="loopback", speeds="1:1", lr=rate, seed=1, most=1.0, target=None)

    def run(self) -> None:
        """Runs the methods in turns, at their best rates."""
        options = self._options
        for seed, link, speeds in itertools.product(options.seeds, options.links, options.speeds):
            # The others' target. Its updates are the same at all speeds and over all links.
            for name in sorted(self._methods, key=lambda name: name != PLAIN):
                if name.endswith("by hand") and len(set(speeds.split(":"))) == 1:
                    continue
                rate = best_rate(read(options.out), name)
                if rate is None:
                    say(f"{name}: left out, as its learning rate is not tuned. Remedy: python benchmarks/peers.py tune")
                    continue
                is_plain = name == PLAIN
                target = None if is_plain else self._target(seed, len(speeds.split(":")))
                most = 1.0 if is_plain else options.most
                self._once("run", name, link=link, speeds=speeds, lr=rate, seed=seed, most=most, target=target)

    def _target(self, seed: int, num_ranks: int) -> float | None:
        for result in read(self._options.out):
            case = result["case"]
            wanted = (PLAIN, seed, self._options.samples, best_rate(read(self._options.out), PLAIN), num_ranks)
            same = (case["method"], case["seed"], case["samples"], case["lr"], len(case["speeds"].split(":"))) == wanted
            if same and "curve" in result:
                return float(result["curve"][-1][2])
        return None

    def _once(
        self, stage: str, method: str, *, link: str, speeds: str, lr: float, seed: int, most: float, target: float | None
    ) -> None:
        """Runs a case, unless it is there, and writes down what came of it."""
        samples = self._options.samples
        case = Case(
            stage=stage, method=method, link=link, speeds=speeds, lr=lr, seed=seed, samples=samples,
            most_samples=round(most * samples), target=target,
        )  # fmt: skip
        known = {key(result["case"]): result for result in read(self._options.out)}.get(key(dataclasses.asdict(case)))
        if (known is not None and not ("error" in known and self._options.retry)) or time.monotonic() > self._end:
            return
        begin = time.monotonic()
        result = run_case(case, limit_s=self._options.limit_s)
        with self._options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        if "error" in result:
            what = result["error"]
        else:
            num_samples, seconds, loss = result["curve"][-1]
            what = f"{loss:.4f} after {num_samples} samples in {seconds:.1f} s, {max(result['sent_mb']):.1f} MB sent a rank"
        took = f"{time.monotonic() - begin:.0f} s in all"
        say(f"{time.strftime('%H:%M:%S')} {link} {speeds} {method}, lr {lr:g}, seed {seed}: {what}; {took}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def best_rate(results: list[Result], method: str) -> float | None:
    """Returns the learning rate of the lowest loss in tuning."""
    tuned = [
        (result["curve"][-1][2], result["case"]["lr"])
        for result in results
        if "curve" in result and result["case"]["stage"] == "tune" and result["case"]["method"] == tuned_as(method)
    ]
    return min(tuned)[1] if tuned else None


def run_case(case: Case, *, limit_s: float) -> Result:
    """Runs a case as ranks, and ends all of them at the limit; returns what rank 0 wrote, or the error."""
    python = str(PEERS_PYTHON if package_of(case.method) and PEERS_PYTHON.exists() else sys.executable)
    num_ranks = len(case.parts)
    with tempfile.TemporaryDirectory(prefix="peers-") as text:
        folder = Path(text)
        (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)))
        files = [str(folder / "case.json"), str(folder / "result.json")]
        program = [python, str(HERE / "peers_methods.py"), *files, str(free_port())]
        # Each has a core at most, as in the ranks' own thread.
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "PEERS_RUN": str(folder)}
        hosts = None
        if case.link == "loopback":
            command, env = ranks_command(num_ranks, program)
            env = {**env, **own}
        else:
            from two_hosts import DEVICE, ENVIRONMENT, TwoHosts

            (folder / "hosts").mkdir()
            hosts = TwoHosts(folder / "hosts", case.link)
            forward = ["GLOO_SOCKET_IFNAME", "PEERS_RUN"]
            command = hosts.mpirun(num_ranks // 2, program, forward=forward, shared_memory=True)
            env = {**os.environ, **ENVIRONMENT, **own, "GLOO_SOCKET_IFNAME": DEVICE, "HVD_TEST_JOB": ""}
        log = folder / "log"
        late = False
        try:
            with log.open("w") as file:
                job = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
                try:
                    job.wait(limit_s)
                except subprocess.TimeoutExpired:
                    late = True
        finally:
            if job.poll() is None:
                job.kill()
            end = time.monotonic() + 10
            while (left := processes_of(folder)) and time.monotonic() < end:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            job.wait()
            if hosts is not None:
                hosts.close()
        if (folder / "result.json").exists():
            found: Result = json.loads((folder / "result.json").read_text())
            return found
        why = f"took longer than {limit_s:g} s" if late else f"ended with {job.returncode}"
        tail = log.read_text(errors="replace")[-1500:]
        shutil.copy(log, Path(tempfile.gettempdir()) / "peers-failed.log")
        return {"case": dataclasses.asdict(case), "error": why, "log": tail}


def processes_of(folder: Path) -> list[int]:
    """Returns the ids of a run's processes, also of those that have left its session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"PEERS_RUN={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def free_port() -> int:
    """Returns a port that is free now, with the next one."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("", port + 1))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    main()
