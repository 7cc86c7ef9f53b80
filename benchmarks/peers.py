"""Today's peers and ours on small models: time to plain Horovod's loss, and loss at equal samples. One command (root):

    python benchmarks/peers.py --record FILE              all of it: installs the peers, tunes, measures, writes the record
    python benchmarks/peers.py install                    torchft and hivemind, into .venv-peers
    python benchmarks/peers.py tune                       three learning rates a method, one host, equal ranks
    python benchmarks/peers.py run --links 100mbit --speeds 1:1 1:2 --seeds 1 --minutes 25
    python benchmarks/peers.py equal --rates 0.003        longer runs on one host, whose rate falls to 0: loss at equal samples
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
import random
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
from peers_task import BATCH, PERIOD, TASKS, Case
from recording import publish

from hvd_adaptive.cluster.relaunch import ranks_command

HERE = Path(__file__).resolve().parent
# Methods that are a script of plain Horovod's under this command.
WRAPPED = {"ours, run --strategy local": ["run", "--strategy", "local"]}
RATES = (0.0015, 0.003, 0.006)
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
METHOD_HELP = f"of {'; '.join(METHODS)}; or ours with fields of Config: 'ours {{\"mega_batch\": 160}}' (default: those named)"
PLAIN_HELP = "measure plain Horovod over a link so long only; its losses are then those of one host, of the same updates"
DECAY_HELP = (
    "in tune and run, too, the rate falls to 0: for plain Horovod at --samples, for others that are to reach its loss at --most "
    "times so many, and they may have it sooner"
)
STAGES = ("install", "tune", "run", "equal", "record")

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=STAGES, help="(default: one after the other)")
    parser.add_argument("--out", type=Path, default=Path("out/peers.jsonl"), help="(default: out/peers.jsonl)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help=METHOD_HELP)
    parser.add_argument("--model", nargs="+", default=["gpt-1m", "resnet"], choices=TASKS, help="(default: gpt-1m resnet)")
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit", "100mbit"], help="loopback, or as tc writes a rate")
    parser.add_argument("--speeds", nargs="+", default=["1:1", "1:2", "1:1:2:4"], help="a rank each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to tune with; one: it counts")
    parser.add_argument("--samples", type=int, default=4800, help="of all ranks, at which losses are compared")
    parser.add_argument("--equal-samples", type=int, default=9600, help="of all ranks, in stage equal")
    parser.add_argument("--warmup", type=int, default=1600, help="samples of all ranks in which the learning rate rises")
    parser.add_argument("--decay", action="store_true", help=DECAY_HELP)
    parser.add_argument("--plain-samples", type=int, help=PLAIN_HELP)
    parser.add_argument("--most", type=float, default=1.5, help="times so many, to reach the target with")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: all ranks share the first GPU")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"samples of a rank's batch (default: {BATCH})")
    parser.add_argument("--period", type=int, help=f"batches of all ranks between equal merges (default: {PERIOD} samples)")
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
    # Whoever stops this stops its run: ranks over two hosts are in sessions of their own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for stage in [options.stage] if options.stage else STAGES:
        if stage == "install":
            install()
        elif stage == "record":
            publish(record(read(options.out), list(METHODS)), options.record)
        else:
            bench = Bench(options, end)
            for model in options.model:
                getattr(bench, stage)(model)


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
    """Names a case, whatever its target; older ones have fewer fields."""
    older = {field.name: field.default for field in dataclasses.fields(Case) if field.default is not dataclasses.MISSING}
    return json.dumps({name: value for name, value in sorted((older | case).items()) if name != "target"})


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

    def tune(self, model: str) -> None:
        """Tries every learning rate with one seed, on one host with equal ranks: a loss at equal samples needs no clock."""
        rates = self._options.rates
        if len(rates) == 1:
            say(f"{model}: nothing to tune, as --rates has one learning rate, which counts")
            return
        groups = dict.fromkeys(tuned_as(name) for name in self._methods)
        # The middle one first: a session that ends early leaves one rate for all.
        middle = rates[len(rates) // 2]
        for rate in sorted(rates, key=lambda rate: rate != middle):
            for name in groups:
                self._once(self._case("tune", name, model=model, lr=rate))

    def run(self, model: str) -> None:
        """Runs the methods in turns, at their best rates."""
        options = self._options
        for seed, link, speeds in itertools.product(options.seeds, options.links, options.speeds):
            num_ranks = len(speeds.split(":"))
            # The others' target. Its updates are the same at all speeds and over all links.
            for name in sorted(self._methods, key=lambda name: name != PLAIN):
                if name.endswith("by hand") and len(set(speeds.split(":"))) == 1:
                    continue
                any_rate = self._case("run", name, model=model, lr=0.0)
                rate = options.rates[0] if len(options.rates) == 1 else best_rate(read(options.out), name, any_rate)
                if rate is None:
                    say(f"{name}: left out, as its learning rate is not tuned. Remedy: python benchmarks/peers.py tune")
                    continue
                case = self._case("run", name, model=model, lr=rate, seed=seed, link=link, speeds=speeds)
                if name != PLAIN:
                    target = self._target(case)
                    self._once(dataclasses.replace(case, most_samples=round(options.most * case.samples), target=target))
                elif options.plain_samples and link != "loopback":
                    there = dataclasses.replace(case, link="loopback", speeds=":".join("1" * num_ranks))
                    self._once(there)
                    self._once(case, curve_of=there)
                else:
                    self._once(case)

    def equal(self, model: str) -> None:
        """Runs all methods with all rates and seeds on one host with equal ranks; the learning rate falls to 0."""
        samples = self._options.equal_samples
        groups = dict.fromkeys(tuned_as(name) for name in self._methods)
        for rate, seed, name in itertools.product(self._options.rates, self._options.seeds, groups):
            # hivemind does not end at a given number of samples.
            if package_of(name) != "hivemind":
                case = self._case("equal", name, model=model, lr=rate, seed=seed)
                self._once(dataclasses.replace(case, samples=samples, most_samples=samples, decay=True))

    def _case(
        self, stage: str, method: str, *, model: str, lr: float, seed: int = 1, link: str = "loopback", speeds: str = "1:1"
    ) -> Case:
        samples, options = self._options.samples, self._options
        return Case(
            stage=stage, method=method, link=link, speeds=speeds, lr=lr, seed=seed, samples=samples, most_samples=samples,
            model=model, warmup=options.warmup, decay=options.decay, device=options.device,
            period=options.period if options.period and method != PLAIN else PERIOD // options.batch, batch=options.batch,
        )  # fmt: skip

    def _target(self, case: Case) -> float | None:
        """Returns the loss of plain Horovod at its own best rate after the case's samples, at any speeds and over any link."""
        results = read(self._options.out)
        rate = best_rate(results, PLAIN, case) or case.lr
        for result in results:
            plain = Case(**result["case"])
            same = (plain.method, plain.decay, len(plain.parts)) == (PLAIN, case.decay, len(case.parts))
            names = ("seed", "samples", "model", "warmup", "device", "batch")
            alike = all(getattr(plain, name) == getattr(case, name) for name in names)
            if same and alike and (plain.stage, plain.lr) == ("run", rate) and "curve" in result:
                return float(result["curve"][-1][2])
        return None

    def _once(self, case: Case, *, curve_of: Case | None = None) -> None:
        """Runs a case, unless it is there, and writes down what came of it.

        Args:
            case: it.
            curve_of: one that is there, with the same losses: the case is run only until its speed is known.
        """
        found = {key(result["case"]): result for result in read(self._options.out)}
        known = found.get(key(dataclasses.asdict(case)))
        if (known is not None and not ("error" in known and self._options.retry)) or time.monotonic() > self._end:
            return
        begin = time.monotonic()
        if curve_of is None:
            result = run_case(case, limit_s=self._options.limit_s)
        else:
            whole = found.get(key(dataclasses.asdict(curve_of)), {})
            if "curve" not in whole:
                return
            short = dataclasses.replace(case, samples=self._options.plain_samples, most_samples=self._options.plain_samples)
            result = run_case(short, limit_s=self._options.limit_s) | {"case": dataclasses.asdict(case)}
            if "curve" in result:
                result = stretched(result, whole["curve"])
        with self._options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        if "error" in result:
            what = result["error"]
        else:
            num_samples, seconds, loss = result["curve"][-1]
            what = f"{loss:.4f} after {num_samples} samples in {seconds:.1f} s, {max(result['sent_mb']):.1f} MB sent a rank"
        took = f"{time.monotonic() - begin:.0f} s in all"
        name = f"{case.model} {case.link} {case.speeds} {case.method}"
        say(f"{time.strftime('%H:%M:%S')} {name}, lr {case.lr:g}, seed {case.seed}: {what}; {took}")


def stretched(short: Result, curve: list[Any]) -> Result:
    """Returns a short run as one of the length of another with the same updates: that one's losses, at its own speed."""
    measured, seconds, _ = short["curve"][-1]
    times = curve[-1][0] / measured
    return {
        **short,
        "curve": [(n, round(n * seconds / measured, 3), loss) for n, _, loss in curve],
        "sent_mb": [round(sent * times, 2) for sent in short["sent_mb"]],
        "measured_samples": measured,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def best_rate(results: list[Result], method: str, like: Case) -> float | None:
    """Returns the learning rate of a method's lowest loss in tuning, of a case's model, schedule and length."""
    names = ("model", "decay", "samples", "warmup", "device", "batch")
    wanted = ("tune", tuned_as(method), *(getattr(like, name) for name in names))
    tuned = [
        (result["curve"][-1][2], case.lr)
        for result in results
        if "curve" in result
        and ((case := Case(**result["case"])).stage, case.method, *(getattr(case, name) for name in names)) == wanted
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
        wrapper = ["-m", "hvd_adaptive", *WRAPPED[case.method]] if case.method in WRAPPED else []
        program = [python, *wrapper, str(HERE / "peers_methods.py"), *files, str(free_port())]
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
        # Linux gives ports from 32768 on to connections of other processes, also between this look and the ranks' start.
        port = random.randrange(20000, 32000, 2)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("", port))
                two.bind(("", port + 1))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    main()
