"""Strategy ``local`` with encoded deltas: equal bits on all ranks, fewer bytes, a loss that stays small, and a resume."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_adaptive.comm.protocols import AgreedError
from hvd_adaptive.comm.threads import LocalTransport, LocalWorld
from hvd_adaptive.config import Config
from hvd_adaptive.engine import merge_codec
from hvd_adaptive.engine.flat_model import model_hash
from hvd_adaptive.engine.merge import Merge, MergeStats
from hvd_adaptive.exchange.exchange import Exchange
from hvd_adaptive.session.session import Session

_generator = torch.Generator().manual_seed(0)
X = torch.randn(900, 40, generator=_generator)
Y = (X[:, :5].sum(dim=1) > 0).long()


def make_model() -> nn.Module:
    # Simulated ranks are threads of one process, whose random generator they share.
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def train(
    transport: LocalTransport, *, state: Any = None, num_epochs: float = 2, stop_at: int = 0, **options: Any
) -> dict[str, Any]:
    """The state is that after round ``stop_at``, where fragments still are on the way, or the last."""
    model = make_model()
    # One weight a rank: a mass for each of these short rows would be more bytes than their codes.
    fixed = {"batch_size": 15, "mega_batch": 150, "hash_interval": 1, "dispatch": "equal", "merge_weights": "updates"}
    options = {**fixed, **options}
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Config(**options), transport=transport)
    if state is not None:
        session.load_state_dict(state[transport.rank])
    records: list[Any] = []
    session.records.append(records.append)
    kept: list[Any] = []

    def keep(record: Any) -> None:
        if session.round == stop_at:
            kept.append(copy.deepcopy(session.state_dict()))
            session.stop(agreed=True)

    session.records.append(keep)
    for batch in session.batches(TensorDataset(X, Y), num_epochs=num_epochs):
        with session.step(batch):
            session.optimizer.zero_grad()
            batch.loss = nn.functional.cross_entropy(model(batch.x), batch.y)
            batch.loss.backward()
            session.optimizer.step()
    saved = kept[0] if kept else session.state_dict()
    session.close()
    return {"records": records, "hash": model_hash(model), "state": saved, "loss": records[-1].loss, "model": model}


@functools.cache
def plain_run(world_size: int, **options: Any) -> dict[str, Any]:
    """Of rank 0: what codecs that lose something are compared with."""
    return LocalWorld(world_size).run(lambda t: train(t, **options))[0]


@pytest.mark.parametrize(
    ("codec", "largest_share", "world_size"),
    [
        ("fp16", 0.54, 3), ("maxmin:8", 0.33, 2), ("maxmin:4", 0.21, 3), ("maxmin:4", 0.21, 2), ("normal:2", 0.15, 3),
        ("topk:0.05", 0.2, 2), ("topk:0.05", 0.2, 3), ("powersgd:2", 0.2, 2), ("powersgd:2", 0.2, 3),
    ],
)  # fmt: skip
def test_fewer_bytes_and_equal_models(codec: str, largest_share: float, world_size: int) -> None:
    plain = plain_run(world_size)
    ours = LocalWorld(world_size).run(lambda t: train(t, compression=codec))
    assert len({result["hash"] for result in ours}) == 1
    assert ours[0]["hash"] != plain["hash"], "nothing was encoded"
    share = ours[0]["records"][0].payload_bytes / plain["records"][0].payload_bytes
    assert 0.02 < share < largest_share
    assert ours[0]["loss"] < 0.8 * ours[0]["records"][0].loss
    assert ours[0]["loss"] < plain["loss"] + 0.1


@pytest.mark.parametrize("codec", ["maxmin:4", "powersgd:2"])
def test_fragments_are_encoded_and_lose_no_progress(codec: str) -> None:
    options = {"merge_fragments": 2, "outer_step": "none"}
    plain, exact = plain_run(3, **options), plain_run(3, compression="maxmin:4; *=none", **options)
    ours = LocalWorld(3).run(lambda t: train(t, compression=codec, **options))
    for a, b in zip(plain["model"].parameters(), exact["model"].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert len({result["hash"] for result in ours}) == 1 and ours[0]["hash"] != plain["hash"]
    assert ours[0]["records"][0].payload_bytes < 0.25 * plain["records"][0].payload_bytes
    assert ours[0]["loss"] < plain["loss"] + 0.1 and ours[0]["loss"] < 0.8 * ours[0]["records"][0].loss


@pytest.mark.parametrize("fragments", [1, 2])
def test_none_is_the_plain_merge(fragments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes through an exchange of codecs, not even unencoded."""

    def refuse(self: Exchange, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("an exchange of codecs")

    monkeypatch.setattr(Exchange, "__init__", refuse)
    results = LocalWorld(2).run(lambda t: train(t, compression="none", merge_fragments=fragments))
    assert len({result["hash"] for result in results}) == 1 and results[0]["loss"] < 0.8 * results[0]["records"][0].loss
    with pytest.raises(RuntimeError, match="an exchange of codecs"):
        LocalWorld(2).run(lambda t: train(t, compression="maxmin:4; *=none", merge_fragments=fragments))


def test_what_a_codec_loses_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    """With residuals the models stay closer to the uncompressed run than without, of which a warning tells."""
    plain, fed, unfed = (
        LocalWorld(2).run(lambda t: train(t, outer_step="none", **o))[0]["model"]  # noqa: B023
        for o in ({}, {"compression": "topk:0.02"}, {"compression": "topk:0.02", "error_feedback": False})
    )

    def distance(model: nn.Module) -> float:
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return sum(float((a - b).detach().square().sum()) for a, b in pairs)

    assert distance(fed) < distance(unfed)
    assert [r.message for r in caplog.records if "error feedback" in r.message] == [
        "compression: topk:0.02 loses accuracy without error feedback; leave error_feedback on"
    ]


@pytest.mark.parametrize(("options", "specs"), [({}, ["maxmin:4", "normal:2"]), ({"compression": "maxmin:4"}, ["maxmin:4"] * 2)])
def test_a_codec_that_nobody_chose_has_fewer_bits_on_a_narrow_link(
    options: dict[str, Any], specs: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merge_codec, "chosen_codec", lambda codec, *_, **__: codec)

    def body(transport: LocalTransport) -> tuple[list[str], list[bool], str]:
        model = make_model()
        merge = Merge(model, torch.optim.AdamW(model.parameters()), Config(batch_size=15, **options), transport)
        compressed, found, can = merge.flat_model.compressed, [], []
        assert compressed is not None
        for narrow in (False, True, True):
            merge.begin_round(1, narrow=narrow)
            found.append(compressed.policy.spec.split(",")[0])
            can.append(merge.codec.can_narrow)
            for parameter in model.parameters():
                parameter.data += 0.01 * (transport.rank + 1)
            stats = MergeStats(batch_size=15.0, num_updates=1.0, num_samples=15.0)
            merge.measure_(stats)
            gathered = stats.gather(transport.allgather_stats)
            merge.apply_(gathered, merge.weights(gathered))
        return found, can, model_hash(model)

    results = LocalWorld(2).run(body)
    assert len({digest for _, _, digest in results}) == 1
    changes = specs[0] != specs[1]
    assert all((found, can) == ([specs[0], specs[1], specs[1]], [changes, False, False]) for found, can, _ in results)
    told = [r.message for r in caplog.records if "from here on" in r.message]
    assert told == changes * [
        "compression: merges are encoded as normal:2 from here on, as they take long as maxmin:4. Set compression 'maxmin:4' to "
        "keep that"
    ]


@pytest.mark.parametrize("codec", ["maxmin:2", "powersgd:2"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_resume_goes_on_with_the_residuals(codec: str, fragments: int) -> None:
    # The order of claims and all seconds are out of play: parts are fixed, and no rule looks at speeds.
    options = {"compression": codec, "merge_fragments": fragments, "outer_step": "nesterov" if fragments == 1 else "none"}
    whole = LocalWorld(2).run(lambda t: train(t, num_epochs=2, stop_at=6, **options))
    first = LocalWorld(2).run(lambda t: train(t, num_epochs=2, stop_at=3, **options))
    states = [result["state"] for result in first]
    second = LocalWorld(2).run(lambda t: train(t, num_epochs=2, stop_at=6, state=states, **options))
    assert second[0]["hash"] == whole[0]["hash"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "maxmin:4; decoder*=none"}, r"no tensor's name matches 'decoder\*'; the names are 0.weight"),
        ({"compression": "maxmin:4", "reducer": "allreduce"}, "not linear"),
    ],
)
def test_bad_policies_are_refused_on_all_ranks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AgreedError, match=message):
        LocalWorld(2).run(lambda t: train(t, **options))


def test_a_rank_that_is_not_finite_contributes_nothing() -> None:
    def poison(transport: LocalTransport) -> Any:
        model = make_model()
        config = Config(batch_size=15, mega_batch=150, hash_interval=1, dispatch="equal", compression="maxmin:4")
        session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), config, transport=transport)
        for batch in session.batches(TensorDataset(X, Y), num_epochs=1):
            with session.step(batch):
                session.optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                session.optimizer.step()
            if session.rank == 1 and session.round == 1:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
        session.close()
        return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])

    values = LocalWorld(2).run(poison)
    assert np.isfinite(values[0]).all() and np.array_equal(values[0], values[1])
