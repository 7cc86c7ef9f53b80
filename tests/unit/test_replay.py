"""Record and replay over simulated ranks: a replay repeats the bits, from any round on, and says where it cannot."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.replay import RecordingFile
from hvd_adaptive.session.session import Session

X = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(dim=1) > 0).long())
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
OPTIONS: dict[str, Any] = {
    "batch_size": 16, "mega_batch": 160, "batch_size_rule": "paper", "batch_size_step": 1.0, "min_batch_size": 4,
    "max_batch_size": 64, "hash_interval": 1, "outer_step": "none", "num_threads": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def train(
    transport: LocalTransport,
    *,
    file: Path | None = None,
    model: nn.Module = MODEL,
    data: Dataset[Any] = DATA,
    num_epochs: float = 3,
    lr: float = 0.1,
    before: Callable[[Session], None] = lambda session: None,
    on_batch: Callable[[Session], None] = lambda session: None,
    memory: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    model = copy.deepcopy(model)
    config = Config(**{**OPTIONS, **options})
    session = Session(model, torch.optim.SGD(model.parameters(), lr=lr), config, transport=transport)
    before(session)
    records: list[Any] = []
    session.records.append(records.append)
    if file is not None and transport.rank == 0:
        session.records.append(RecordingFile(file, session.identity))
    for batch in session.batches(data, num_epochs=num_epochs):
        on_batch(session)
        with session.step(batch):
            if memory is not None and transport.rank == 1 and batch.num_samples > memory:
                raise torch.OutOfMemoryError("CUDA out of memory")
            session.optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            session.optimizer.step()
    session.close()
    return {
        "session": session, "model": model, "hashes": [r.model_hash for r in records],
        "claims": [r.claims for r in records],
    }  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("recorded") / "claims.jsonl"
    slowdown = "3,2,1"
    result = LocalWorld(3).run(lambda t: train(t, file=file, record=True, slowdown=slowdown))[0]
    assert model_hash(result["model"]) == result["hashes"][-1] and len(result["hashes"]) == 9
    return {**result, "file": file}


@pytest.fixture
def recorded(original: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A recorded run, whose file the test may change."""
    return {**original, "file": Path(shutil.copy(original["file"], tmp_path))}


def replay(recorded: dict[str, Any], num_ranks: int = 3, **options: Any) -> dict[str, Any]:
    return LocalWorld(num_ranks).run(lambda t: train(t, replay=str(recorded["file"].parent), **options))[0]


def test_a_replay_repeats_every_round(recorded: dict[str, Any], tmp_path: Path) -> None:
    # The other way round: without the recording, ranks would claim otherwise.
    for slowdown in (None, "1,2,3"):
        again = replay(recorded, slowdown=slowdown)
        assert again["hashes"] == recorded["hashes"]
        assert again["claims"] == recorded["claims"]
    sizes = [tuple(claims.batch_size) for claims in recorded["claims"]]
    assert len(set(sizes)) > 2
    again = replay(recorded, record=True, file=tmp_path / "again.jsonl")
    lines = [(tmp_path / name).read_text().splitlines()[1:] for name in ("claims.jsonl", "again.jsonl")]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("dispatch", ["dynamic", "proportional"])
def test_a_replay_sends_fragments_where_they_were_sent(dispatch: str, tmp_path: Path) -> None:
    file = tmp_path / "claims.jsonl"
    # Not BatchNorm: on a busy machine a part by speed may end with a batch of one.
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    options = {"merge_fragments": 2, "fragment_delay": 0.5, "dispatch": dispatch, "model": model}
    result = LocalWorld(3).run(lambda t: train(t, file=file, record=True, slowdown="3,2,1", **options))[0]
    again = replay({**result, "file": file}, slowdown="1,2,3", **options)
    assert again["hashes"] == result["hashes"] and model_hash(again["model"]) == model_hash(result["model"])


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_a_round_that_a_signal_closed_is_repeated_as_far_as_it_went(
    num_fragments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "claims.jsonl"
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    options = {"merge_fragments": num_fragments, "mega_batch": 250, "model": model}

    def close(session: Session) -> None:
        if session.round == 1:
            monkeypatch.setattr(session.preemption, "signal_number", 15)

    result = LocalWorld(3).run(lambda t: train(t, file=file, record=True, on_batch=close, **options))[0]
    closed = result["claims"][1]
    assert len(result["claims"]) == 2 and closed.num_samples < closed.num_planned
    monkeypatch.setattr(result["session"].preemption, "signal_number", 0)
    again = replay({**result, "file": file}, **options)
    assert again["hashes"] == result["hashes"] and again["claims"] == result["claims"]


def test_batches_cut_for_want_of_memory_are_cut_again(tmp_path: Path) -> None:
    file = tmp_path / "claims.jsonl"
    # Not BatchNorm, which refuses a batch of one.
    model = nn.Linear(6, 2)
    result = LocalWorld(3).run(lambda t: train(t, file=file, record=True, memory=6, model=model))[0]
    recorded = {**result, "file": file}
    cut = [claim for claims in recorded["claims"] for claim in claims.claims[1] if len(claim) > 2]
    assert cut and all(sum(claim[2:]) == claim[1] - claim[0] and max(claim[2:]) <= 6 for claim in cut)
    again = replay(recorded, model=model)
    assert again["hashes"] == recorded["hashes"] and again["claims"] == recorded["claims"]
    # In the first round in which the rank has a claim.
    with pytest.raises(AgreedError, match=r"claims of round \d+ is .* and was"):
        replay(recorded, memory=2, model=model)


def test_a_replay_ends_where_its_recording_does(recorded: dict[str, Any]) -> None:
    lines = recorded["file"].read_text().splitlines()
    # The last line was cut off.
    recorded["file"].write_text("\n".join([*lines[:4], lines[4][:20]]))
    assert replay(recorded, num_epochs=9)["hashes"] == recorded["hashes"][:3]


def test_a_replay_starts_at_any_round(recorded: dict[str, Any]) -> None:
    first = replay(recorded, num_epochs=1)
    done = first["session"]

    def resume(session: Session) -> None:
        session.ledger, session.round = done.ledger, done.round

    again = replay(recorded, before=resume, model=first["model"])
    assert first["hashes"] + again["hashes"] == recorded["hashes"]


def test_batch_sizes_and_rounds_come_from_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules may follow from seconds, which a replay does not have: here they follow from what only the recorded run does."""

    def rebalance(session: Session) -> None:
        strategy = session._strategy
        strategy._rebalance = lambda _: setattr(  # type: ignore[attr-defined]
            strategy, "_sizes", np.roll([8.0, 16.0, 24.0], session.round)
        )

    file = tmp_path / "claims.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(
            "hvd_adaptive.session.session.round_size",
            lambda cursor, *, dataset_size, mega_batch, unit: min(70 + cursor // 2, dataset_size - cursor),
        )
        first = LocalWorld(3).run(lambda t: train(t, file=file, before=rebalance, record=True))[0]
    assert len({claims.num_samples for claims in first["claims"]}) > 2
    assert len({tuple(claims.batch_size) for claims in first["claims"]}) > 2
    assert replay({"file": file})["hashes"] == first["hashes"]


def change(recorded: dict[str, Any], number: int, edit: Callable[[dict[str, Any]], None]) -> None:
    lines = recorded["file"].read_text().splitlines()
    value = json.loads(lines[1 + number])
    edit(value)
    lines[1 + number] = json.dumps(value)
    recorded["file"].write_text("\n".join(lines) + "\n")


def busiest(value: dict[str, Any]) -> int:
    """The rank with most claims in a round: four or more, of ten or more."""
    return max(range(3), key=lambda rank: len(value["claims"][rank]))


def test_a_claim_of_another_rank_is_seen(recorded: dict[str, Any]) -> None:
    def give(value: dict[str, Any]) -> None:
        giver = busiest(value)
        value["claims"][giver - 1].append(value["claims"][giver].pop())

    change(recorded, 4, give)
    with pytest.raises(AgreedError, match=r"(lr|weight) of round 4 is .* and was"):
        replay(recorded)


def test_two_claims_in_another_order_are_seen_by_the_hash(recorded: dict[str, Any]) -> None:
    def swap(value: dict[str, Any]) -> None:
        claims = value["claims"][busiest(value)]
        claims[0], claims[1] = claims[1], claims[0]

    change(recorded, 2, swap)
    with pytest.raises(AgreedError, match=r"model_hash of round 2 is \w+ and was"):
        replay(recorded)


def test_another_first_model_is_seen_by_the_hash(recorded: dict[str, Any]) -> None:
    with pytest.raises(AgreedError, match="model_hash of round 0"):
        replay(recorded, model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))


def test_claims_that_do_not_cover_the_round_are_refused(recorded: dict[str, Any]) -> None:
    original = recorded["file"].read_text()
    change(recorded, 1, lambda value: value["claims"][busiest(value)].pop(0))
    with pytest.raises(AgreedError, match=r"line 3 of .*: the claims of round 1 overlap or leave gaps"):
        replay(recorded)
    recorded["file"].write_text(original)

    def drop_last(value: dict[str, Any]) -> None:
        last = max(claim for rank in value["claims"] for claim in rank)
        for rank in value["claims"]:
            if last in rank:
                rank.remove(last)

    change(recorded, 1, drop_last)
    with pytest.raises(AgreedError, match=r"claims of round 1 make .* samples instead of"):
        replay(recorded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 2}, "ranks' devices and threads is"),
        ({"seed": 1}, "configuration seed is 1 and was 0"),
        ({"lr": 0.2}, "optimizer groups is"),
        ({"num_threads": 2}, "configuration num_threads is 2 and was 1"),
        ({"data": TensorDataset(X[:400], X[:400, 0])}, "the data are 400 samples"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_is_refused(recorded: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(AgreedError, match=message):
        replay(recorded, **options)


def test_files_that_are_no_recordings_are_refused(recorded: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AgreedError, match=r"claims\.jsonl is not there; name the directory of a run"):
        replay({"file": tmp_path / "other" / "claims.jsonl"})
    lines = recorded["file"].read_text().splitlines()
    for text, message in (
        ("\n".join([*lines[:2], "{}"]) + "\n", "line 3 of .* is not of a recording"),
        ("\n".join(lines[1:]) + "\n", "does not say which run it is of"),
    ):
        recorded["file"].write_text(text)
        with pytest.raises(AgreedError, match=message):
            replay(recorded)


@pytest.mark.parametrize("options", [{"strategy": "horovod"}, {"logical_ranks": 2}])
def test_runs_without_claims_are_not_recorded(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="record needs strategy local without logical_ranks"):
        Config(record=True, **options)
