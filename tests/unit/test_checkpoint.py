"""Checkpoints over simulated ranks: complete, whole or refused by name, and never in the way of training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import json
import logging
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_disk import small_disk
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.session import checkpointer, session_state
from hvd_adaptive.session.checkpointer import Checkpointer, Counts
from hvd_adaptive.session.resume import Identity
from hvd_adaptive.session.session import Session
from hvd_adaptive.state import checkpoint
from hvd_adaptive.state.folder_owner import FolderLostError, FolderOwner
from hvd_adaptive.state.nested import flatten_state
from hvd_adaptive.state.random_state import seeded_random_state
from hvd_adaptive.xmc.defaults import resume_options
from hvd_adaptive.xmc.run_directory import BEST_MODEL, RunDirectory, load_model
from hvd_adaptive.xmc.train_config import TrainConfig

NUM_SAMPLES = 300
X = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()
# Three rounds an epoch.
CONFIG = Config(batch_size=16, mega_batch=100)


def make_model() -> nn.Module:
    # Float and integer buffers, random numbers in every step, a frozen layer.
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    model[3].requires_grad_(False)
    return model


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(
    transport: LocalTransport,
    folder: Path,
    *,
    num_epochs: float = 1,
    config: Config = CONFIG,
    resume: bool | Path = False,
    model: Callable[[], nn.Module] = make_model,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_adam,
    on_start: Callable[[Session], None] = lambda session: None,
    on_round: Callable[[Session, Any], None] = lambda session, record: None,
    settle: bool = True,
    **options: Any,
) -> dict[str, Any]:
    net = model()
    session = Session(net, optimizer(net), config, transport=transport)
    records: list[Any] = []
    session.records += [records.append, lambda record: on_round(session, record)]
    on_start(session)
    if settle:
        # So that none is skipped.
        session.before_gather.append(lambda stats: checkpoints._thread and checkpoints._thread.join())
    options.setdefault("interval", 1)
    checkpoints = Checkpointer(session, folder, **options)
    source = None
    if resume:
        source = checkpoints.resume(None if resume is True else resume)
    resumed = flatten_state(session.state_dict())
    rows = []
    for batch in session.batches(TensorDataset(X, Y), num_epochs=num_epochs):
        rows.append(batch.rows)
        with session.step(batch):
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch.x), batch.y).backward()
            session.optimizer.step()
    counts = checkpoints.close()
    state = flatten_state(session.state_dict())
    session.close()
    return {
        "rows": rows, "counts": counts, "state": state, "resumed": resumed, "source": source, "records": records,
        "session": session, "hash": model_hash(net),
    }  # fmt: skip


def run(world_size: int, folder: Path, **options: Any) -> list[dict[str, Any]]:
    return LocalWorld(world_size).run(lambda transport: train(transport, folder, **options))


def differences(a: tuple[Any, Any], b: tuple[Any, Any], ignore: tuple[str, ...] = ()) -> list[str]:
    """Names of what differs between two states, without the parts that are named in ``ignore``, at any depth."""

    def leaves(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {where: value}
        return {k: v for name, item in value.items() if name not in ignore for k, v in leaves(item, f"{where}.{name}").items()}

    plain, other = leaves(a[0], ""), leaves(b[0], "")
    tensors, others = ({k: v for k, v in x[1].items() if not set(k.split(".")) & set(ignore)} for x in (a, b))
    found = [name for name in plain.keys() | other.keys() if plain.get(name, "none") != other.get(name, "none")]
    found += tensors.keys() ^ others.keys()
    return found + [name for name in tensors.keys() & others.keys() if not torch.equal(tensors[name], others[name])]


# What is measured in seconds, and so never repeats.
MEASURED = ("train_s", "control", "speed_model", "damping")


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        Config(batch_size=16, mega_batch=100, outer_step="momentum", optimizer_state="average", warmup_epochs=1.5),
        Config(
            batch_size=16, mega_batch=100, batch_size_rule="heterogpu", min_batch_size=4, batch_size_step=3, lr_decay=0.1
        ),
        Config(batch_size=16, mega_batch=100, strategy="horovod"),
        Config(batch_size=16, mega_batch=100, strategy="sync"),
        Config(batch_size=16, mega_batch=100, logical_ranks=3),
    ],
    ids=["local", "average", "heterogpu", "horovod", "sync", "logical"],
)
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, config: Config) -> None:
    torch.manual_seed(1)
    whole = run(1, tmp_path / "whole", num_epochs=4, config=config, interval=0)[0]
    torch.manual_seed(1)
    # In the middle of an epoch; the first part's weights must not be those of the second's fresh model.
    first = run(1, tmp_path / "parts", num_epochs=1.5, config=config)[0]
    assert 0 < first["session"].ledger.cursor < NUM_SAMPLES
    torch.manual_seed(2)
    second = run(1, tmp_path / "parts", num_epochs=4, config=config, resume=True)[0]
    assert second["source"].name == f"round-{first['session'].round:08}"
    assert differences(whole["state"], second["state"], ignore=MEASURED) == []
    rows = [row for part in (first, second) for batch in part["rows"] for row in batch]
    assert rows == [row for batch in whole["rows"] for row in batch]
    assert whole["hash"] == second["hash"]


def test_every_rank_gets_back_what_it_had(tmp_path: Path) -> None:
    config = Config(batch_size=16, mega_batch=100, batch_size_rule="paper", optimizer_state="keep")
    first = run(3, tmp_path, num_epochs=1, config=config)
    torch.manual_seed(2)
    second = run(3, tmp_path, num_epochs=1, resume=True, config=dataclasses.replace(config, hash_interval=1))
    for before, after in zip(first, second, strict=True):
        assert differences(before["state"], after["resumed"]) == []
    # A rank that took no samples at all has none.
    one, two = (
        {name: t for name, t in rank["state"][1].items() if name.startswith("own.strategy.optimizer") and "exp_avg" in name}
        for rank in first[:2]
    )
    assert (one or two) and not (one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 3), (3, 1)])
def test_another_number_of_ranks_consumes_every_sample_once(
    tmp_path: Path, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[tuple[int, int]] = []

    def watched(seed: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
        seeded.append(seed[1:])
        return seeded_random_state(seed, device)

    monkeypatch.setattr(session_state, "seeded_random_state", watched)
    first = run(before, tmp_path, num_epochs=1.5)
    second = run(after, tmp_path, num_epochs=3, resume=True)
    consumed = np.concatenate([rows for result in first + second for rows in result["rows"]])
    assert np.array_equal(np.bincount(consumed, minlength=NUM_SAMPLES), np.full(NUM_SAMPLES, 3))
    assert len({result["hash"] for result in second}) == 1
    assert second[0]["session"].num_samples == 3 * NUM_SAMPLES and second[0]["session"].round == 9
    for rank, result in enumerate(second):
        theirs = first[rank % before]["state"]
        changed = differences(theirs, result["resumed"], ignore=("world_size", "speed_model"))
        # One rank has no outer step.
        kept = ("optimizer", "model", "outer") if after > 1 else ("optimizer", "model")
        optimizer = [name for name in changed if any(part in name for part in kept)]
        assert optimizer == []
    # A rank that was not there draws numbers of its own.
    assert sorted(seeded) == [(rank, 5) for rank in range(before, after)]


def test_another_reference_scales_the_batch_sizes_that_were_saved(tmp_path: Path) -> None:
    """As in a fresh run, whose learning rate is for the new size."""
    rates: list[float] = []

    def watch(session: Session) -> None:
        session.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))

    def go_on(num_epochs: int, **options: Any) -> set[float]:
        rates.clear()
        sgd = lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)  # noqa: E731
        config = Config(batch_size=16, mega_batch=150, **options)
        results = run(2, tmp_path, num_epochs=num_epochs, config=config, optimizer=sgd, on_start=watch, resume=num_epochs > 1)
        return {float(size) for record in results[0]["records"] for size in record.stats["batch_size"]}

    for num_epochs, options, size in (
        (1, {}, 16), (2, {"reference_ranks": 4}, 32), (3, {"reference_ranks": 4, "elastic_batch": "fixed-per-rank"}, 16),
        (4, {"reference_ranks": 3}, 24), (5, {"reference_ranks": 2}, 16),
    ):  # fmt: skip
        assert go_on(num_epochs, **options) == {size}
        # A round's last batch may be a sixteenth larger.
        assert 0.1 <= max(rates) < 0.107


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_manifest(folder: Path, **values: Any) -> None:
    path = folder / checkpoint.MANIFEST
    manifest = {**json.loads(path.read_text()), **values}
    del manifest["sha256"]
    path.write_text(json.dumps({**manifest, "sha256": checkpoint._digest(manifest)}))


def edit_state(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the state in a file, as another version of the program would have written it."""
    state = checkpoint.read_state(folder / name)
    change(state)
    (folder / name).unlink()
    written = checkpoint.write_state(folder / name, *flatten_state(state))
    files = json.loads((folder / checkpoint.MANIFEST).read_text())["files"]
    edit_manifest(folder, files={**files, name: {"bytes": written.num_bytes, "sha256": written.sha256}})


def edit_shared(**changes: Any) -> Callable[[Path], None]:
    """Changes entries of the strategy's shared state; ``...`` removes one."""

    def change(state: dict[str, Any]) -> None:
        for name, value in changes.items():
            del state["strategy"][name]
            state["strategy"] |= {} if value is ... else {name: value}

    return lambda folder: edit_state(folder, "global.safetensors", change)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "byte of the model": (lambda f: flip(f / "global.safetensors"), r"global\.safetensors is damaged"),
    "byte of a rank": (lambda f: flip(f / "rank-0001.safetensors"), r"rank-0001\.safetensors is damaged"),
    "byte of the manifest": (
        lambda f: (f / "MANIFEST.json").write_text((f / "MANIFEST.json").read_text().replace('"cursor": ', '"cursor": 1')),
        r"MANIFEST\.json is damaged: its checksum",
    ),
    "half a manifest": (lambda f: os.truncate(f / "MANIFEST.json", 100), r"MANIFEST\.json is damaged"),
    "truncated": (lambda f: os.truncate(f / "global.safetensors", 1000), r"global\.safetensors has 1000 bytes instead of"),
    "missing": (lambda f: (f / "rank-0000.safetensors").unlink(), r"rank-0000\.safetensors cannot be read"),
    "no manifest": (lambda f: (f / "MANIFEST.json").unlink(), r"MANIFEST\.json cannot be read"),
    "newer": (lambda f: edit_manifest(f, version=99), r"checkpoint format 99, newer than 1"),
    "foreign format": (lambda f: edit_manifest(f, format="x"), r"is no checkpoint of hvd_adaptive"),
    "foreign data": (lambda f: edit_manifest(f, data={"d": "2"}), r"of other data: d is 2 there and 1 here"),
    "foreign model": (
        lambda f: edit_manifest(f, model=[["0.weight", [9, 9], "torch.float32", True]]),
        r"of another model: \['0.weight', \[9, 9\], 'torch.float32', True\] there",
    ),
    "missing state": (edit_shared(control=...), r"round-\d+: global\.safetensors\.strategy has no 'control'"),
    "state of another kind": (
        edit_shared(control={"period": 3}), r"global\.safetensors\.strategy\.control has no 'ceilings'"
    ),
    "ill-typed number": (
        lambda f: edit_state(f, "global.safetensors", lambda state: state.update(train_s="1")),
        r"global\.safetensors\.train_s should be of type float, and is str",
    ),
    "ill-typed flag": (edit_shared(warming_up=0), r"strategy\.warming_up should be of type bool, and is int"),
    "no state at all": (
        lambda f: edit_state(f, "rank-0001.safetensors", dict.clear), r"rank 1: .*rank-0001\.safetensors has no 'strategy'"
    ),
    "foreign optimizer": (
        lambda f: edit_state(f, "rank-0001.safetensors", lambda state: state["strategy"]["optimizer"].clear()),
        r"rank 1: .*optimizer has no 'state'",
    ),
    "foreign random state": (
        lambda f: edit_state(f, "rank-0000.safetensors", lambda state: state["random"].pop("numpy")),
        r"rank 0: .*its state has no 'numpy'",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def three_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of two ranks, to copy."""
    folder = tmp_path_factory.mktemp("three")
    run(2, folder, num_epochs=1, data={"d": "1"})
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_valid_is_refused_by_name_and_the_older_is_taken(
    tmp_path: Path, three_of_two_ranks: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(three_of_two_ranks, tmp_path, dirs_exist_ok=True)
    act, reason = DAMAGE[damage]
    act(tmp_path / "round-00000003")
    results = run(2, tmp_path, num_epochs=1, resume=True, data={"d": "1"})
    assert {result["source"].name for result in results} == {"round-00000002"}
    assert sum(len(rows) for result in results for rows in result["rows"]) == 100
    refusals = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(refusals) == 1 and "trying the next older one" in refusals[0]
    caplog.clear()
    # Not lost, but no longer the newest of this run.
    assert (tmp_path / "set-aside-1-round-00000003").is_dir()
    assert checkpoint.find_checkpoints(tmp_path)[0].name == "round-00000003"
    for path in checkpoint.find_checkpoints(tmp_path):
        act(path)
    with pytest.raises(AgreedError, match=reason) as error:
        run(2, tmp_path, resume=True, data={"d": "1"})
    assert str(error.value).count("checkpoint refused") == 3 and "no valid checkpoint is left" in str(error.value)


def test_a_run_that_goes_back_keeps_what_it_saves_from_there_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a divergence, in session.records: what came after the state it goes back to is set aside."""
    states: dict[int, dict[int, Any]] = {0: {}, 1: {}}

    def go_back(session: Session, record: Any) -> None:
        own = states[session.rank]
        if session.round == 2:
            own.setdefault(2, copy.deepcopy(session.state_dict()))
        if session.round == 5 and not own.get(0):
            own[0] = True
            session.load_state_dict(own[2])
        if session.round == 3 and own.get(0):
            session.stop(agreed=True)

    results = run(2, tmp_path, num_epochs=3, on_round=go_back)
    assert {result["session"].round for result in results} == {3}
    assert [path.name for path in checkpoint.find_checkpoints(tmp_path)] == ["round-00000003", "round-00000002"]
    assert (tmp_path / "set-aside-1-round-00000004").is_dir()
    resumed = run(2, tmp_path, num_epochs=1, resume=True)
    for ended, later in zip(results, resumed, strict=True):
        assert later["source"].name == "round-00000003" and not differences(ended["state"], later["resumed"])


def test_a_rank_that_cannot_load_makes_all_take_the_older(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(2, tmp_path, num_epochs=1)
    read = checkpoint.read_state

    def fail(path: Path) -> Any:
        if path.parent.name == "round-00000003" and path.name == "rank-0001.safetensors":
            raise checkpoint.RefusedError("a stale file handle")
        return read(path)

    monkeypatch.setattr(checkpoint, "read_state", fail)
    results = run(2, tmp_path, num_epochs=1, resume=True)
    assert {result["source"].name for result in results} == {"round-00000002"}
    assert "rank 1: " in caplog.text and "a stale file handle" in caplog.text


AUTO_BITS: dict[str, Any] = {"compression": "maxmin:5", "auto_bits": 2, "mega_batch": 32}


@pytest.mark.parametrize("config", [Config(batch_size=16, **AUTO_BITS), Config(batch_size=16, strategy="sync", **AUTO_BITS)])
@pytest.mark.parametrize("damage", ["unreadable", "other bits", "other rounds"])
def test_with_bits_of_their_own_all_take_the_older_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, config: Config, damage: str
) -> None:
    """The ranks must not meet before each knows that its own state can be loaded."""
    run(2, tmp_path, num_epochs=1, config=config)
    newest, older = [path.name for path in checkpoint.find_checkpoints(tmp_path)[:2]]
    read = checkpoint.read_state

    def fail(path: Path) -> Any:
        state = read(path)
        if path.parent.name == newest and path.name == "rank-0001.safetensors":
            if damage == "unreadable":
                raise checkpoint.RefusedError("a stale file handle")
            own = state["strategy"]["compressed"]
            own = own.get("sum", own)
            if damage == "other bits":
                own["exchange"]["policy"] = "maxmin:3"
            else:
                own["num_rounds"] += 1
        return state

    monkeypatch.setattr(checkpoint, "read_state", fail)
    results = run(2, tmp_path, num_epochs=1, config=config, resume=True)
    assert {result["source"].name for result in results} == {older}
    assert ("a stale file handle" if damage == "unreadable" else "the ranks' codecs differ") in caplog.text
    assert len({result["hash"] for result in results}) == 1


def test_only_options_that_are_left_open_follow_from_others() -> None:
    assert "merge_period" in resume_options(Config(), TrainConfig())["by_default"]
    # There auto is a choice.
    assert "merge_period" not in resume_options(Config(merge_period="auto"), TrainConfig())["by_default"]


def test_changed_options_are_an_error_that_names_both_values(tmp_path: Path) -> None:
    run(2, tmp_path, options={"lr": 1.0, "epochs": 1})
    (tmp_path / ".part-1-round-00000009").mkdir()
    with pytest.raises(AgreedError, match=r"batch_size was 16 and is 32; .*seed was 0 and is 1; lr was 1.0 and is 2.0"):
        run(2, tmp_path, resume=True, config=Config(batch_size=32, mega_batch=100, seed=1), options={"lr": 2.0})
    assert (tmp_path / ".part-1-round-00000009").exists(), "the job that was refused removed what another one may be writing"
    config = Config(batch_size=16, mega_batch=100, stall_limit_s=99, slowdown="1,1,1", hash_interval=1)
    options: dict[str, Any] = {"options": {"lr": 1.0, "epochs": 2}, "may_change": frozenset({"epochs"})}
    assert run(3, tmp_path, num_epochs=2, resume=True, config=config, **options)[0]["session"].ledger.epoch == 2


def test_options_that_follow_from_others_are_named_only_where_nothing_else_differs() -> None:
    """Who has changed the optimizer alone is not told of the learning rate that goes with it."""

    def changed(theirs: dict[str, Any], **ours: Any) -> list[str]:
        identity = Identity(model=[], data={}, options={"optimizer": "sgd", "lr": 2.0, "by_default": ["lr"], **ours})
        return identity.changed_options({"options": {"optimizer": "adam", "lr": 0.1, **theirs}}, frozenset())

    optimizer, lr = "optimizer was 'adam' and is 'sgd'", "lr was 0.1 and is 2.0"
    assert changed({"by_default": ["lr"]}) == changed({}) == [optimizer]
    assert changed({"by_default": ["lr"]}, by_default=[]) == [optimizer, lr]
    assert changed({"by_default": []}) == [optimizer, f"{lr} by default"]
    assert changed({"optimizer": "sgd"}) == [f"{lr} by default"]


def test_the_newest_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    (tmp_path / ".part-7-round-00000009").mkdir()
    results = run(2, tmp_path, num_epochs=3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".owner", "round-00000008", "round-00000009"]
    assert results[0]["counts"] == results[1]["counts"] == Counts(written=9)


def test_resume_from_an_older_one_by_name(tmp_path: Path) -> None:
    first = run(1, tmp_path / "a", num_epochs=1)[0]
    older = tmp_path / "a" / "round-00000002"
    fork = run(1, tmp_path / "b", num_epochs=1, resume=older)[0]
    assert fork["source"] == older and fork["hash"] == first["hash"]
    assert len(checkpoint.find_checkpoints(tmp_path / "a")) == 3
    with pytest.raises(AgreedError, match="there is no checkpoint in"):
        run(1, tmp_path / "b", resume=tmp_path / "nothing")
    with pytest.raises(AgreedError, match=r"x cannot be read: .*File name too long"):
        run(2, tmp_path / "b", resume=tmp_path / ("x" * 300))


def test_nothing_to_resume_from_starts_fresh_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = run(2, tmp_path, resume=True)[0]
    assert result["source"] is None and result["session"].round == 3
    assert f"no checkpoint in {tmp_path}: starting fresh" in caplog.text


@pytest.mark.parametrize("save", [False, True])
def test_a_run_that_does_not_go_on_from_a_folders_checkpoints_is_refused(tmp_path: Path, save: bool) -> None:
    """Its own would be removed as older ones, and a resume would take the other run's."""
    run(2, tmp_path / "c", num_epochs=2)
    before = sorted(path.name for path in (tmp_path / "c").iterdir())

    def save_at_once(transport: LocalTransport, folder: Path) -> None:
        model = make_model()
        Checkpointer(Session(model, make_adam(model), CONFIG, transport=transport), folder).save()

    def body(transport: LocalTransport) -> None:
        said = f"c holds checkpoints of another run, the newest {tmp_path / 'c' / before[-1]}, .* Checkpointer.resume"
        with pytest.raises(AgreedError, match=said):
            (save_at_once if save else train)(transport, tmp_path / "c")

    LocalWorld(2).run(body)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == before
    # Further Checkpointers of the same run are none of another.
    run(1, tmp_path / "d", interval=0, on_round=lambda session, record: Checkpointer(session, tmp_path / "d").save())
    assert len(checkpoint.find_checkpoints(tmp_path / "d")) == 3


def test_a_failed_write_is_an_error_in_the_log_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, write = os.fsync, checkpoint.write_state

    # The other rank's thread writes at the same time.
    writer = threading.local()

    def full_disk(descriptor: int) -> None:
        if writer.path.name == "rank-0001.safetensors" and "round-00000002" in str(writer.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    def watched(path: Path, *arguments: Any) -> Any:
        writer.path = path
        try:
            return write(path, *arguments)
        finally:
            writer.path = Path()

    monkeypatch.setattr(os, "fsync", lambda fd: full_disk(fd) if hasattr(writer, "path") else fsync(fd))
    monkeypatch.setattr(checkpoint, "write_state", watched)
    results = run(2, tmp_path, num_epochs=1)
    assert [path.name for path in checkpoint.find_checkpoints(tmp_path)] == ["round-00000003", "round-00000001"]
    assert not list(tmp_path.glob(".part*"))
    assert results[0]["counts"].failed == 1 and results[0]["session"].round == 3
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "rank 1: " in errors[0] and "rank-0001.safetensors" in errors[0] and "No space left" in errors[0]
    assert f"the last checkpoint is {tmp_path / 'round-00000001'}" in errors[0]


@pytest.mark.root
def test_a_disk_that_is_really_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root rights")
    try:
        # One checkpoint of two ranks is some 40 KiB.
        said = r"the last round, 6, is not saved: .*No space left.*; the last checkpoint is .*round-"
        with pytest.raises(AgreedError, match=said):
            run(2, disk, num_epochs=2, keep=1)
        (newest,) = checkpoint.find_checkpoints(disk)
        checkpoint.check_files(newest, checkpoint.read_manifest(newest))
        assert not list(disk.glob(".part*"))
    finally:
        subprocess.run(["umount", disk], check=True)
    assert "No space left on device" in caplog.text and f"{disk}/.part-" in caplog.text


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, released = checkpoint.write_state, threading.Event()

    def slow(path: Path, *arguments: Any) -> Any:
        # Rank 1's disk; rank 0 must not begin another while it waits for the report.
        if path.name == "rank-0001.safetensors":
            assert released.wait(60)
        return write(path, *arguments)

    monkeypatch.setattr(checkpoint, "write_state", slow)

    def release(session: Session, record: Any) -> None:
        # In this order: the other rank may release it meanwhile.
        found = checkpoint.find_checkpoints(tmp_path)
        assert not found or released.is_set()
        if session.round == 8:
            released.set()

    results = run(2, tmp_path, num_epochs=3, on_round=release, settle=False)
    # The one that rank 1 held up was completed, and one more at the end.
    assert results[0]["counts"].skipped >= 6 and results[0]["counts"].written == 2
    assert checkpoint.find_checkpoints(tmp_path)[0].name == "round-00000009"
    spent = [record.stats["checkpoint_s"] for record in results[0]["records"]]
    assert (spent[1] > 0).all() and not spent[0].any() and not spent[5].any()


def test_by_default_writing_takes_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write_state
    monkeypatch.setattr(checkpoint, "write_state", lambda *arguments: time.sleep(0.2) or write(*arguments))
    written = []

    def watch(session: Session, record: Any) -> None:
        written.append((record.train_s, len(checkpoint.find_checkpoints(tmp_path))))
        time.sleep(0.05)

    monkeypatch.setattr(checkpointer, "MIN_SECONDS", 0.0)
    result = run(1, tmp_path, num_epochs=10, interval=None, keep=99, on_round=watch, settle=False)[0]
    assert written[-1][1] <= 1 + written[-1][0] / (0.2 / checkpointer.MAX_SHARE)
    # One at once, however late it is complete, and one at the end.
    assert result["counts"].written >= 2
    shutil.rmtree(tmp_path)
    monkeypatch.setattr(checkpointer, "MIN_SECONDS", 3600.0)
    # Only the one at the end.
    assert run(1, tmp_path, num_epochs=1, interval=None)[0]["counts"].written == 1


def test_own_objects_are_part_of_it(tmp_path: Path) -> None:
    class Count:
        def __init__(self) -> None:
            self.values: dict[Any, Any] = {"rank": None, (1, 2): torch.zeros(2)}

        def state_dict(self) -> dict[str, Any]:
            return self.values

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state

    counts: dict[tuple[str, int], Count] = {}

    def register(session: Session, names: tuple[str, ...] = ("own", "all")) -> None:
        for name in names:
            counts[name, session.rank] = Count()
            session.register_state(name, counts[name, session.rank], shared=name == "all")
        with pytest.raises(ValueError, match="'own' is taken"):
            session.register_state("own", Count())

    def change(session: Session, record: Any) -> None:
        counts["own", session.rank].values["rank"] = session.rank
        counts["all", session.rank].values["rank"] = "all"

    run(2, tmp_path, on_start=register, on_round=change)
    run(4, tmp_path, on_start=register, resume=True)
    assert [counts["own", rank].values["rank"] for rank in range(4)] == [0, 1, 0, 1]
    assert [counts["all", rank].values["rank"] for rank in range(4)] == ["all"] * 4
    with pytest.raises(AgreedError, match="it has no state of 'more'"):
        run(2, tmp_path, on_start=lambda session: register(session, ("own", "more")), resume=True)


@pytest.mark.parametrize("late", [False, True])
def test_a_saved_state_that_nobody_has_registered_is_named(tmp_path: Path, late: bool, caplog: pytest.LogCaptureFixture) -> None:
    def register(session: Session) -> None:
        session.schedule(torch.optim.lr_scheduler.StepLR(session.optimizer, 1), steps_per_epoch=2)

    run(2, tmp_path, on_start=register)

    def body(transport: LocalTransport) -> None:
        model = make_model()
        session = Session(model, make_adam(model), CONFIG, transport=transport)
        Checkpointer(session, tmp_path).resume()
        if late:
            said = r"holds a state of 'schedule 1', .* too late .* session.schedule .* before Checkpointer.resume\(\)"
            with pytest.raises(RuntimeError, match=said):
                register(session)
            return
        for num_epochs in (2, 3):
            for batch in session.batches(TensorDataset(X, Y), num_epochs=num_epochs):
                with session.step(batch):
                    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                    session.optimizer.step()

    LocalWorld(2).run(body)
    assert caplog.text.count("holds a state of 'schedule 1', for which nothing is registered") == (not late)


def test_a_shared_state_that_ranks_do_not_share_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Average:
        def __init__(self, rank: int) -> None:
            # Seconds differ; models must not.
            self.state = {"mean": torch.zeros(3), "array": np.zeros(2000), "seconds": rank / 3}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    averages: dict[tuple[str, int], Average] = {}

    def register(session: Session) -> None:
        for name in ("same", "tensor", "array", "own"):
            averages[name, session.rank] = Average(session.rank)
            session.register_state(name, averages[name, session.rank], shared=name != "own")

    def change(session: Session, record: Any) -> None:
        averages["tensor", session.rank].state["mean"][1] += 0.5 * session.rank
        averages["array", session.rank].state["array"][1000] += session.rank == 1
        averages["own", session.rank].state["mean"][1] += session.rank

    with caplog.at_level(logging.WARNING):
        run(2, tmp_path, num_epochs=2, on_start=register, on_round=change)
    warnings = sorted(record.getMessage() for record in caplog.records if "register_state" in record.getMessage())
    assert [w.split(",")[0] for w in warnings] == [f"register_state: {name!r} has shared=True" for name in ("array", "tensor")]
    assert all("ranks [1]" in w and "in session.records, after the merge" in w for w in warnings)


def test_another_number_of_samples_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    run(1, tmp_path, num_epochs=0.5)
    model = make_model()
    session = Session(model, make_adam(model), CONFIG, transport=LocalTransport())
    Checkpointer(session, tmp_path).resume()
    with pytest.raises(ValueError, match="as many samples as in the first part of this epoch, 300, got 200"):
        next(session.batches(TensorDataset(X[:200], Y[:200])))


def test_a_folder_that_not_all_ranks_see_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgreedError, match=r"rank 1: checkpoint folder .* cannot write where rank 0 can"):
        LocalWorld(2).run(lambda t: train(t, tmp_path / str(t.rank)))
    (tmp_path / "file").touch()
    with pytest.raises(AgreedError, match="file is a file, and not a folder"):
        run(2, tmp_path / "file")
    with pytest.raises(AgreedError, match="cannot be written"):
        run(2, tmp_path / "file" / "below")


def test_files_added_are_part_of_it_and_stay_as_they_were(tmp_path: Path) -> None:
    best = tmp_path / "best"

    def improve(session: Session, record: Any) -> None:
        if session.rank == 0:
            part = tmp_path / "best.part"
            part.write_text(f"model of round {session.round}")
            os.replace(part, best)

    run(2, tmp_path / "c", on_round=improve, files=lambda: [best])
    for path in checkpoint.find_checkpoints(tmp_path / "c"):
        checkpoint.check_files(path, checkpoint.read_manifest(path))
        assert (path / "best").read_text() == f"model of round {int(path.name[-8:])}"
    flip(tmp_path / "c" / "round-00000003" / "best")
    assert run(2, tmp_path / "c", resume=True)[0]["source"].name == "round-00000002"


def test_a_job_that_comes_later_takes_the_folder_over(tmp_path: Path) -> None:
    """Each would resume from the other's model, and remove its checkpoints."""

    def begin_another(session: Session, record: Any) -> None:
        if session.rank == 0 and session.round == 2:
            FolderOwner(tmp_path, "another-host").take()

    with pytest.raises(AgreedError, match=r"the last round, 3, .* another job .* on another-host, since .*; give each job a"):
        run(2, tmp_path, num_epochs=1, on_round=begin_another)
    assert [path.name for path in checkpoint.find_checkpoints(tmp_path)] == ["round-00000001"]
    # It has ended, and comes again.
    assert run(2, tmp_path, num_epochs=2, resume=True)[0]["counts"].failed == 0


def test_a_folder_is_taken_over_as_soon_as_the_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, later = FolderOwner(tmp_path, "host-a"), FolderOwner(tmp_path, "host-b")
    earlier.take()
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        later.take()
    assert earlier.lost_to() is None and later.lost_to() is None
    later.take()
    assert "on host-b" in (earlier.lost_to() or "") and later.lost_to() is None
    # No one takes it back.
    earlier.take()
    assert later.lost_to() is None


def test_a_later_job_has_the_folder_from_its_resume_on(tmp_path: Path) -> None:
    """Its first checkpoint may be far away, and the earlier job's would be the newest until then."""

    def begin_another(session: Session, record: Any) -> None:
        if session.rank == 0 and session.round == 2:
            owner = (tmp_path / ".owner").read_text()
            # The first only reads.
            for interval in (0, 100):
                assert (tmp_path / ".owner").read_text() == owner
                model = make_model()
                other = Session(model, make_adam(model), CONFIG, transport=LocalTransport())
                Checkpointer(other, tmp_path, interval=interval).resume(tmp_path / "round-00000001")

    with pytest.raises(AgreedError, match=r"the last round, 3, is not saved: another job writes in"):
        run(1, tmp_path, num_epochs=1, on_round=begin_another)
    assert [path.name for path in checkpoint.find_checkpoints(tmp_path)] == ["round-00000001"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_unexpected_failure_of_the_writer_is_the_reason_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(checkpoint, "commit", fail)
    with pytest.raises(AgreedError, match=r"the last round, 3, is not saved: 'unforeseen'\."):
        run(world_size, tmp_path, num_epochs=1)


def test_a_file_to_add_that_cannot_be_had_is_the_reason_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = [True, False, False]

    def files() -> list[Path]:
        if full.pop(0):
            raise OSError("best cannot be written: it is full")
        return []

    assert run(2, tmp_path, num_epochs=1, files=files)[0]["counts"] == Counts(written=2, failed=1)
    assert "checkpoint of round 1 was not written: rank 0: best cannot be written: it is full" in caplog.text


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    run(2, folder, num_epochs=1)
    assert run(2, folder, num_epochs=2, resume=True)[0]["source"] == folder / "round-00000003"


def test_saving_on_demand(tmp_path: Path) -> None:
    model = make_model()
    session = Session(model, make_adam(model), CONFIG, transport=LocalTransport())
    checkpoints = Checkpointer(session, tmp_path, interval=100)
    assert checkpoints.save() and checkpoints.save()
    assert [path.name for path in checkpoint.find_checkpoints(tmp_path)] == ["round-00000000"]
    shutil.rmtree(tmp_path)
    tmp_path.write_text("")
    assert not checkpoints.save() and checkpoints.counts.failed == 1
    tmp_path.unlink()
    with pytest.raises(ValueError, match="interval must be >= 0"):
        Checkpointer(session, tmp_path, interval=-1)
    with pytest.raises(ValueError, match="keep must be >= 1"):
        Checkpointer(session, tmp_path, keep=0)


def test_an_abandoned_run_directory_leaves_what_was_there(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    for path, left in ((tmp_path / "a" / "b" / "run", []), (kept / "run", []), (kept, ["notes.txt"])):
        for _ in range(2):
            directory = RunDirectory(path)
            directory.write_config(Config(), TrainConfig())
            (path / "checkpoints").mkdir()
            directory.abandon()
        assert sorted(p.name for p in path.glob("*")) == left and path.exists() == bool(left)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept"]
    directory = RunDirectory(kept / "run")
    directory.add_round({"round": 0})
    directory.close()
    with pytest.raises(ValueError, match="holds a run already"):
        RunDirectory(kept / "run")
    RunDirectory(kept / "run", resume=True).abandon()
    assert (kept / "run" / "rounds.jsonl").read_text() == '{"round": 0}\n'


def test_a_later_job_has_the_run_directory_as_soon_as_it_writes_there(tmp_path: Path) -> None:
    run, model = tmp_path / "run", make_model()
    earlier = RunDirectory(run)
    earlier.write_config(Config(), TrainConfig())
    for number in range(3):
        earlier.add_round({"round": number})
    # One that is refused.
    RunDirectory(run, resume=True).abandon()
    earlier.save_best(model, {}, 2)
    later = RunDirectory(run, resume=True)
    later.go_on(1, None)
    later.add_round({"round": 1, "job": "later"})
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for write in (
        lambda: earlier.add_round({"round": 3}), lambda: earlier.write_summary({}), earlier.close,
        lambda: earlier.save_best(model, {}, 3), lambda: earlier.save_model("model-last.safetensors", model, {}),
    ):  # fmt: skip
        with pytest.raises(FolderLostError, match=rf"another job writes in {run} \(process {os.getpid()} on .*; give each job a"):
            write()
    earlier.abandon()
    later.close()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert before["rounds.jsonl"] == b'{"round": 0}\n{"round": 1, "job": "later"}\n'


@pytest.mark.root
def test_a_best_model_that_a_full_disk_refuses_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best, later = nn.Linear(64, 64), nn.Linear(64, 64)
    expected = {name: value.clone() for name, value in best.state_dict().items()}
    with small_disk(tmp_path / "disk", 64) as disk:
        directory = RunDirectory(disk / "run")
        directory.save_best(later, {}, 1)
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        directory.save_best(best, {}, 3)
        assert "the best model so far, of round 3, is in memory only: " in caplog.text and "No space left" in caplog.text
        best.load_state_dict(later.state_dict())
        with pytest.raises(OSError, match=r"model.safetensors cannot be written: .*No space left"):
            directory.write_best()
        assert not list((disk / "run").glob(".part*"))
        # A checkpoint takes it from where there is room.
        with pytest.raises(OSError, match="No space left"):
            directory.best_files(None)
        spare = tmp_path / "memory"
        assert directory.best_files(spare) == [spare / BEST_MODEL] and load_model(spare)[0].keys() == expected.keys()
        written = (spare / BEST_MODEL).stat().st_mtime_ns
        assert directory.best_files(spare) == [spare / BEST_MODEL] and (spare / BEST_MODEL).stat().st_mtime_ns == written
        (disk / "filler").unlink()
        assert directory.best_files(spare) == [disk / "run" / BEST_MODEL] and not (spare / BEST_MODEL).exists()
        directory.write_best()
        assert all(torch.equal(value, expected[name]) for name, value in load_model(disk / "run")[0].items())
        # It is on the disk now, and not written again.
        written = (disk / "run" / BEST_MODEL).stat().st_ino
        directory.write_best()
        assert (disk / "run" / BEST_MODEL).stat().st_ino == written
        # Whoever moves or removes the folder does not lose it.
        os.rename(disk / "run", disk / "moved")
        assert directory.best_files(None) == [disk / "run" / BEST_MODEL]
        assert (disk / "run" / BEST_MODEL).read_bytes() == (disk / "moved" / BEST_MODEL).read_bytes()
        # Unless the folder is another job's by now.
        shutil.rmtree(disk / "run")
        (disk / "run").mkdir()
        FolderOwner(disk / "run", "b").take()
        with pytest.raises(FolderLostError):
            directory.write_best()
        (disk / "run" / ".owner").unlink()
        # Others may read a model as they may any file here. What a killed process has left of one goes.
        (left := disk / "run" / f".part-{BEST_MODEL}").mkdir()
        (left / ".tmpaBcDeF").write_bytes(bytes(100))
        directory.save_model(BEST_MODEL, nn.Linear(2, 2), {})
        assert not left.exists()
        directory.write_summary({})
        assert (disk / "run" / BEST_MODEL).stat().st_mode == (disk / "run" / "summary.json").stat().st_mode
        directory.close()


def test_rounds_that_a_full_disk_refuses_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.add_round({"round": 0})
    rounds, disk = tmp_path / "run" / "rounds.jsonl", tmp_path / "disk"
    rounds.rename(disk)
    rounds.symlink_to("/dev/full")
    for number in (1, 2):
        directory.add_round({"round": number})
    assert caplog.text.count("rounds.jsonl cannot be written: [Errno 28] No space left on device") == 1
    disk.rename(rounds)
    directory.add_round({"round": 3})
    directory.close()
    assert [json.loads(line)["round"] for line in rounds.read_text().splitlines()] == [0, 1, 2, 3]


def test_a_run_directory_that_is_moved_or_removed_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    directory = RunDirectory(run)
    directory.write_config(Config(), TrainConfig())
    config = (run / "config.json").read_text()
    for number in range(5):
        if number == 2:
            run.rename(moved)
        if number == 3:
            # As the next checkpoint does.
            shutil.rmtree(run)
            (run / "checkpoints").mkdir(parents=True)
        directory.add_round({"round": number})
    directory.write_summary({})
    directory.close()
    assert (moved / "rounds.jsonl").read_text() == '{"round": 0}\n{"round": 1}\n'
    assert (run / "rounds.jsonl").read_text() == '{"round": 3}\n{"round": 4}\n'
    assert (run / "config.json").read_text() == config and (run / ".owner").exists()
    assert caplog.text.count("rounds.jsonl was moved or removed during the run") == 2


def test_a_sink_that_a_full_disk_refuses_gets_no_more_rounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sink:
        def __init__(self, *calls: str) -> None:
            self.fails_at = calls
            self.calls: list[Any] = []

        def add_round(self, record: dict[str, Any]) -> None:
            self.call(record["round"])

        def close(self) -> None:
            self.call("close")

        def call(self, name: Any) -> None:
            self.calls.append(name)
            if name in self.fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")

    sinks = [Sink(1, 2), Sink("close"), Sink()]
    directory = RunDirectory(tmp_path / "run", sinks=sinks)
    for number in range(3):
        directory.add_round({"round": number})
    assert caplog.text.count("Sink cannot write, and gets no more rounds: [Errno 28] No space left on device") == 1
    directory.close()
    assert [sink.calls for sink in sinks] == [[0, 1], [0, 1, 2, "close"], [0, 1, 2, "close"]]
    assert caplog.text.count("Sink cannot write") == 2
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 3


@pytest.mark.root
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        directory = RunDirectory(disk / "run")
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        with pytest.raises(OSError, match=r"No space left on device: '\S+run/summary.json'"):
            directory.write_summary({"text": "x" * 10_000})
        (disk / "filler").unlink()
        directory.write_summary({"samples": 1})
        assert json.loads((disk / "run" / "summary.json").read_text()) == {"samples": 1}
        directory.close()


def test_the_first_checkpoint_finds_its_memory_after_the_first_round(tmp_path: Path) -> None:
    places: list[dict[str, int]] = []

    def look(session: Session, record: Any) -> None:
        saver = session.records[-1].__self__
        if session.round == 2:
            saver._reserving.join()
            assert not any(tensor.any() for part in saver._copies.values() for tensor in part.values())
        tensors = {name: tensor for part in saver._copies.values() for name, tensor in part.items()}
        # Some measurements become more with every round.
        places.append({name: tensor.data_ptr() for name, tensor in tensors.items() if ".measured" not in name})

    run(1, tmp_path, interval=3, num_epochs=2, on_round=look)
    # Called before the checkpointer's own callable: what it did after the first round is seen after the second.
    assert not places[0] and places[1] and places[1] == places[2] == places[3]


def test_a_file_that_is_on_another_disk_makes_no_checkpoint(tmp_path: Path) -> None:
    """As where a disk that all hosts had shared is gone, and each has made the folder on its own."""
    part = tmp_path / ".part-1-round-00000001"
    part.mkdir()
    with pytest.raises(FileNotFoundError, match=r"rank-0001\.safetensors"):
        checkpoint.commit(part, tmp_path / "round-00000001", {"rank-0001.safetensors": checkpoint.Written(1, "")}, {})
    assert checkpoint.find_checkpoints(tmp_path) == []
