"""Everything that reads what others wrote, fed with mutations of valid input: a clear error or success, nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import logging
import resource
import shutil
import signal
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import torch
from mutate import WORDS, mutate_bytes, mutate_environment, mutate_json, mutate_text
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.cli.option_sources import build_configs, read_config_file, read_environment
from hvd_adaptive.cli.run import run_config
from hvd_adaptive.cli.use_model import build_model
from hvd_adaptive.cluster import binding
from hvd_adaptive.cluster.hosts import parse_hosts
from hvd_adaptive.cluster.relaunch import Launcher, launch_command
from hvd_adaptive.comm.failures import Beat
from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.compress.parse import parse_codec
from hvd_adaptive.compress.policy import parse_policy
from hvd_adaptive.config import Config
from hvd_adaptive.engine.replay import CLAIMS_FILE, read_recording
from hvd_adaptive.report.runs import read_runs
from hvd_adaptive.report.table import summary_table
from hvd_adaptive.session.checkpointer import Checkpointer
from hvd_adaptive.session.session import Session
from hvd_adaptive.state import checkpoint
from hvd_adaptive.state.nested import unflatten_state
from hvd_adaptive.validation import parse_slowdown
from hvd_adaptive.xmc.data import cache, embedded, reader
from hvd_adaptive.xmc.data.source import resolve
from hvd_adaptive.xmc.data.sparse import read_names
from hvd_adaptive.xmc.run_directory import BEST_MODEL, RunDirectory, load_model
from hvd_adaptive.xmc.sparse_mlp import SparseMLP
from hvd_adaptive.xmc.train_config import TrainConfig

CASE_LIMIT_S = 10
_MORE_BYTES = 3 << 30

CONFIG: dict[str, Any] = {
    "strategy": "local", "batch_size": 64, "min_batch_size": 8, "batch_size_rule": "paper", "lr": 0.5, "slowdown": "0:1,2;30:2,1",
    "epochs": 3, "merge_period": "auto", "lr_decay": 0.1, "compression": "maxmin:4; 0*=topk:0.1", "merge_fragments": 1,
    "outer_lr": 0.7, "record": False, "out": "runs/a", "resume": "auto", "target_p1": 0.3, "num_threads": 2, "reference_ranks": 4,
}  # fmt: skip
CONFIGS: tuple[dict[str, Any], ...] = (
    CONFIG,
    {"strategy": "sync", "global_batch_size": 128, "accumulation_steps": 2, "loss_reduction": "sum", "time_limit": 5.0},
    {"strategy": "sma", "sma_alpha": 0.5, "reference_ranks": 2, "elastic_batch": "fixed-per-rank", "hash_interval": 0},
    {"logical_ranks": 4, "merge_period": "fixed", "outer_step": "none", "num_threads": 1, "checkpoint_interval": 0},
    {"perturbation": True, "merge_weights": "paper", "batch_size_rule": "heterogpu", "batch_size_step": 4.0, "lr_rule": "sqrt"},
    {"record": True, "input_gradients": "dense", "momentum": 0.9, "data": "x_train.txt", "test_data": "x_test.txt"},
    {"merge_fragments": 2, "merge_period": "auto", "merge_share": 0.1, "optimizer_state": "average"},
    {"compression": "topk:0.01", "reducer": "hierarchical", "error_feedback": False, "dispatch": "equal"},
)  # fmt: skip
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMP_NUM_THREADS": "2,1", "SLURM_JOB_ID": "7",
    },
    {
        "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "PMIX_RANK": "3", "SLURM_RESTART_COUNT": "1", "SLURM_HET_SIZE": "2",
    },
    {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
    },
)  # fmt: skip
OPTIONS = {
    "HVD_ADAPTIVE_BATCH_SIZE": "32", "HVD_ADAPTIVE_SLOWDOWN": "1,2", "HVD_ADAPTIVE_EPOCHS": "1.5",
    "HVD_ADAPTIVE_OVERLAP_MERGE": "no", "HVD_ADAPTIVE_DRY_RUN": "0", "HVD_ADAPTIVE_STRATEGY": "sync", "PATH": "/bin",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        name: of it.
        weight: its share of all cases.
        errors: what it may raise.
        run: makes a mutation and feeds it.
    """

    name: str
    weight: int
    errors: tuple[type[Exception], ...]
    run: Callable[[Random], object]


class Failure(AssertionError):
    """A case that ended otherwise than in success or a clear error."""


def fuzz(targets: list[Target], seed: int, num_cases: int, *, only: str = "") -> dict[str, Counter[str]]:
    """Runs cases; returns how many of each target ended how.

    Args:
        targets: from :func:`make_targets`.
        seed: of the cases; case k of a target is the same whatever else is run.
        num_cases: over all targets, by their weights.
        only: a target's name; empty: all.

    Raises:
        Failure: with target, seed and number of the case, and its traceback.
    """
    total = sum(target.weight for target in targets)
    counts: dict[str, Counter[str]] = {}
    for target in targets:
        if only not in ("", target.name):
            continue
        counts[target.name] = Counter()
        for number in range(round(num_cases * target.weight / total)):
            counts[target.name][run_case(target, seed, number)] += 1
    return counts


def run_case(target: Target, seed: int, number: int) -> str:
    """Runs one case; returns "accepted" or "refused".

    Raises:
        Failure: for another error, a hang or a huge allocation.
    """
    random = Random(f"{target.name}/{seed}/{number}")
    about = f"target {target.name}, seed {seed}, case {number}"
    try:
        with time_limit(CASE_LIMIT_S):
            target.run(random)
    except target.errors as error:
        if not str(error).strip():
            raise Failure(f"{about}: an error without a message: {error!r}") from error
        return "refused"
    except Exception as error:
        raise Failure(f"{about}:\n{traceback.format_exc()}") from error
    return "accepted"


class _TooLongError(Exception):
    pass


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises in the block if it takes longer. From the main thread."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLongError

    # Of the processor's time, as the machine may be busy; and of the clock's, for what sleeps.
    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 6 * seconds))
    before = [signal.signal(number, end) for _, number, _ in timers]
    try:
        for timer, _, limit_s in timers:
            signal.setitimer(timer, limit_s)
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


_watched = False
_hooked = False


@contextlib.contextmanager
def no_unpickling() -> Iterator[None]:
    """In the block whatever looks up a class for a pickle, or starts a program, raises."""
    global _watched, _hooked

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _watched and event in ("pickle.find_class", "os.system", "subprocess.Popen"):
            raise AssertionError(f"a reader of outside data caused {event}{str(arguments)[:200]}")

    if not _hooked:
        # For the life of the process, so once.
        sys.addaudithook(hook)
        _hooked = True
    _watched = True
    try:
        yield
    finally:
        _watched = False


@contextlib.contextmanager
def memory_limit() -> Iterator[None]:
    """In the block this process gets at most 3 GiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MORE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def make_targets(folder: Path) -> list[Target]:
    """Writes valid input of every kind and returns the readers of it.

    Args:
        folder: an empty one; logging of warnings is switched off by the caller, who expects many.
    """
    readers = _Readers(folder)
    value = (ValueError,)
    return [
        Target("config file, JSON", 12, value, readers.config_json),
        Target("config file, TOML", 8, value, readers.config_toml),
        Target("HVD_ADAPTIVE_*", 10, value, readers.options),
        Target("launcher's environment", 14, (ValueError, RuntimeError), readers.launcher),
        Target("hosts", 5, value, readers.hosts),
        Target("codecs, policies, slowdowns", 6, value, readers.texts),
        Target("data, text", 12, value, readers.data_text),
        Target("data, gzip", 4, value, readers.data_gzip),
        Target("names", 1, value, readers.names),
        Target("data paths", 2, value, readers.paths),
        Target("embedded data", 2, (RuntimeError,), readers.embedded),
        Target("cache", 4, (RuntimeError, ValueError), readers.cache),
        Target("manifest", 5, (checkpoint.RefusedError,), readers.manifest),
        Target("state file", 6, (checkpoint.RefusedError,), readers.state_file),
        Target("state skeleton", 3, value, readers.skeleton),
        Target("checkpoint", 1, (AgreedError,), readers.checkpoint),
        Target("model file", 4, value, readers.model),
        Target("run directory, report", 8, value, readers.run_directory),
        Target("run directory, resume", 3, value, readers.go_on),
        Target("recording", 4, value, readers.recording),
        Target("heartbeat", 3, value, readers.beat),
    ]


class _Readers:
    """Valid input, and what reads it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self._folder = folder
        self._file = folder / "mutated"
        self._lines = b"6 30 5\n" + b"".join(
            f"{i % 5},{(i + 2) % 5} {i}:0.5 {i + 3}:1e-2 {i + 9}:-2\n".encode() for i in range(4)
        ) + b"\n 3:1\n"  # fmt: skip
        rows = embedded.IdRows(np.array([2, 1], np.int64), np.array([0, 3, 2], np.int64))
        names = ["a", "b", "c", "d"]
        self._embedded = embedded.pack(
            embedded.EmbeddedData({"train": rows, "test": rows}, {"train": rows, "test": rows}, names, names)
        )
        for split in ("train", "test"):
            (folder / f"toy_{split}.txt").write_bytes(self._lines)
        (folder / "toy_labels.txt").write_text("".join(f"label {i}\n" for i in range(5)))
        self._source = resolve(str(folder / "toy"), None)
        self._cache = folder / "cache"
        cache.build(self._source, self._cache)
        (self._cache_directory,) = [path for path in self._cache.iterdir() if path.is_dir()]
        self._cached = {path: path.read_bytes() for path in self._cache_directory.iterdir()}
        self._train()
        self._make_run()

    # -- options and environments

    def config_json(self, random: Random) -> object:
        config = dict(random.choice(CONFIGS))
        # Values that are allowed, so that what does not go together is reached as well.
        for item in random.sample(dataclasses.fields(Config), random.choice((0, 1, 2))):
            choices = item.metadata["choices"] or ((True, False) if isinstance(item.default, bool) else ())
            config |= {item.name: random.choice(choices)} if choices else {}
        text = json.dumps(mutate_json(random, config) if random.random() < 0.6 else config)
        text = mutate_text(random, text) if random.random() < 0.2 else text
        self._file = self._folder / "config.json"
        return self._read_config(text)

    def config_toml(self, random: Random) -> object:
        config = random.choice(CONFIGS)
        text = "".join(f"{name.replace('_', '-')} = {json.dumps(value)}\n" for name, value in config.items())
        self._file = self._folder / "config.toml"
        return self._read_config(mutate_text(random, text))

    def _read_config(self, text: str) -> object:
        self._file.write_bytes(text.encode(errors="surrogatepass"))
        return build_configs(read_config_file(str(self._file)))

    def options(self, random: Random) -> object:
        env = mutate_environment(random, OPTIONS)
        return run_config(None, env) if random.random() < 0.3 else build_configs(read_environment(env))

    def launcher(self, random: Random) -> object:
        env = mutate_environment(random, random.choice(ENVIRONMENTS))
        if random.random() < 0.2:
            env |= random.choice(ENVIRONMENTS)
        info = binding.read_launcher(env)
        binding.starts_alone(info, env)
        binding.mpi_environment(info, random.choice((1, 4)))
        binding.requested_threads(env)
        binding.num_restarts(env)
        if random.random() < 0.3:
            binding.check_srun(info, env, "Open MPI v4.1.8", embedded=True)
        if random.random() < 0.3:
            binding.check_world(info, random.choice((1, 2, 4, 7)))
        local_size = min(info.local_size or 1, 1 << 20)
        binding.choose_device(
            random.choice(("auto", "auto", "cpu", "cpu", "cuda", "cuda:1", *WORDS[:8])),
            local_rank=info.local_rank or 0,
            local_size=local_size,
            cuda_device_count=random.choice((1, 2)),
        )
        if random.random() < 0.6:
            # From outside of a world, which is where it may be called.
            env = mutate_environment(random, {"SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "2", "HVD_ADAPTIVE_LR": "1"})
        flavour = random.choice(("openmpi4", "openmpi5", "hydra"))
        return launch_command(
            random.choice((0, 1, 4, 9)), ["x"], env=env, launcher=Launcher("/m", flavour), num_cores=2, is_root=True
        )

    def hosts(self, random: Random) -> object:
        return parse_hosts(mutate_text(random, "alpha:2\nbeta:4\ngamma-1.site.org\n"))

    def texts(self, random: Random) -> object:
        reader, valid = random.choice((
            (parse_slowdown, "0:4,4,2,1;30:1,2,4,4"),
            (parse_codec, "maxmin:4,bucket=1024,nearest"),
            (parse_codec, "topk:0.01,sampled"),
            (parse_codec, "powersgd:4"),
            (parse_policy, "maxmin:4; embedding*=maxmin:8; *.bias=none; <1000=fp16"),
        ))  # fmt: skip
        return reader(mutate_text(random, valid))

    # -- data

    def data_text(self, random: Random) -> object:
        data = mutate_text(random, self._lines.decode()).encode(errors="surrogatepass")
        return self._read_data(mutate_bytes(random, data) if random.random() < 0.3 else data, random)

    def data_gzip(self, random: Random) -> object:
        packed = gzip.compress(self._lines, mtime=0)
        return self._read_data(mutate_bytes(random, packed), random)

    def _read_data(self, data: bytes, random: Random) -> object:
        path = self._folder / "mutated_train.txt"
        path.write_bytes(data)
        reader.read_shape(path)
        return list(reader.read_chunks(path, block_bytes=random.choice((16, 64, 1 << 20))))

    def names(self, random: Random) -> object:
        path = self._folder / "names.txt"
        path.write_bytes(mutate_bytes(random, "eins\nzwei\ndr€i\n".encode()))
        return read_names(path)

    def paths(self, random: Random) -> object:
        folder = self._folder / "paths"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        names = ["toy_train.txt", "toy_test.txt", "toy_labels.txt", "toy_train.txt.gz", "other.train.txt", "train.txt"]
        for name in random.sample(names, random.randint(0, 5)):
            if random.random() < 0.2:
                name = "".join(c for c in mutate_text(random, name) if c.isprintable() and c != "/")[:60]
            if name not in ("", ".", ".."):
                (folder / name).touch()
        places = [f"{folder}/{name}" for name in ("toy", "toi", "toy_train.txt", "x/y")]
        data = random.choice((str(folder), *places, "", None))
        test = random.choice((None, None, None, f"{folder}/toy_test.txt", f"{folder}/toy_tes.txt", str(folder)))
        return resolve(data, test)

    def embedded(self, random: Random) -> object:
        if random.random() < 0.5:
            return embedded.unpack(mutate_bytes(random, self._embedded))
        import lzma

        inner = mutate_bytes(random, lzma.decompress(self._embedded))
        data = embedded.unpack(lzma.compress(inner, preset=0))
        return [embedded.to_chunk(data, split) for split in ("train", "test")]

    def cache(self, random: Random) -> object:
        path = random.choice(list(self._cached))
        original = self._cached[path]
        meta = self._cache_directory / "meta.json"
        try:
            if path == meta and random.random() < 0.7:
                path.write_text(json.dumps(mutate_json(random, json.loads(original))))
            else:
                data = mutate_bytes(random, original)
                path.write_bytes(data)
                # With the size that is expected, so that the content is looked at.
                content = json.loads(self._cached[meta])
                if path != meta:
                    content["files"][path.name] = len(data)
                    meta.write_text(json.dumps(content))
            train, test = cache.open_splits(self._source, self._cache)
            train.get_batch(range(len(train)))
            test.num_nonzeros(), test.label_counts(), train.label_names
        finally:
            path.write_bytes(original)
            meta.write_bytes(self._cached[meta])
        return None

    # -- checkpoints

    def _train(self) -> None:
        self._model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        self._samples = TensorDataset(x, (x.sum(1) > 0).long())
        self._checkpoints = self._folder / "checkpoints"
        session, checkpoints = self._start(self._checkpoints)
        for batch in session.batches(self._samples, num_epochs=1):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(self._model(batch.x), batch.y).backward()
                session.optimizer.step()
        checkpoints.close()
        session.close()
        (self._checkpoint,) = checkpoint.find_checkpoints(self._checkpoints)
        self._saved = {path: path.read_bytes() for path in self._checkpoint.iterdir()}

    def _start(self, folder: Path) -> tuple[Session, Checkpointer]:
        optimizer = torch.optim.Adam(self._model.parameters(), lr=0.01)
        session = Session(self._model, optimizer, Config(batch_size=10, mega_batch=60), transport=LocalTransport())
        return session, Checkpointer(session, folder, interval=1, keep=1)

    def manifest(self, random: Random) -> object:
        path = self._checkpoint / checkpoint.MANIFEST
        return self._with(path, self._mutated_manifest(random, signed=random.random() < 0.7), self._check)

    def _mutated_manifest(self, random: Random, *, signed: bool) -> bytes:
        data = self._saved[self._checkpoint / checkpoint.MANIFEST]
        if not signed:
            return mutate_bytes(random, data)
        body = mutate_json(random, {k: v for k, v in json.loads(data).items() if k != "sha256"})
        if isinstance(body, dict):
            with contextlib.suppress(TypeError):
                body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps(body).encode()

    def _check(self) -> object:
        manifest = checkpoint.read_manifest(self._checkpoint)
        return checkpoint.check_files(self._checkpoint, manifest)

    def _with(self, path: Path, data: bytes, read: Callable[[], object]) -> object:
        try:
            path.write_bytes(data)
            return read()
        finally:
            path.write_bytes(self._saved[path])

    def state_file(self, random: Random) -> object:
        path = random.choice([path for path in self._saved if path.suffix == ".safetensors"])
        data = self._saved[path]
        data = mutate_bytes(random, data) if random.random() < 0.5 else mutate_header(random, data)
        return self._with(path, data, lambda: checkpoint.read_state(path))

    def skeleton(self, random: Random) -> object:
        tensors = {"a": torch.zeros(2), "b": torch.zeros(1, dtype=torch.bfloat16)}
        valid = {
            "x": {"$": "tensor", "name": "a"}, "y": [{"$": "array", "name": "a"}, {"$": "float", "value": "nan"}],
            "z": {"$": "dict", "items": [[1, {"$": "tuple", "items": [1, 2]}], [{"$": "float", "value": "2.5"}, "b"]]},
        }  # fmt: skip
        return unflatten_state(mutate_json(random, valid), tensors)

    def checkpoint(self, random: Random) -> object:
        """The whole way: a file of the checkpoint is another one, and the manifest says that it is right."""
        path = random.choice(list(self._saved))
        manifest = self._checkpoint / checkpoint.MANIFEST
        try:
            if path == manifest:
                path.write_bytes(self._mutated_manifest(random, signed=True))
            else:
                data = mutate_header(random, self._saved[path])
                path.write_bytes(data)
                body = {k: v for k, v in json.loads(self._saved[manifest]).items() if k != "sha256"}
                body["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
                manifest.write_text(json.dumps(body))
            session, checkpoints = self._start(self._folder / "other")
            checkpoints.resume(self._checkpoint)
            session.close()
        finally:
            for file in (path, manifest):
                file.write_bytes(self._saved[file])
        return None

    # -- run directories

    def _make_run(self) -> None:
        self._run = self._folder / "run"
        directory = RunDirectory(self._run)
        directory.write_config(Config(), TrainConfig())
        self._mlp = SparseMLP(30, 5, 4)
        directory.save_model(BEST_MODEL, self._mlp, {"num_features": "30", "num_labels": "5", "hidden_size": "4"})
        ranks = {"batch_size": [64.0, 64.0], "lr": [1.0, 1.0], "weight": [0.5, 0.5], "samples": [32, 32], "wait_s": [0.0, 0.1]}
        for number in range(4):
            directory.add_round({
                "round": number, "epoch": 0.1 * number, "train_s": number + 0.5, "samples": 64 * (number + 1), "loss": 0.5,
                "ranks": ranks, "eval": {"p1": 0.1 * number, "p3": 0.1, "p5": 0.1, "psp1": 0.2}, "utilisation": 0.9,
                "weight_sum": 1.0,
            })  # fmt: skip
        directory.write_summary({
            "label": "a", "strategy": "local", "slowdown": "1,2", "final": {"p1": 0.3, "p3": 0.2, "p5": 0.1}, "best": {"p1": 0.3},
            "train_s": 4.5, "samples_per_s": 100.0, "wait_share": 0.1, "merge_share": 0.1, "utilisation": 0.9, "world_size": 2,
            "ranks_agreed": True, "wall_s": 5.0, "samples": 256, "target_train_s": None, "target_p1": None,
        })  # fmt: skip
        directory.close()
        self._recording = "".join(
            json.dumps(line) + "\n"
            for line in (
                {"identity": {"configuration": "x", "ranks": "2"}},
                {
                    "round": 0, "num_samples": 8, "data": "8 samples", "batch_size": [4.0, 4.0], "lr": [1.0, 1.0],
                    "weight": [0.5, 0.5], "model_hash": None, "claims": [[[0, 4, 4]], [[4, 8, 4]]],
                },
            )
        )  # fmt: skip
        self._run_files = {path: path.read_bytes() for path in self._run.iterdir()}

    def model(self, random: Random) -> object:
        path = self._folder / BEST_MODEL
        data = self._run_files[self._run / BEST_MODEL]
        path.write_bytes(mutate_bytes(random, data) if random.random() < 0.4 else mutate_header(random, data))
        tensors, metadata, _ = load_model(path)
        return build_model(tensors, metadata, num_features=30, num_labels=5)

    def run_directory(self, random: Random) -> object:
        path = self._run / random.choice(("config.json", "summary.json", "rounds.jsonl"))
        original = self._run_files[path]
        try:
            if random.random() < 0.3:
                path.write_bytes(mutate_bytes(random, original))
            elif path.suffix == ".jsonl":
                lines = [json.loads(line) for line in original.splitlines()]
                lines[random.randrange(len(lines))] = mutate_json(random, lines[0])
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            else:
                path.write_text(json.dumps(mutate_json(random, json.loads(original))))
            return summary_table(read_runs([self._run, self._run]))
        finally:
            path.write_bytes(original)

    def go_on(self, random: Random) -> object:
        folder = self._folder / "resumed"
        folder.mkdir(exist_ok=True)
        lines = self._run_files[self._run / "rounds.jsonl"]
        (folder / "rounds.jsonl").write_bytes(mutate_bytes(random, lines))
        directory = RunDirectory(folder, resume=True)
        directory.go_on(random.randrange(5), None)
        return directory.close()

    def recording(self, random: Random) -> object:
        text = self._recording
        if random.random() < 0.7:
            lines = [json.loads(line) for line in text.splitlines()]
            at = random.randrange(len(lines))
            lines[at] = mutate_json(random, lines[at])
            text = "".join(json.dumps(line) + "\n" for line in lines)
        else:
            text = mutate_text(random, text)
        path = self._folder / CLAIMS_FILE
        path.write_bytes(text.encode(errors="surrogatepass"))
        return read_recording(path)

    def beat(self, random: Random) -> object:
        beat = Beat(count=3, phase="working", phase_s=0.5, what="step", host="a", pid=7)
        data = beat.encode()
        if random.random() < 0.6:
            return Beat.decode(json.dumps(mutate_json(random, json.loads(data))).encode())
        return Beat.decode(mutate_bytes(random, data))


def mutate_header(random: Random, data: bytes) -> bytes:
    """Changes the JSON at the head of a safetensors file, or the JSON inside that; its length fits again."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if "state" in metadata and random.random() < 0.6:
        metadata["state"] = json.dumps(mutate_json(random, json.loads(metadata["state"])))
    else:
        header = mutate_json(random, header)
    text = json.dumps(header).encode()
    buffer = io.BytesIO()
    buffer.write(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return buffer.getvalue()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switches the package's log off."""
    logger = logging.getLogger("hvd_adaptive")
    before, logger.disabled = logger.level, True
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.disabled = False
